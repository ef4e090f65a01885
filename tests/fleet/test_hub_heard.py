"""What the hub holds back of pulses, and whom it hears."""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.events.build import Origin, common_event_data
from relay.events.model import ScheduledEvent
from relay.fleet.hub import merger
from relay.fleet.hub.hub import Hub
from relay.fleet.hub.pulses import MAX_POSTPONED, PulseMerger
from relay.fleet.messages import MAX_LIVE_EVENTS, Pulse
from relay.fleet.routing import pulse_key
from relay.fleet.settings import HubSettings, TrustDomain
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import open_store
from tests.approvals.builders import build_event
from tests.clocks import NOON, ManualClock
from tests.events.strategies import make_event
from tests.eventually import eventually
from tests.fleet.test_merger import SCOPE, merging

AGENT = Origin("vmss-a-1", "vm-0")
SETTINGS = HubSettings.model_validate(
    {
        "role": "hub",
        "url": "amqp://imds-hub:x@127.0.0.1",
        "domains": [{"user": "vmss-a", "scopes": ["vmss-a-*"]}],
    }
)


def pulse(
    *events: ScheduledEvent,
    seconds: float,
    origin: Origin = AGENT,
    clock_offset: float = 0.0,
    user: str = "vmss-a",
) -> DeliveredMessage:
    """A pulse of the agent, sent so many seconds after noon."""
    content = Pulse(
        vm_id="vm",
        boot_id="boot",
        version="1.0.0",
        zone=None,
        names=("vm-0",),
        live=tuple(common_event_data(event, 1) for event in events),
        poll_age=0.0,
        clock_offset=clock_offset,
    )
    event = content.to_event(origin, NOON + timedelta(seconds=seconds))
    properties = Basic.Properties(user_id=user)
    deliver = Basic.Deliver(
        "tag", 1, exchange="azure.scheduledevents.fleet", routing_key=pulse_key(origin)
    )
    return DeliveredMessage(
        deliver, ContentHeader(0, 2, properties), event.body, cast("AbstractChannel", None)
    )


def ignore(*_: Any, **__: Any) -> None:
    """Take anything."""


async def test_an_agent_that_invents_events_in_its_pulses_fills_no_memory(tmp_path: Path) -> None:
    """What waits for reports is bounded, and the newest is kept."""
    clock = ManualClock()
    owner = StateFileScopeAndVm("hub", None, is_hub=True)
    async with open_store(
        StoreSettings(path=tmp_path / "hub.db"), owner, clock, lambda _: ()
    ) as store:
        hub = Hub(SETTINGS, Origin("hub", "hub-0"), store, clock, ignore, ignore)
        await hub.load()
        events: list[ScheduledEvent] = []
        for number in range(4):
            events = [build_event(f"flood-{number}-{index}") for index in range(MAX_LIVE_EVENTS)]
            await hub.take_pulses([pulse(*events, seconds=number)])
            del events
        kept = [
            each
            for each in gc.get_objects()
            if isinstance(each, merger.AgentWordAboutEvent) and each.name[1].startswith("flood-")
        ]  # words of other tests of this worker may not be collected yet
        assert {each.name[1][:7] for each in kept} == {"flood-2", "flood-3"}
        assert len(kept) == MAX_POSTPONED


async def test_what_a_pulse_tells_waits_for_reports_as_long_as_what_the_one_before_told(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    merged: dict[str, int] = {}
    async with merging(tmp_path) as rig:

        async def has_waiting_reports() -> bool:
            return False

        pulses = PulseMerger(
            rig.histories,
            rig.merger,
            clock,
            has_waiting_reports=has_waiting_reports,
        )
        merging_words = asyncio.create_task(pulses.merge_postponed_words_when_due())
        for second in range(12):
            await eventually(lambda: bool(clock.remaining_sleeps))
            for event_id in rig.histories.histories_in_memory_of_scope(SCOPE):
                merged.setdefault(event_id, second)
            if second in (0, 4):
                event = make_event(event_id=f"e-{second}")
                word = rig.word("vm-0", event, second, event_id=event.event_id)
                await pulses.merge_repeats([word])
            clock.advance(1)
        merging_words.cancel()
    assert merged == {"e-0": 5, "e-4": 9}


async def test_nobody_reports_in_the_name_of_the_hub(tmp_path: Path) -> None:
    """A domain with a pattern such as * can speak for the scope that the hub itself has."""
    clock = ManualClock()
    domain = TrustDomain(user="vmss-a", scopes=("*",))
    settings = SETTINGS.model_copy(update={"domains": (domain,)})
    owner, origin = StateFileScopeAndVm("hub", None, is_hub=True), Origin("hub", "hub-0")
    async with open_store(
        StoreSettings(path=tmp_path / "hub.db"), owner, clock, lambda _: ()
    ) as store:
        hub = Hub(settings, origin, store, clock, ignore, ignore)
        await hub.load()
        await hub.take_pulses([pulse(seconds=0, origin=origin), pulse(seconds=0)])
        assert [agent.relay for agent in hub.roster] == ["vm-0"]
