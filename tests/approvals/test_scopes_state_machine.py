"""Random sequences of what can happen in several scopes, on the running gate of a hub.

The gate and its store are real. A model of a few lines knows what the port may be asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from typing_extensions import override  # in typing from Python 3.12

from relay.approvals import ClaimedGrant
from relay.approvals.request import DecisionKind
from relay.errors import SourceError
from relay.events.model import ScheduledEvent
from relay.store import Mode
from tests.approvals.builders import build_event
from tests.approvals.running_gate import (
    ANSWERS,
    NOBODY,
    REFUSED,
    RETURNED,
    GateHarness,
    MachineOnFile,
    ScopeOfFleet,
    running_hub,
    start_request_tasks,
)
from tests.clocks import ManualClock
from tests.conftest import DebugLoop
from tests.depth import depth

T = TypeVar("T")
_SCOPES = ("a", "b", "c")
_EVENTS: dict[str, dict[str, Any]] = {
    "user": {"event_source": "User"},
    "user, other machine": {"event_source": "User", "resources": ("db-2",)},
    "voted": {"event_type": "Redeploy"},
    "without a rule": {"event_type": "Freeze"},
    "started": {"event_source": "User", "event_status": "Started", "not_before": None},
    "gone": {},
}
_ANSWERS = ANSWERS | {"returned": RETURNED}
_scopes = st.sampled_from(_SCOPES)
_ids = st.sampled_from(["E-1", "E-2"])


class _CheckedScope(ScopeOfFleet):
    """A scope that checks every StartRequest before it answers."""

    def __init__(self, machine: Scopes, name: str) -> None:
        super().__init__(machine.clock, name, agents=("vm-0", "vm-1"))
        self._machine = machine
        self.answer: asyncio.Future[SourceError | None] | None = None
        self.in_flight: set[tuple[str, str]] = set()
        """The EventIds and revisions in the StartRequest that has no answer yet."""
        self.final_answers: set[tuple[str, str]] = set()
        """The EventIds and revisions that IMDS accepted or refused."""

    def find(self, event_id: str) -> ScheduledEvent | None:
        return next((event for event in self.document if event.event_id == event_id), None)

    @override
    async def poll(self) -> None:
        """An event that has left the document is another one when it comes back."""
        for events in (self.in_flight, self.final_answers):
            events -= {event for event in events if self.find(event[0]) is None}
        await super().poll()

    @override
    async def send_start_request(self, scope: str, claim: ClaimedGrant) -> None:
        assert scope == self.scope
        assert self.answer is None, "two StartRequests in flight in a scope"
        self._machine.check_claim(self, claim)
        self.in_flight = {(claim.event_id, claim.grant.revision)}
        self.answer = asyncio.get_running_loop().create_future()
        try:
            answer = await self.answer
        finally:
            self.answer = None
        if answer is None or answer is REFUSED:
            self.final_answers |= self.in_flight
        if answer is not None:
            raise answer


class Scopes(MachineOnFile):
    """What can happen in three scopes, in any order."""

    @initialize()
    def begin(self) -> None:
        runner = asyncio.Runner(debug=True, loop_factory=DebugLoop)
        self.runner = self.closing.enter_context(runner)
        self.clock = ManualClock()
        self.mode: Mode = "on"
        self.held: set[tuple[str, str]] = set()
        self.scopes = {name: self._run(self._make_scope(name)) for name in _SCOPES}
        self._run(self._open())
        self.closing.callback(lambda: self._run(self.stack.aclose()))
        for name in _SCOPES:
            self.azure_says(name, "E-1", "user", is_read=True)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def _make_scope(self, name: str) -> _CheckedScope:
        return _CheckedScope(self, name)

    async def _open(self) -> None:
        self.stack = AsyncExitStack()
        hub = running_hub(self.folder, *self.scopes.values())
        self.harness: GateHarness = await self.stack.enter_async_context(hub)
        await self.harness.settle()

    async def _settle(self) -> None:
        """Wait until the gate waits. If it has failed, say why."""
        await self.harness.settle()
        self.harness.check_running()

    def check_claim(self, scope: _CheckedScope, claim: ClaimedGrant) -> None:
        assert self.mode == "on"
        assert (scope.scope, claim.event_id) not in self.held
        event = scope.find(claim.event_id)
        assert event is not None
        assert (event.event_status, event.revision) == ("Scheduled", claim.grant.revision)
        assert event.not_before_time is not None
        assert self.clock.now() < event.not_before_time
        assert (event.event_id, event.revision) not in scope.final_answers
        key = f"{claim.event_id.lower()}@{scope.scope}"
        rows = [row for row in self.harness.journal() if row.event_key == key]
        (row,) = (row for row in rows if row.position == claim.journal_head.position)
        assert (row.kind, row.hash) == ("claim", claim.journal_head.hash)
        note = orjson.loads(row.body)
        assert scope.agents
        assert note["agent"] == claim.agent == scope.agents[0]
        assert (note["revision"], note["attempt"]) == (event.revision, claim.attempt_number)
        granted = [row.position for row in rows if row.kind == "approval.granted"]
        assert note["granted"] in granted

    # --- Azure

    @rule(
        scope=_scopes,
        event_id=_ids,
        kind=st.sampled_from([*_EVENTS, "user", "user", "voted"]),
        is_read=st.sampled_from([True, True, False]),
    )
    def azure_says(self, scope: str, event_id: str, kind: str, is_read: bool) -> None:
        self._run(self._azure_says(self.scopes[scope], event_id, kind, is_read))

    async def _azure_says(
        self, scope: _CheckedScope, event_id: str, kind: str, is_read: bool
    ) -> None:
        others = [event for event in scope.document if event.event_id != event_id]
        event = build_event(event_id, at=self.clock.now(), **_EVENTS[kind])
        new = [] if kind == "gone" else [event]
        scope.document = (*others, *new)
        if is_read:
            await scope.poll()
        await self._settle()

    @precondition(lambda self: any(scope.answer for scope in self.scopes.values()))
    @rule(data=st.data(), answer=st.sampled_from([*_ANSWERS, "200"]))
    def imds_answers(self, data: st.DataObject, answer: str) -> None:
        in_flight = [name for name, scope in self.scopes.items() if scope.answer]
        scope = self.scopes[data.draw(st.sampled_from(in_flight))]
        self._run(self._answer(scope, _ANSWERS[answer]))

    async def _answer(self, scope: _CheckedScope, answer: SourceError | None) -> None:
        assert scope.answer is not None
        scope.answer.set_result(answer)
        await self._settle()

    @rule(scope=_scopes, may_read=st.booleans())
    def reads_hang(self, scope: str, may_read: bool) -> None:
        """Fresh reads hang from now on, or come through again."""
        self._run(self._reads_hang(self.scopes[scope], may_read))

    async def _reads_hang(self, scope: _CheckedScope, may_read: bool) -> None:
        if may_read:
            scope.may_read.set()
        else:
            scope.may_read.clear()
        await self._settle()

    @rule(scope=_scopes, agents=st.sampled_from([[], ["vm-0"], ["vm-0"], ["vm-1", "vm-0"]]))
    def agents_come_and_go(self, scope: str, agents: list[str]) -> None:
        self.scopes[scope].agents = agents

    @rule(scope=_scopes)
    def a_read_fails(self, scope: str) -> None:
        self.scopes[scope].read_errors.append(NOBODY)

    # --- people, time and crashes

    @rule(
        scope=_scopes,
        event_id=_ids,
        decision=st.sampled_from(["approve", "approve", "hold", "release"]),
    )
    def somebody_decides(self, scope: str, event_id: str, decision: DecisionKind) -> None:
        """Somebody votes for the state that the hub knows, or holds or releases the event."""
        self._run(self._decide(self.scopes[scope], event_id, decision))

    async def _decide(self, scope: _CheckedScope, event_id: str, decision: DecisionKind) -> None:
        of = scope.find(event_id) or build_event(event_id)
        answer = await self.harness.submit(decision, "alice", of, scope=scope.scope)
        if answer.status == 202 and decision != "approve":
            self._note_hold(scope.scope, event_id, is_held=decision == "hold")
        await self._settle()

    def _note_hold(self, scope: str, event_id: str, *, is_held: bool) -> None:
        (self.held.add if is_held else self.held.discard)((scope, event_id))

    @rule(mode=st.sampled_from(["on", "on", "on", "on", "off", "dry-run"]))
    def switch(self, mode: Mode) -> None:
        self._run(self._switch(mode))

    async def _switch(self, mode: Mode) -> None:
        if mode == "on":
            self.mode = mode
        await self.harness.gate.set_approval_mode(mode, "local:root")
        self.mode = mode
        await self._settle()

    @rule(seconds=st.sampled_from([0.05, 1.0, 1.0, 8.0, 120.0]))
    def time_passes(self, seconds: float) -> None:
        self._run(self._advance(seconds))

    async def _advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self._settle()

    @rule()
    def crash(self) -> None:
        """Lose everything that is not on disk, and the answers to what is in flight."""
        self._run(self._crash())

    async def _crash(self) -> None:
        await self.stack.aclose()
        assert start_request_tasks() == []
        assert self.harness.gate.engine.in_flight == set()
        await self._open()

    @precondition(lambda self: self.mode == "on")
    @rule(scope=_scopes)
    def a_scope_that_works_is_done_whatever_the_others_do(self, scope: str) -> None:
        """Each event that may start is accepted, though the other scopes hang, fail or pause."""
        self._run(self._finish(self.scopes[scope]))

    async def _finish(self, scope: _CheckedScope) -> None:
        scope.may_read.set()
        scope.read_errors.clear()
        scope.agents = ["vm-0"]
        await scope.poll()
        await self._settle()
        for _ in range(30):
            if scope.answer is not None:
                await self._answer(scope, None)
            elif self._unsent(scope):
                await self._advance(1)
        assert not self._unsent(scope), "a grant was not sent"

    def _unsent(self, scope: _CheckedScope) -> bool:
        """Whether an event may start whose StartRequest has no final answer."""
        return any(
            (event.event_source, event.event_status) == ("User", "Scheduled")
            and event.not_before_time is not None
            and self.clock.now() < event.not_before_time
            and (scope.scope, event.event_id) not in self.held
            and (event.event_id, event.revision) not in scope.final_answers
            for event in scope.document
        )

    @invariant()
    def what_is_in_flight_is_what_was_sent(self) -> None:
        """The engine knows of no StartRequest but those that wait for their answer."""
        in_flight = self.harness.gate.engine.in_flight
        scopes = [scope for scope in self.scopes.values() if scope.answer is not None]
        assert bool(in_flight) == bool(scopes)
        assert len(in_flight) <= len(scopes) * 2


TestScopes = Scopes.TestCase
TestScopes.settings = settings(max_examples=depth(200, 6), stateful_step_count=40)
