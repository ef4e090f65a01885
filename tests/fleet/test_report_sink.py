"""Which reports an agent publishes and which it leaves to others, by a clock of the test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relay.errors import Rejected, Superseded
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_rfc3339
from relay.fleet.agent.report_sink import (
    MAX_COPY_WAIT,
    STATE_TIMEOUT,
    ReportSink,
)
from relay.fleet.messages import HubScopeState
from tests.builders import DATA, EVENT_ID, cloudevent
from tests.clocks import NOON, ManualClock

OTHERS = {**DATA, "resources": ["vm-1", "vm-2"]}
OWN = {**DATA, "resources": ["vm-1", "VM-0"]}


def report(name: str = "event.scheduled", data: dict[str, Any] = OTHERS, **more: Any) -> CloudEvent:
    """Return an event that the agent recorded at noon."""
    return cloudevent(name, EVENT_ID, data, time=format_rfc3339(NOON), **more)


class Hub:
    """The far side: it takes what is published."""

    def __init__(self) -> None:
        self.published: list[tuple[str, str]] = []
        self.failure: Exception | None = None

    async def publish(self, event: CloudEvent, key: str) -> None:
        """Take an event, or fail."""
        self.published.append((event.name, key))
        if self.failure is not None:
            raise self.failure


class Rig:
    """An agent's sink that waits as long as it can."""

    def __init__(self, chance: float = 1.0) -> None:
        self.clock = ManualClock()
        self.hub = Hub()
        self.sink = ReportSink(
            self.hub,
            Origin("vmss-a", "VM-0"),
            lambda resources: "vm-0" in map(str.lower, resources),
            self.clock,
            chance=lambda: chance,
        )

    def state(
        self,
        *,
        told: tuple[str, ...] = (),
        ending: tuple[str, ...] = (),
        awaited: tuple[str, ...] = (),
    ) -> None:
        """The hub tells its state."""
        self.sink.remember_events_known_to_hub(
            HubScopeState(hub_time=self.clock.now(), told=told, ending=ending, awaited=awaited)
        )

    async def begin(self, event: CloudEvent) -> asyncio.Task[object]:
        """Let the sink deliver, until it waits or is done."""
        task: asyncio.Task[object] = asyncio.create_task(self.sink.deliver(event))
        for _ in range(10):
            await asyncio.sleep(0)
        return task

    async def advance(self, seconds: float) -> None:
        """Let time pass, and then everything that follows from it."""
        self.clock.advance(seconds)
        for _ in range(10):
            await asyncio.sleep(0)


async def test_what_a_relay_recorded_for_a_sink_named_hub_before_it_was_an_agent_is_rejected() -> (
    None
):
    """The broker would refuse it and close the channel, again and again."""
    rig = Rig()
    task = await rig.begin(report("approval.recorded", data=OWN))
    with pytest.raises(Rejected):
        await task
    assert rig.hub.published == []


@pytest.mark.parametrize(
    "event",
    [
        report(data=OWN),
        report("event.ended", data=OWN),
        cloudevent("relay.source-lost", None, {"sink": None, "reason": "?", "count": 1}),
    ],
)
async def test_what_concerns_this_vm_is_published_at_once(event: CloudEvent) -> None:
    rig = Rig()
    rig.state(told=(event.id,), ending=(EVENT_ID,))
    assert (await rig.begin(event)).done()
    ((name, key),) = rig.hub.published
    assert name == event.name
    assert key.endswith(".vmss-a.vm-0")


async def test_what_concerns_others_is_left_out_once_the_hub_has_it() -> None:
    rig, event = Rig(), report()
    rig.state()
    task = await rig.begin(event)
    assert not task.done()
    rig.state(told=("0" * 32,))
    await rig.advance(1)
    assert not task.done()
    rig.state(told=("0" * 32, event.id))
    with pytest.raises(Superseded):
        await task
    assert rig.hub.published == []


async def test_what_the_hub_has_already_is_left_out_at_once() -> None:
    rig, event = Rig(), report()
    rig.state(told=(event.id,))
    with pytest.raises(Superseded):
        await (await rig.begin(event))


async def test_the_wait_ends_after_a_random_time() -> None:
    rig = Rig(chance=0.125)
    rig.state()
    task = await rig.begin(report())
    await rig.advance(MAX_COPY_WAIT * 0.5 - 0.01)
    assert not task.done()
    await rig.advance(0.02)
    await task
    assert [name for name, _ in rig.hub.published] == ["event.scheduled"]


@pytest.mark.parametrize("had_state", [True, False])
async def test_without_a_state_of_the_hub_nothing_waits(had_state: bool) -> None:
    rig = Rig()
    event = report(data={**OTHERS}, id="1" * 32)
    if had_state:
        rig.state(told=(event.id,))
        rig.clock.advance(STATE_TIMEOUT)
    rig.sink.mark_listening_to_hub()
    assert (await rig.begin(event)).done()
    assert len(rig.hub.published) == 1


async def test_a_wait_ends_when_the_hub_has_been_silent_for_too_long() -> None:
    rig = Rig()
    rig.state()
    rig.clock.advance(STATE_TIMEOUT - 1)
    rig.sink.mark_listening_to_hub()
    task = await rig.begin(report())
    assert not task.done()
    await rig.advance(MAX_COPY_WAIT)
    await task


# --- the end


async def test_an_end_is_left_out_if_the_hub_knows_that_the_event_is_gone() -> None:
    rig = Rig()
    rig.state(ending=(EVENT_ID.lower(),))
    with pytest.raises(Superseded):
        await (await rig.begin(report("event.ended")))
    assert (await rig.begin(report("event.updated", OWN))).done()


@pytest.mark.parametrize("confirmed", [True, False])
async def test_an_agent_that_reported_an_event_reports_its_end_too(confirmed: bool) -> None:
    """The hub waits for the word of each agent from which it has heard of the event."""
    rig = Rig()
    if not confirmed:
        rig.hub.failure = TimeoutError()
    scheduled = await rig.begin(report())
    assert (scheduled.exception() is None) is confirmed
    rig.hub.failure = None
    end = report("event.ended")
    rig.state(told=(end.id,), ending=(EVENT_ID,))
    assert (await rig.begin(end)).done()
    assert rig.hub.published[-1][0] == "event.ended"
    with pytest.raises(Superseded):  # its next occurrence begins anew
        await (await rig.begin(end))


async def test_an_agent_whose_word_the_hub_awaits_reports_the_end_at_once() -> None:
    """The hub has the word of this agent from a pulse only, or from before a restart."""
    rig = Rig()
    rig.state()
    waiting = await rig.begin(report("event.ended"))
    rig.state(awaited=("vm-0",))  # for an end in another event
    await rig.advance(0.1)
    assert not waiting.done()
    rig.state(ending=(EVENT_ID.lower(),), awaited=("vm-0", "vm-1"))
    await rig.advance(0.0)
    assert waiting.done()
    assert [name for name, _ in rig.hub.published] == ["event.ended"]


async def test_an_agent_whose_word_the_hub_does_not_await_leaves_the_end_out() -> None:
    rig = Rig()
    rig.state(ending=(EVENT_ID,), awaited=("vm-1",))
    with pytest.raises(Superseded):
        await (await rig.begin(report("event.ended")))
