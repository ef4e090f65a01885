"""The states of scopes: what they name, and how often they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.hub.hub_state_sender import STATE_INTERVAL, TOLD_FOR, HubStateSender
from relay.fleet.message_reader import read_message
from relay.fleet.messages import MAX_TOLD, HubScopeState
from relay.store import EventKeyFormat, RecordedEvent
from tests.clocks import ManualClock
from tests.eventually import eventually

SCOPE = "vmss-a-1f0c33ab"
OTHER = "vmss-b-2e1d44bc"


def recorded(number: int, scope: str = SCOPE, name: str = "event.scheduled") -> RecordedEvent:
    """Return an event that was recorded; its id is the number."""
    return RecordedEvent(
        position=number,
        id=f"{number:032x}",
        name=name,
        event_key=f"e-{number}@{scope}",
        event=None,
        entries=(),
    )


@dataclass
class Rig:
    """States that are sent nowhere."""

    clock: ManualClock = field(default_factory=ManualClock)
    sent: list[tuple[str, HubScopeState]] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    states: HubStateSender = field(init=False)

    def __post_init__(self) -> None:
        self.states = HubStateSender(
            Origin("hub", "hub-0"),
            EventKeyFormat(with_scope=True),
            self.clock,
            self.take,
            lambda _: self.ending,
            lambda _: self.awaited,
        )

    def take(self, key: str, event: CloudEvent) -> None:
        """Take a state."""
        state = read_message(event.body).content
        assert isinstance(state, HubScopeState)
        self.sent.append((key, state))

    @asynccontextmanager
    async def running(self, *scopes: str) -> AsyncIterator[None]:
        """Send what is due while the context lasts."""
        task = asyncio.create_task(self.states.run(lambda: scopes))
        await asyncio.sleep(0)
        yield
        task.cancel()


def test_a_state_names_what_was_told_lately_in_its_scope() -> None:
    rig = Rig()
    rig.states.remember_recorded_event_ids(
        [recorded(1), recorded(2, OTHER), recorded(3, name="approval.granted")]
    )
    rig.clock.advance(TOLD_FOR - 1)
    rig.states.remember_recorded_event_ids([recorded(4)])
    rig.states.send_soon(SCOPE)
    rig.clock.advance(2)
    rig.states.send_soon(SCOPE)
    assert [(key, state.told) for key, state in rig.sent] == [
        (f"scope.{SCOPE}", (f"{1:032x}", f"{4:032x}")),
        (f"scope.{SCOPE}", (f"{4:032x}",)),
    ]


def test_a_state_names_the_newest_of_too_many_ids_and_what_may_have_ended() -> None:
    rig = Rig(ending=["e-1"], awaited=["vm-0"])
    rig.states.remember_recorded_event_ids([recorded(number) for number in range(MAX_TOLD + 5)])
    rig.states.send_soon(SCOPE)
    ((_, state),) = rig.sent
    assert (state.ending, state.awaited) == (("e-1",), ("vm-0",))
    assert (len(state.told), state.told[-1]) == (MAX_TOLD, f"{MAX_TOLD + 4:032x}")


async def test_states_that_are_requested_together_are_sent_as_one() -> None:
    rig = Rig()
    async with rig.running():
        for _ in range(100):
            rig.states.send_soon(SCOPE)
        assert len(rig.sent) == 1
        await rig.clock.advance_until(lambda: len(rig.sent) == 2, step=0.1)
        rig.clock.advance(5)
        await asyncio.sleep(0.01)
        assert len(rig.sent) == 2


async def test_every_scope_with_agents_gets_a_state_each_minute() -> None:
    rig = Rig()
    async with rig.running(SCOPE, OTHER):
        await eventually(lambda: len(rig.sent) == 2)
        begin = rig.clock.monotonic()
        await rig.clock.advance_until(lambda: len(rig.sent) == 4, step=1)
        assert STATE_INTERVAL <= rig.clock.monotonic() - begin <= STATE_INTERVAL + 6
        assert {key for key, _ in rig.sent} == {f"scope.{SCOPE}", f"scope.{OTHER}"}
