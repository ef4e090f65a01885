"""What the hub counts of the messages of its agents, whom it hears, and what it asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiormq.abc import DeliveredMessage

from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.events.build import (
    Origin,
    change_event,
    common_event_data,
    determine_outcome,
    relay_event,
)
from relay.events.cloudevent import CloudEvent
from relay.events.model import Document, ScheduledEvent, diff_events_with_document
from relay.fleet.hub import roster
from relay.fleet.hub.hub import Hub
from relay.fleet.hub.link import HubLink
from relay.fleet.hub.merge import EventHistory
from relay.fleet.hub.roster import FORGOTTEN_AFTER
from relay.fleet.messages import ChangeData, Pulse
from relay.fleet.routing import agent_key, report_key
from relay.fleet.settings import HubSettings, TrustDomain
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import open_store
from tests.amqp.delivered import delivered
from tests.approvals.builders import build_event
from tests.clocks import NOON, ManualClock
from tests.eventually import eventually
from tests.fleet.hub_side import hub_settings

AGENT = Origin("vmss-a-1", "vm-0")
SETTINGS = hub_settings("amqp://imds-hub:x@127.0.0.1", "azure.scheduledevents")


def published(event: CloudEvent, key: str) -> DeliveredMessage:
    return delivered("azure.scheduledevents.fleet", key, event.body, user_id="vmss-a")


def pulse(*events: ScheduledEvent, seconds: float, origin: Origin = AGENT) -> DeliveredMessage:
    """A pulse of the agent, sent so many seconds after noon."""
    live = tuple(ChangeData(**common_event_data(event, 1)) for event in events)
    content = Pulse(version="1.0.0", names=("vm-0",), live=live, poll_age=0.0, clock_offset=0.0)
    event = content.to_event(origin, NOON + timedelta(seconds=seconds))
    return published(event, agent_key("pulse", origin))


def ignore(*_: Any, **__: Any) -> None:
    """Take anything."""


async def no_votes(_: DecisionRequest) -> DecisionAnswer:
    raise AssertionError("nobody votes here")


def report(
    event: ScheduledEvent, origin: Origin, *, is_gone: bool = False, at: datetime = NOON
) -> DeliveredMessage:
    before, after = ((event,), ()) if is_gone else ((), (event,))
    (change,) = diff_events_with_document(before, Document(1, after))
    outcome = determine_outcome(event, at, start_sent=False, gap=False, rebooted=False)
    told = change_event(
        change,
        origin,
        at,
        data=common_event_data(event, 1),
        previous_count=0,
        approved_by_relay=False,
        outcome=outcome if is_gone else None,
    )
    return published(told, report_key(told, origin))


@asynccontextmanager
async def loaded_hub(
    folder: Path, settings: HubSettings = SETTINGS, clock: ManualClock | None = None
) -> AsyncIterator[tuple[Hub, ManualClock]]:
    """Yield a hub that has read its state file, and is not connected."""
    clock, owner = clock or ManualClock(), StateFileScopeAndVm("hub", None, is_hub=True)
    async with open_store(
        StoreSettings(path=folder / "hub.db"), owner, clock, lambda _: ()
    ) as store:
        origin = Origin("hub", "hub-0")
        hub = Hub(settings, origin, store, clock, ignore, ignore, no_votes, ignore)
        await hub.load()
        yield hub, clock


def history_of(hub: Hub) -> EventHistory:
    history = hub.merger.history(AGENT.scope, "e-1")
    assert history is not None
    return history


async def test_reports_copies_and_pulses_are_counted(tmp_path: Path) -> None:
    async with loaded_hub(tmp_path) as (hub, _):
        await hub.take([pulse(seconds=0), pulse(seconds=1)])
        assert (hub.reports, hub.merger.copies, hub.pulses) == (0, 0, 2)
        await hub.take([report(build_event(), AGENT)])
        assert (hub.reports, hub.merger.copies) == (1, 0)
        other = Origin(AGENT.scope, "vm-1")
        await hub.take([report(build_event(), other), report(build_event("E-2"), other)])
        assert (hub.reports, hub.merger.copies) == (3, 1)
        await hub.take([pulse(build_event(), build_event("E-2"), seconds=2)])
        assert (hub.reports, hub.merger.copies, hub.pulses) == (3, 1, 3)


async def test_what_an_agent_says_of_itself_is_recorded_with_its_id(tmp_path: Path) -> None:
    head = f"7:{'0' * 64}"
    told = relay_event(
        "relay.source-lost", AGENT, NOON, sink=None, reason="no answer", count=1, head=head
    )
    async with loaded_hub(tmp_path) as (hub, _):
        assert await hub.take([published(told, report_key(told, AGENT))]) == set()
        recorded = await hub._store.read(lambda tx: tx.journal.events_after(0, 9))  # noqa: SLF001  # only the hub has it
    ((_, event),) = recorded
    assert (event.id, event.attributes["source"]) == (told.id, AGENT.relay_source)
    assert event.attributes["journalhead"] != head, "it is that of the hub's journal"


async def test_the_agents_of_a_scope_are_asked_for_events_that_one_says_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    async def keep(_: HubLink, key: str, event: CloudEvent) -> bool:
        asked.append((key, list(event.data["eventIds"])))
        return True

    monkeypatch.setattr(HubLink, "send", keep)
    async with loaded_hub(tmp_path) as (hub, clock):
        asking = asyncio.create_task(hub.merger.end_events_when_due())  # `run` needs a broker
        events = [build_event("E-1"), build_event("E-2"), build_event("E-3")]
        seen = [
            report(event, Origin(AGENT.scope, vm)) for event in events for vm in ("vm-0", "vm-1")
        ]
        await hub.take(seen)
        clock.advance(1)
        gone = [report(event, AGENT, is_gone=True, at=clock.now()) for event in events[:2]]
        await hub.take(gone)
        await clock.advance_until(lambda: bool(asked))
        await eventually(lambda: asked == [(f"scope.{AGENT.scope}", ["e-1", "e-2"])])
        asking.cancel()


async def test_nobody_reports_in_the_name_of_the_hub(tmp_path: Path) -> None:
    """A domain with a pattern such as * can speak for the scope that the hub itself has."""
    domain = TrustDomain(user="vmss-a", scopes=("*",))
    settings = SETTINGS.model_copy(update={"domains": (domain,)})
    async with loaded_hub(tmp_path, settings) as (hub, _):
        await hub.take([pulse(seconds=0, origin=Origin("hub", "hub-0")), pulse(seconds=0)])
        assert [agent.relay for agent in hub.roster] == ["vm-0"]


async def test_what_agents_say_counts_though_the_hubs_clock_is_set_back(tmp_path: Path) -> None:
    async with loaded_hub(tmp_path) as (hub, clock):
        await hub.take([report(build_event(), AGENT)])
        clock.advance(20)
        clock.set_wall_clock(NOON - timedelta(seconds=500))
        started = build_event(event_status="Started", not_before=None)
        await hub.take([report(started, AGENT, at=NOON + timedelta(seconds=20))])
        assert history_of(hub).started


async def test_a_backlog_silences_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a day without a hub, its queue can hold a million messages."""
    answers = [False, True]

    async def has_read_all(_: HubLink) -> bool:
        return answers.pop(0)

    monkeypatch.setattr(HubLink, "has_read_all", has_read_all)
    async with loaded_hub(tmp_path) as (hub, clock):
        waits_anew: list[bool] = []
        monkeypatch.setattr(hub.merger, "restart_end_waits", lambda: waits_anew.append(True))
        for answer in (False, True):
            await hub.take([pulse(seconds=0)])
            await hub._look_after()  # noqa: SLF001  # `run` needs a broker
            assert hub.roster.has_listened(clock.now()) is answer
            assert bool(waits_anew) is answer, "who disagrees about an end has its time again"


