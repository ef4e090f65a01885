"""Many simulated agents in one process, to load a broker and a hub as a fleet of that size does.

`simulated_fleet` connects them. `SimulatedFleet.make_changes_at_plan_rate` then makes changes at
the rate of a `FleetPlan`, and counts what the agents did. `bench.fleet_agents` says what
is simulated.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from uuid import uuid4

from bench.fleet_agents import Counters, OnRecorded, SimulatedAgent, SimulatedScope
from relay.clock import Clock, SystemClock
from relay.events.model import ScheduledEvent
from relay.fleet.settings import AgentSettings

POLL_INTERVAL = 1.0
"""Seconds between two polls of an agent, as by default."""
MAX_CONNECTING = 25
"""Agents that connect at the same time."""
GC_THRESHOLD = 100_000
"""New objects until the garbage collector looks at them."""
OPEN_FILES_RESERVED = 64
"""Open files that the process needs beside one connection for each agent."""
_TICK = 0.2
"""Seconds between two moments at which events start that an order has approved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """How many agents there are, and what happens to their VMs.

    ``rate`` is the changes per second of all scopes together. ``votes``: the VM that an event names
    approves it.
    """

    agents: int
    scopes: int
    scope_prefix: str = "sim"
    rate: float = 0.0
    votes: bool = False
    poll_interval: float = POLL_INTERVAL

    def __post_init__(self) -> None:
        if not 1 <= self.scopes <= self.agents:
            raise ValueError(
                f"expected at least one agent for each scope, got {self.agents} agents in "
                f"{self.scopes} scopes"
            )

    @property
    def vm_names_by_scope(self) -> dict[str, list[str]]:
        """The names of the VMs of each scope. The scopes are equally large, as far as possible."""
        width = len(str(self.scopes - 1))
        names = [f"{self.scope_prefix}-{number:0{width}}" for number in range(self.scopes)]
        return {
            name: [f"{name}_{vm}" for vm in range(len(range(index, self.agents, self.scopes)))]
            for index, name in enumerate(names)
        }


def raise_open_files_limit() -> int:
    """Raise the limit of open files as far as allowed; return for how many agents it is enough."""
    try:
        import resource  # noqa: PLC0415  # only on POSIX
    except ImportError:
        return sys.maxsize
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard - OPEN_FILES_RESERVED


class SimulatedFleet:
    """All scopes with their agents. `simulated_fleet` makes and connects it."""

    def __init__(
        self,
        settings: AgentSettings,
        plan: FleetPlan,
        *,
        on_recorded: OnRecorded,
        new_id: Callable[[], str],
    ) -> None:
        clock = SystemClock()
        self.counters = Counters()
        self._plan = plan
        self._clock: Clock = clock
        self._scopes = []
        for name, vms in plan.vm_names_by_scope.items():
            scope = SimulatedScope(name, vms, clock, self.counters, plan.poll_interval, new_id)
            scope.agents += [
                SimulatedAgent(settings, scope, vm, clock, self.counters, on_recorded) for vm in vms
            ]
            self._scopes.append(scope)

    async def connect(self, group: asyncio.TaskGroup, on_connected: Callable[[], None]) -> None:
        """Connect all agents, a few at a time. ``on_connected`` is called for each of them."""
        slots = asyncio.Semaphore(MAX_CONNECTING)

        async def connect(agent: SimulatedAgent) -> None:
            async with slots:
                await agent.connect(group)
            on_connected()

        try:
            async with asyncio.TaskGroup() as connecting:
                for agent in self._all_agents():
                    connecting.create_task(connect(agent))
        except* TimeoutError:
            raise TimeoutError("some agents did not connect in time") from None

    async def make_changes_at_plan_rate(
        self, duration: float | None = None, changes: int | None = None
    ) -> None:
        """Make changes at the rate of the plan, for so many seconds or so many changes."""
        async with asyncio.TaskGroup() as group:
            ticks = group.create_task(self._keep_advancing_due_simulated_events())
            try:
                async with asyncio.timeout(duration):
                    await self._make_changes(group, changes)
            except TimeoutError:
                pass
            finally:
                ticks.cancel()

    async def wait_until_changes_are_reported(self, within: float) -> bool:
        """Wait until no report waits; return whether that was so within so many seconds."""
        end = self._clock.monotonic() + within
        while (busy := self._has_unreported_changes) and self._clock.monotonic() < end:
            await self._clock.sleep(_TICK)
        return not busy

    async def close(self) -> None:
        """Let the agents poll no more."""
        for agent in self._all_agents():
            await agent.stop_and_drop_unpublished()

    @property
    def _has_unreported_changes(self) -> bool:
        """Whether agents have not seen the last change, or not reported what they saw."""
        return bool(self.counters.unpublished_reports) or any(
            agent.last_document is not scope.document
            for scope in self._scopes
            for agent in scope.agents
        )

    def _all_agents(self) -> list[SimulatedAgent]:
        return [agent for scope in self._scopes for agent in scope.agents]

    async def _make_changes(self, group: asyncio.TaskGroup, changes: int | None) -> None:
        if not self._plan.rate:
            await asyncio.Event().wait()
        began = self._clock.monotonic()
        count = 0
        while changes is None or count < changes:
            scope = self._scopes[count % len(self._scopes)]
            event = scope.advance_oldest_or_schedule_event()
            count += 1
            if event is not None and self._plan.votes:
                group.create_task(self._let_agent_of_affected_vm_approve(scope, event))
            await self._clock.sleep(began + count / self._plan.rate - self._clock.monotonic())

    async def _let_agent_of_affected_vm_approve(
        self, scope: SimulatedScope, event: ScheduledEvent
    ) -> None:
        await self._clock.sleep(scope.poll_interval)  # the hub must know of the event first
        agent = scope.find_agent_of_affected_vm(event)
        if agent is not None:
            await agent.vote(event)

    async def _keep_advancing_due_simulated_events(self) -> None:
        while True:
            await self._clock.sleep(_TICK)
            for scope in self._scopes:
                scope.azure.tick()


@contextmanager
def _rare_garbage_collections() -> Iterator[None]:
    """Let the collector leave out the objects of all connections, and come rarely.

    Else it takes half of the CPU time, and holds all agents up meanwhile.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _new_id() -> str:
    return str(uuid4())


@asynccontextmanager
async def simulated_fleet(
    settings: AgentSettings,
    plan: FleetPlan,
    *,
    on_connected: Callable[[], None] = lambda: None,
    on_recorded: OnRecorded = lambda _, __, ___: None,
    new_id: Callable[[], str] = _new_id,
) -> AsyncIterator[SimulatedFleet]:
    """Yield a fleet whose agents are connected. Raises TimeoutError if they cannot connect."""
    fleet = SimulatedFleet(settings, plan, on_recorded=on_recorded, new_id=new_id)

    async def run_agents() -> None:
        async with asyncio.TaskGroup() as group:
            holder.set_result(group)
            await asyncio.Event().wait()

    holder: asyncio.Future[asyncio.TaskGroup] = asyncio.get_running_loop().create_future()
    agents = asyncio.create_task(run_agents(), name="simulated agents")
    try:
        await fleet.connect(await holder, on_connected)
        with _rare_garbage_collections():
            yield fleet
    finally:
        await fleet.close()
        agents.cancel()
        await asyncio.gather(agents, return_exceptions=True)
