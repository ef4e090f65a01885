"""What the hub counts of the messages of its agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.events.build import Origin, change_event, event_data
from relay.events.delta import diff
from relay.events.model import Document, ScheduledEvent
from relay.fleet.hub.hub import Hub
from relay.fleet.hub.link import Settlements
from relay.fleet.routing import report_key
from relay.outbox import StateFileOwner, StoreSettings
from relay.outbox.sqlite import open_store
from tests.approvals.builders import build_event
from tests.approvals.manual_clock import NOON, ManualClock
from tests.fleet.test_hub_heard import AGENT, SETTINGS, ignore, pulse


def report(event: ScheduledEvent, origin: Origin) -> DeliveredMessage:
    """The report of an agent that it sees a new event."""
    (change,) = diff((), Document(1, (event,)))
    told = change_event(
        change,
        origin,
        NOON,
        data=event_data(event, 1),
        previous_count=0,
        approved_by_relay=False,
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
    owner = StateFileOwner("hub", None, is_hub=True)
    async with open_store(
        StoreSettings(path=tmp_path / "hub.db"), owner, clock, lambda _: ()
    ) as store:
        hub = Hub(SETTINGS, Origin("hub", "hub-0"), store, clock, ignore, ignore)
        await hub.load()
        settlements = Settlements(cast("Any", None), cast("Any", None))
        await hub.take_pulses([pulse(seconds=0), pulse(seconds=1)])
        assert (hub.reports, hub.copies, hub.pulses) == (0, 0, 2)
        await hub.take_reports([report(build_event(), AGENT)], settlements)
        assert (hub.reports, hub.copies) == (1, 0)
        other = Origin(AGENT.scope, "vm-1")
        await hub.take_reports(
            [report(build_event(), other), report(build_event("E-2"), other)], settlements
        )
        assert (hub.reports, hub.copies) == (3, 1)
        await hub.take_pulses([pulse(build_event(), build_event("E-2"), seconds=2)])
        assert (hub.reports, hub.copies, hub.pulses) == (3, 1, 3)


async def test_the_end_of_an_event_waits_for_few_of_the_agents_that_pulse(tmp_path: Path) -> None:
    """Each agent that the hub awaits must report the end. Of 50 that would be 50 copies."""
    clock = ManualClock()
    owner = StateFileOwner("hub", None, is_hub=True)
    async with open_store(
        StoreSettings(path=tmp_path / "hub.db"), owner, clock, lambda _: ()
    ) as store:
        hub = Hub(SETTINGS, Origin("hub", "hub-0"), store, clock, ignore, ignore)
        await hub.load()
        event = build_event()
        await hub.take_reports(
            [report(event, AGENT)], Settlements(cast("Any", None), cast("Any", None))
        )
        clock.advance(1)

        def agent(number: int) -> Origin:
            return Origin(AGENT.scope, f"vm-{number}")

        async def send_pulse(number: int, clock_offset: float = 0.0) -> None:
            await hub.take_pulses(
                [pulse(event, seconds=1, origin=agent(number), clock_offset=clock_offset)]
            )

        def showing() -> frozenset[str] | None:
            return hub.agents_showing(AGENT.scope, f"{event.key}@{AGENT.scope}")

        await send_pulse(1, clock_offset=30.0)  # it cannot act, so the hub needs others
        for number in range(2, 50):
            await send_pulse(number)
        assert showing() == frozenset({"vm-0", "vm-1", "vm-2", "vm-3", "vm-4"})
        await send_pulse(2, clock_offset=30.0)  # this one cannot act any more
        await send_pulse(17)
        assert showing() == frozenset({"vm-0", "vm-1", "vm-2", "vm-3", "vm-4", "vm-17"})
        clock.advance(200)  # all of them are silent
        await hub.take_pulses([pulse(event, seconds=201, origin=agent(40))])
        assert showing() == frozenset({"vm-0", "vm-1", "vm-2", "vm-3", "vm-4", "vm-17", "vm-40"})
