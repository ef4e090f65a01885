"""What the hub counts of the messages of its agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.events.build import (
    FactsAboutEndedEvent,
    Origin,
    change_event,
    common_event_data,
    determine_outcome,
)
from relay.events.cloudevent import CloudEvent
from relay.events.model import Document, ScheduledEvent, diff_events_with_document
from relay.fleet.hub.hub import Hub
from relay.fleet.hub.link import CumulativeAcknowledger, HubLink
from relay.fleet.routing import report_key
from relay.fleet.settings import TrustDomain
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import open_store
from tests.approvals.builders import build_event
from tests.clocks import NOON, ManualClock
from tests.fleet.test_hub_heard import AGENT, SETTINGS, ignore, pulse


def report(
    event: ScheduledEvent, origin: Origin, *, is_gone: bool = False, at: datetime = NOON
) -> DeliveredMessage:
    """The report of an agent that it sees a new event, or that it sees it no more."""
    before, after = ((event,), ()) if is_gone else ((), (event,))
    (change,) = diff_events_with_document(before, Document(1, after))
    evidence = FactsAboutEndedEvent(start_sent=False, gap=False, rebooted=False)
    told = change_event(
        change,
        origin,
        at,
        data=common_event_data(event, 1),
        previous_count=0,
        approved_by_relay=False,
        outcome=determine_outcome(event, evidence, at) if is_gone else None,
    )
    deliver = Basic.Deliver(
        "tag",
        1,
        exchange="azure.scheduledevents.fleet",
        routing_key=report_key(told, origin),
    )
    header = ContentHeader(0, 2, Basic.Properties(user_id="vmss-a"))
    return DeliveredMessage(deliver, header, told.body, cast("AbstractChannel", None))


async def test_reports_copies_and_pulses_are_counted(tmp_path: Path) -> None:
    clock = ManualClock()
    owner = StateFileScopeAndVm("hub", None, is_hub=True)
    async with open_store(
        StoreSettings(path=tmp_path / "hub.db"), owner, clock, lambda _: ()
    ) as store:
        hub = Hub(SETTINGS, Origin("hub", "hub-0"), store, clock, ignore, ignore)
        await hub.load()
        settlements = CumulativeAcknowledger(cast("Any", None), cast("Any", None))
        await hub.take_pulses([pulse(seconds=0), pulse(seconds=1)])
        assert (hub.reports, hub.redundant_reports, hub.pulses) == (0, 0, 2)
        await hub.take_messages_except_pulses([report(build_event(), AGENT)], settlements)
        assert (hub.reports, hub.redundant_reports) == (1, 0)
        other = Origin(AGENT.scope, "vm-1")
        await hub.take_messages_except_pulses(
            [report(build_event(), other), report(build_event("E-2"), other)], settlements
        )
        assert (hub.reports, hub.redundant_reports) == (3, 1)
        await hub.take_pulses([pulse(build_event(), build_event("E-2"), seconds=2)])
        assert (hub.reports, hub.redundant_reports, hub.pulses) == (3, 1, 3)


class WitnessedEvent:
    """A hub that has the report of vm-0 about an event."""

    def __init__(self, hub: Hub, clock: ManualClock) -> None:
        self.event = build_event()
        self.hub = hub
        self._clock = clock

    @property
    def showing(self) -> set[str]:
        """The agents that show the event, as far as the hub knows."""
        return set(
            self.hub.agents_seeing_current_state(
                AGENT.scope, f"{self.event.lowercase_event_id}@{AGENT.scope}"
            )
            or ()
        )

    async def report(self, *, is_gone: bool = False) -> None:
        """Let vm-0 report the event."""
        settlements = CumulativeAcknowledger(cast("Any", None), cast("Any", None))
        message = report(self.event, AGENT, is_gone=is_gone, at=self._clock.now())
        await self.hub.take_messages_except_pulses([message], settlements)

    async def pulse(
        self, number: int, clock_offset: float = 0.0, *, name: str = "vm", user: str = "vmss-a"
    ) -> None:
        """Let an agent send a pulse that shows the event."""
        origin = Origin(AGENT.scope, f"{name}-{number}")
        seconds = (self._clock.now() - NOON).total_seconds()
        message = pulse(
            self.event, seconds=seconds, origin=origin, clock_offset=clock_offset, user=user
        )
        await self.hub.take_pulses([message])


@asynccontextmanager
async def witnessed_event(directory: Path, clock: ManualClock) -> AsyncIterator[WitnessedEvent]:
    """Run a hub to which vm-0 has reported an event."""
    owner = StateFileScopeAndVm("hub", None, is_hub=True)
    settings = StoreSettings(path=directory / "hub.db")
    async with open_store(settings, owner, clock, lambda _: ()) as store:
        hub = Hub(SETTINGS, Origin("hub", "hub-0"), store, clock, ignore, ignore)
        await hub.load()
        witnessed = WitnessedEvent(hub, clock)
        await witnessed.report()
        clock.advance(1)
        yield witnessed


async def test_the_end_of_an_event_waits_for_few_of_the_agents_that_pulse(tmp_path: Path) -> None:
    """Each agent that the hub awaits must report the end. Of 50 that would be 50 copies."""
    clock = ManualClock()
    async with witnessed_event(tmp_path, clock) as witnessed:
        await witnessed.pulse(1, clock_offset=30.0)  # it cannot act, so the hub needs others
        for number in range(2, 50):
            await witnessed.pulse(number)
        assert witnessed.showing == {"vm-0", "vm-1", "vm-2", "vm-3", "vm-4"}
        await witnessed.pulse(2, clock_offset=30.0)  # this one cannot act any more
        await witnessed.pulse(17)
        assert witnessed.showing == {"vm-0", "vm-1", "vm-2", "vm-3", "vm-4", "vm-17"}
        clock.advance(200)  # all of them are silent
        await witnessed.pulse(40)
        assert witnessed.showing == {"vm-0", "vm-1", "vm-2", "vm-3", "vm-4", "vm-17", "vm-40"}


async def test_each_agent_may_object_to_the_end_of_an_event(tmp_path: Path) -> None:
    """The few that are known to show it may just have died. A pulse at once is no objection."""
    clock = ManualClock()
    async with witnessed_event(tmp_path, clock) as witnessed:
        for number in range(1, 5):
            await witnessed.pulse(number)
        clock.advance(1)
        await witnessed.report(is_gone=True)
        assert witnessed.showing == {"vm-1", "vm-2", "vm-3"}
        clock.advance(0.9)
        await witnessed.pulse(30)
        assert witnessed.showing == {"vm-1", "vm-2", "vm-3"}
        clock.advance(0.1)
        await witnessed.pulse(30)
        assert witnessed.showing == {"vm-1", "vm-2", "vm-3", "vm-30"}


async def test_agents_of_another_domain_do_not_hide_an_event_from_the_hub(tmp_path: Path) -> None:
    """Else three of them could show an event, and end it while the others still show it."""
    clock = ManualClock()
    async with witnessed_event(tmp_path, clock) as witnessed:
        witnessed.hub.use_trust_domains(
            [
                TrustDomain(user="vmss-a", scopes=("vmss-a-*",), relays=("vm-*",)),
                TrustDomain(user="other", scopes=("vmss-a-*",), relays=("db-*",)),
            ]
        )
        for number in range(5):
            await witnessed.pulse(number, name="db", user="other")
        assert witnessed.showing == {"vm-0", "db-0", "db-1", "db-2"}
        for number in range(1, 5):
            await witnessed.pulse(number)
        assert witnessed.showing == {"vm-0", "db-0", "db-1", "db-2", "vm-1", "vm-2", "vm-3"}


async def test_an_agent_objects_though_the_clock_of_the_hub_was_set_back(tmp_path: Path) -> None:
    clock = ManualClock()
    async with witnessed_event(tmp_path, clock) as witnessed:
        for number in range(1, 4):
            await witnessed.pulse(number)
        clock.advance(1)
        await witnessed.report(is_gone=True)
        clock.advance(2)
        clock.set_wall_clock(clock.now() - timedelta(seconds=60))
        await witnessed.pulse(30)
        assert witnessed.showing == {"vm-1", "vm-2", "vm-3", "vm-30"}


async def test_an_agent_whose_pulse_is_early_is_told_again_that_an_event_may_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that connects pulses at once. It may have missed the state, and may object."""
    states: list[Any] = []

    def keep(_: HubLink, _key: str, event: CloudEvent) -> None:
        states.append(list(event.data["ending"]))

    monkeypatch.setattr(HubLink, "send_transient", keep)
    clock = ManualClock()
    async with witnessed_event(tmp_path, clock) as witnessed:
        await witnessed.pulse(1)
        clock.advance(1)
        await witnessed.report(is_gone=True)
        assert states[-1] == [witnessed.event.lowercase_event_id]
        states.clear()
        clock.advance(0.9)
        await witnessed.pulse(1)
        assert states == [[witnessed.event.lowercase_event_id]]
