"""Random failures of agents, RabbitMQ, Azure, clocks and the hub itself, while events are granted.

The gate, the store and the port are real. `Fleet` checks each order and each StartRequest: there
are never two at a time for an event, and none goes to another scope or to an agent with a wrong
clock.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from typing_extensions import override  # in typing from Python 3.12

from relay.fleet.messages import StartOutcome
from tests.approvals.builders import open_grants
from tests.clocks import NOON, ManualClock
from tests.conftest import DebugLoop
from tests.depth import depth
from tests.fleet.fleet_of_orders import Fleet, Hub, Mode, result_of, running_hub, user_event

_MEMORY = Path("/dev/shm")  # noqa: S108  # in memory, because no test cuts the power
_AGENTS = ["a/vm-1", "a/vm-2", "a/vm-3", "b/vm-1", "b/vm-2"]
_agent = st.sampled_from(_AGENTS)
_scope = st.sampled_from(["a", "a", "b"])
_OUTCOMES: list[StartOutcome] = ["accepted", "refused", "changed", "stale", "failed"]
_CHANGES: dict[str, dict[str, Any]] = {
    "other type": {"event_type": "Redeploy"},
    "about vm-1": {"resources": ("vm-1",)},
    "about vm-9": {"resources": ("vm-9",)},
    "started": {"event_status": "Started"},
    "gone": {},
}
_mode: st.SearchStrategy[Mode] = st.sampled_from(
    ["prompt", "prompt", "frozen", "mute", "twice", "liar", "stale", "blind"]
)


class Orders(RuleBasedStateMachine):
    """What can happen, in any order."""

    @initialize(skew=st.sampled_from([0.0, 1.9, -1.9]), modes=st.tuples(*[_mode] * len(_AGENTS)))
    def begin(self, skew: float, modes: tuple[Mode, ...]) -> None:
        """Begin with two scopes whose agents the hub has heard, and an event in one."""
        self.runner = asyncio.Runner(loop_factory=DebugLoop)
        self.folder = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        self.clock = ManualClock(NOON + timedelta(seconds=skew))
        self.fleet = Fleet(self.clock, _AGENTS)
        self.events = 0
        self.context: AbstractAsyncContextManager[Hub]
        self.hub: Hub
        self._start(None)
        self.event_is_scheduled("a", None, modes, (), starts=False, reporters=_AGENTS)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self.runner.run(work)

    def _start(self, earlier: Hub | None) -> None:
        async def start() -> None:
            self.context = running_hub(Path(self.folder.name) / "hub.db", self.fleet, earlier)
            self.hub = await self.context.__aenter__()

        self._run(start())

    @override
    def teardown(self) -> None:
        """Stop the hub. If nothing has failed, check first that every grant gets its answer."""
        if not hasattr(self, "hub"):
            return
        try:
            if not self.hub.task.done():
                self.everything_works_again()
        finally:
            self._run(self._stop())
            self.runner.close()
            self.folder.cleanup()

    async def _stop(self) -> None:
        self.hub.task.cancel()
        await asyncio.wait({self.hub.task})
        await self.hub.store.close()

    # --- Azure

    @rule(
        scope=_scope,
        number=st.sampled_from([None, None, None, 1, 2]),
        modes=st.tuples(*[_mode] * len(_AGENTS)),
        unbound=st.sampled_from([(), (), ("a/vm-1",), ("a/vm-1", "a/vm-2")]),
        starts=st.booleans(),
        reporters=st.one_of(st.just(_AGENTS), st.sets(_agent, min_size=1)),
    )
    def event_is_scheduled(
        self,
        scope: str,
        number: int | None,
        modes: tuple[Mode, ...],
        unbound: Sequence[str],
        starts: bool,
        reporters: Collection[str],
    ) -> None:
        """A scope shows an event, new or again, and some or all agents report it."""
        self.events += number is None
        self.fleet.starts_events = starts
        for agent, mode in zip(self.fleet.agents.values(), modes, strict=True):
            agent.mode, agent.is_bound = mode, f"{agent.scope}/{agent.relay}" not in unbound
        self.fleet.azure_says(scope, user_event(f"E-{number or self.events}"))
        self.pulses(set(reporters))

    @rule(scope=_scope, seconds=st.sampled_from([7.5, 8.5, 8.75, 12.0]))
    def an_answer_comes_late(self, scope: str, seconds: float) -> None:
        """Agents obey at once, and their answers come late."""
        self.event_is_scheduled(
            scope, None, ("mute",) * len(_AGENTS), (), starts=False, reporters=_AGENTS
        )
        self._run(self.hub.advance(seconds))
        self.agents_go_on(set(_AGENTS), "prompt")

    @rule(scope=_scope, back=st.integers(0, 1), kind=st.sampled_from(sorted(_CHANGES)))
    def event_changes(self, scope: str, back: int, kind: str) -> None:
        """One of the last events changes, and no agent reports it yet."""
        key = f"e-{self.events - back}"
        event = self.fleet.documents[scope].get(key)
        if kind == "gone":
            self.fleet.documents[scope].pop(key, None)
        elif event is not None:
            self.fleet.azure_says(scope, replace(event, **_CHANGES[kind]))

    @rule(status=st.sampled_from([200, 200, 400, 503, 0]))
    def imds_answers(self, status: int) -> None:
        """IMDS answers the next StartRequests like this."""
        self.fleet.status = status

    # --- agents

    @rule(names=st.sets(_agent, min_size=1), mode=st.sampled_from(["prompt", "mute"]))
    def agents_go_on(self, names: set[str], mode: Mode) -> None:
        """Frozen agents handle what has arrived, and answers arrive that waited."""
        for name in sorted(names):
            self.fleet.wake_up(self.fleet.agent(name), mode)
            self.fleet.send_late_answers(self.fleet.agent(name))

    @rule(names=st.sets(_agent), is_bound=st.booleans(), is_silent=st.booleans())
    def connections_change(self, names: set[str], is_bound: bool, is_silent: bool) -> None:
        """Orders do or do not reach agents, and they send pulses or none."""
        for name in names:
            agent = self.fleet.agent(name)
            agent.is_bound, agent.is_silent = is_bound, is_silent

    @rule(name=_agent, offset=st.sampled_from([0.0, 1.9, 2.1, -30.0]))
    def clock_of_agent(self, name: str, offset: float) -> None:
        self.fleet.agent(name).clock_offset = offset
        self.fleet.send_pulse(self.fleet.agent(name))

    @rule(name=_agent, back=st.integers(1, 3), outcome=st.sampled_from(_OUTCOMES))
    def agent_makes_up_a_result(self, name: str, back: int, outcome: StartOutcome) -> None:
        """An agent answers one of the last orders, which can be that of another agent."""
        agent = self.fleet.agent(name)
        for sent in self.fleet.orders[-back:][:1]:
            if (sent.scope, sent.agent) == (agent.scope, agent.relay):
                sent.done = True  # by its own word, it does nothing any more
                agent.pending = [each for each in agent.pending if each is not sent]
            self.fleet.answer(agent, result_of(sent.order, outcome))

    @rule(names=st.sets(_agent))
    def pulses(self, names: set[str]) -> None:
        for name in sorted(names):
            self.fleet.send_pulse(self.fleet.agent(name))

    # --- RabbitMQ, time and the hub

    @rule(how=st.sampled_from(["works", "works", "works", "down", "unconfirmed", "lost"]))
    def publishing(self, how: Literal["works", "down", "unconfirmed", "lost"]) -> None:
        """The connection of the hub works, or fails at some point."""
        self.fleet.publish = how

    @rule(hears=st.sampled_from([True, True, False]))
    def intake(self, hears: bool) -> None:
        """The hub reads its queue, or does not get to it."""
        if hears:
            self.fleet.may_hear.set()
        else:
            self.fleet.may_hear.clear()

    @rule(seconds=st.sampled_from([0.25, 1.0, 1.0, 3.0, 5.0, 8.0, 8.25, 20.0, 160.0]))
    def time_passes(self, seconds: float) -> None:
        self._run(self.hub.advance(seconds, step=max(0.25, seconds / 20)))

    @rule(names=st.sets(_agent, max_size=2))
    def an_order_times_out(self, names: set[str]) -> None:
        """So much time passes that an order is over, and some agents say what they see."""
        self._run(self.hub.advance(8.5, step=0.5))
        self.pulses(names)

    @rule(skew=st.sampled_from([0.0, 1.9, -1.9]))
    def clock_of_the_hub(self, skew: float) -> None:
        self.clock.set_wall_clock(self.fleet.azure_now() + timedelta(seconds=skew))

    @rule(down=st.sampled_from([0.0, 0.0, 2.0, 6.0, 30.0]))
    def crash(self, down: float) -> None:
        """Kill the hub, and start it again on its file."""
        self._run(self._stop())
        self.clock.advance(down)
        self._start(self.hub)

    def everything_works_again(self) -> None:
        """All failures end. Then every grant about an event as it is gets its answer."""
        fleet = self.fleet
        fleet.status, fleet.publish = 200, "works"
        fleet.may_hear.set()
        for agent in fleet.agents.values():
            agent.is_bound, agent.is_silent, agent.clock_offset = True, False, 0.0
            fleet.wake_up(agent)
        self.clock.set_wall_clock(fleet.azure_now())
        for _ in range(4):
            fleet.send_pulses()
            self._run(self.hub.advance(15, step=1.0))
        self._run(self._require_no_open_grant())

    async def _require_no_open_grant(self) -> None:
        assert await self.hub.store.read(open_grants) == []

    # --- invariants

    @invariant()
    def the_hub_runs(self) -> None:
        """Nothing that was checked on the way has failed. A moment passes, so that all can act."""
        if not hasattr(self, "hub"):
            return
        self._run(self.hub.advance(0.25))
        if self.hub.task.done():
            self.hub.task.result()


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=depth(250, 8), stateful_step_count=50)
