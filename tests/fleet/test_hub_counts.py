"""What the hub counts of the messages of its agents, and asks of them."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import cast

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
from relay.fleet.link import HubLink
from relay.fleet.routing import report_key
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import open_store
from tests.approvals.builders import build_event
from tests.clocks import NOON, ManualClock
from tests.eventually import eventually
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
        await hub.take([pulse(seconds=0), pulse(seconds=1)])
        assert (hub.reports, hub.redundant_reports, hub.pulses) == (0, 0, 2)
        await hub.take([report(build_event(), AGENT)])
        assert (hub.reports, hub.redundant_reports) == (1, 0)
        other = Origin(AGENT.scope, "vm-1")
        await hub.take([report(build_event(), other), report(build_event("E-2"), other)])
        assert (hub.reports, hub.redundant_reports) == (3, 1)
        await hub.take([pulse(build_event(), build_event("E-2"), seconds=2)])
        assert (hub.reports, hub.redundant_reports, hub.pulses) == (3, 1, 3)


async def test_the_agents_of_a_scope_are_asked_for_events_that_one_says_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    async def keep(_: HubLink, key: str, event: CloudEvent) -> bool:
        asked.append((key, list(event.data["eventIds"])))
        return True

    monkeypatch.setattr(HubLink, "send", keep)
    owner, clock = StateFileScopeAndVm("hub", None, is_hub=True), ManualClock()
    async with open_store(
        StoreSettings(path=tmp_path / "hub.db"), owner, clock, lambda _: ()
    ) as store:
        hub = Hub(SETTINGS, Origin("hub", "hub-0"), store, clock, ignore, ignore)
        await hub.load()
        asking = asyncio.create_task(hub._merger.end_events_when_due())  # noqa: SLF001  # `run` needs a broker
        events = [build_event("E-1"), build_event("E-2"), build_event("E-3")]
        seen = [
            report(event, Origin(AGENT.scope, vm)) for event in events for vm in ("vm-0", "vm-1")
        ]
        await hub.take(seen)
        clock.advance(1)
        gone = [report(event, AGENT, is_gone=True, at=clock.now()) for event in events[:2]]
        await hub.take(gone)
        await eventually(lambda: asked == [(f"scope.{AGENT.scope}", ["e-1", "e-2"])])
        asking.cancel()
