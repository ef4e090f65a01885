"""The hub's side of votes: a store with several scopes, a gate, and the votes of machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from relay.approvals import ApprovalsSettings, ClaimedGrant
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.approvals.request import Caller, DecisionAnswer, DecisionRequest, Rights
from relay.approvals.status import ApprovalStatus
from relay.events.build import Origin
from relay.events.model import ScheduledEvent
from relay.fleet.hub.votes import MachineVotes
from relay.fleet.messages import VoteAnswer, VoteMessage
from relay.fleet.routing import AuthorizedSender
from relay.ingest import EventSighting, Recorder
from relay.store import Grant, StateFileScopeAndVm, StoreSettings
from relay.store.chain import read_all_rows, verify_journal
from relay.store.file import open_for_reading
from relay.store.sqlite import Store, open_store
from tests.approvals.builders import build_event
from tests.clocks import ManualClock

HUB = Origin("hub", "hub-1")
A, B = "vmss-a-1f0c33ab", "vmss-b-9d2e77c0"
EACH = {"from": ["vm:vmss-*/*", "client:ops"], "each_resource": True}
ONE = {"votes": 1, "from": ["vm:vmss-*/*", "client:ops"]}


def rules(approve: Mapping[str, Any], **more: Any) -> ApprovalsSettings:
    """One rule for all events."""
    return ApprovalsSettings.model_validate(
        {"tell_first": "0s", "rules": [{"name": "all", "approve": approve}], **more}
    )


@dataclass(slots=True)
class Agents:
    """Stands in for the agents as the gate sees them. They accept every StartRequest."""

    started: list[tuple[str, str]] = field(default_factory=list)
    """The scope and the EventId of each."""

    @property
    def max_events_per_start_request(self) -> int:
        """One event in each order."""
        return 1

    async def refresh_events_of_grants(self, _scope: str, _grants: Sequence[Grant]) -> None:
        """Return: nothing has changed."""

    def choose_agent(self, _scope: str, _grants: Sequence[Grant]) -> str:
        """Return the only agent."""
        return "agent"

    async def send_start_request(self, scope: str, claims: Sequence[ClaimedGrant]) -> None:
        """Accept a StartRequest."""
        self.started += [(scope, claim.event_id) for claim in claims]


@dataclass(slots=True, kw_only=True)
class VotingHub:
    """A hub that takes votes."""

    path: Path
    store: Store
    gate: Gate
    votes: MachineVotes
    agents: Agents
    clock: ManualClock

    async def observe(self, scope: str, *events: ScheduledEvent) -> None:
        """Record what the document of a scope shows."""
        recorder = Recorder(HUB, None, None)
        now = self.clock.now()
        news = [EventSighting(scope, now, event, 1) for event in events]
        await self.store.transact(lambda tx: recorder.record_observations(tx, news, now))

    async def vote(
        self,
        relay: str,
        event: ScheduledEvent,
        decision: str = "approve",
        *,
        sender_scope: str = A,
        user: str = "vmss",
        request_id: str = "one",
        **changes: Any,
    ) -> VoteAnswer:
        """Decide a vote of a machine. A change to None removes a field of the body."""
        fields = {"eventId": event.event_id, "decision": decision, "revision": event.revision}
        body = {name: value for name, value in (fields | changes).items() if value is not None}
        vote = VoteMessage(request_id=request_id, user="local:root", body=body)
        answer = await self.answer(AuthorizedSender(sender_scope, relay, user), vote)
        assert answer is not None, "the vote was dropped"
        return answer

    async def answer(self, sender: AuthorizedSender, vote: VoteMessage) -> VoteAnswer | None:
        """Return the answer to a vote as the hub sends it; None: it sends none."""
        return await self.votes.answer(sender, vote)

    async def decide_as(
        self, caller: Caller, event: ScheduledEvent, decision: Any = "approve", **changes: Any
    ) -> DecisionAnswer:
        """Decide a request of somebody who is no machine."""
        return await self.gate.submit(
            DecisionRequest(
                caller=caller,
                event_id=event.event_id,
                decision=decision,
                revision=event.revision,
                at=self.clock.now(),
                **changes,
            )
        )

    async def status(self, event: ScheduledEvent, scope: str = A) -> ApprovalStatus:
        """Return how the approval of an event stands."""

        def read(tx: Any) -> ApprovalStatus:
            (found,) = tx.occurrences.find_occurrences_by_reference(event.event_id, scope)
            return self.gate.engine.status(tx, found, self.clock.now())

        return await self.store.read(read)

    async def wait_until_started(self, count: int) -> list[tuple[str, str]]:
        """Wait until so many StartRequests were sent; return them."""
        async with asyncio.timeout(60):
            while len(self.agents.started) < count:  # noqa: ASYNC110  # nothing signals it
                await asyncio.sleep(0.005)
        return self.agents.started

    def recorded(self, name: str) -> list[dict[str, Any]]:
        """Return the CloudEvents of this name in the journal, whose hashes are checked too."""
        with contextlib.closing(open_for_reading(self.path)) as reader:
            verify_journal(reader)
            return [orjson.loads(row.body) for row in read_all_rows(reader) if row.kind == name]


OPS = Caller("client:ops", "http", Rights(frozenset({"approve", "hold"})))


def reboot(*resources: str, event_id: str = "E-1", **changes: Any) -> ScheduledEvent:
    """A reboot of these machines."""
    return build_event(event_id, resources=resources, **changes)


@asynccontextmanager
async def voting_hub(
    folder: Path, settings: ApprovalsSettings | None = None
) -> AsyncIterator[VotingHub]:
    """Run a hub on the store in a folder."""
    clock, agents, path = ManualClock(), Agents(), folder / "hub.db"
    owner = StateFileScopeAndVm(HUB.scope, None, is_hub=True)
    async with open_store(StoreSettings(path=path), owner, clock, lambda _: ()) as store:
        engine = ApprovalEngine(settings or rules(EACH), HUB, client_resources={"client:ops": None})
        gate = Gate(engine, store, agents, clock, lambda _: False)
        with gate.in_force():
            task = asyncio.create_task(gate.run())
            try:
                yield VotingHub(
                    path=path,
                    store=store,
                    gate=gate,
                    votes=MachineVotes(gate.submit, clock),
                    agents=agents,
                    clock=clock,
                )
                assert not task.done(), task.exception()
            finally:
                task.cancel()
                await asyncio.wait({task})