async def test_a_hub_that_was_killed_reads_the_rest_of_its_queue(tmp_path: Path) -> None:
    """It read a pulse much later than the agent sent it, and was killed before what followed."""
    started = build_event(event_status="Started", not_before=None)
    async with loaded_hub(tmp_path) as (hub, clock):
        await hub.take([report(build_event(), AGENT)])
        clock.advance(55)
        await hub.take([pulse(build_event(), seconds=5)])
        hub.save_agents()
    async with loaded_hub(tmp_path, clock=clock) as (hub, _):
        await hub.take([report(started, AGENT, at=NOON + timedelta(seconds=20))])
        assert history_of(hub).started


async def test_a_killed_hub_knows_until_when_pulses_showed_an_event(tmp_path: Path) -> None:
    other = Origin(AGENT.scope, "vm-1")
    async with loaded_hub(tmp_path) as (hub, clock):
        await hub.take([report(build_event(), AGENT), report(build_event(), other)])
        clock.advance(60)
        await hub.take([pulse(build_event(), seconds=60, origin=other)])
        hub.save_agents()
    async with loaded_hub(tmp_path, clock=clock) as (hub, _):
        behind = report(build_event(), AGENT, is_gone=True, at=NOON + timedelta(seconds=30))
        await hub.take([behind])
        assert history_of(hub).end_due_at is None


async def test_an_agent_that_is_heard_while_it_waits_to_be_forgotten_is_not(tmp_path: Path) -> None:
    """Others are merged first, which takes long if the disk is slow. Its event is still there."""
    async with loaded_hub(tmp_path) as (hub, clock):
        await hub.take([pulse(build_event(), seconds=0)])
        (agent,) = hub.roster
        clock.advance(FORGOTTEN_AFTER.total_seconds())
        merger = hub.merger
        async with merger._lock:  # noqa: SLF001  # as while others are merged
            forgetting = asyncio.create_task(merger.forget_agent(agent))
            await asyncio.sleep(0)
            at = FORGOTTEN_AFTER.total_seconds()
            taking = asyncio.create_task(hub.take([pulse(build_event(), seconds=at)]))
            await asyncio.sleep(0)
        await asyncio.gather(forgetting, taking)
        assert [each.relay for each in hub.roster] == ["vm-0"]
        assert history_of(hub).ended_at is None


async def test_an_agent_that_was_silent_for_long_is_forgotten_with_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def has_read_all(_: HubLink) -> bool:
        return True

    monkeypatch.setattr(HubLink, "has_read_all", has_read_all)
    monkeypatch.setattr(roster, "FORGOTTEN_AFTER", timedelta(seconds=200))
    async with loaded_hub(tmp_path) as (hub, clock):
        await hub.take([pulse(build_event(), seconds=0)])
        for _ in range(5):
            assert [agent.relay for agent in hub.roster] == ["vm-0"]
            await hub._look_after()  # noqa: SLF001  # `run` needs a broker
            clock.advance(50)
        await hub._look_after()  # noqa: SLF001
        assert list(hub.roster) == []
        assert history_of(hub).ended_at is not None
