"""The votes of machines: what an agent passes on, and what the hub decides about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from relay.approvals import ApprovalsSettings, StartRequestPort
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate, NotDecidedHere
from relay.approvals.request import Caller, DecisionAnswer, DecisionBody, Rights
from relay.approvals.status import ApprovalStatus
from relay.clock import CALLER_BURST
from relay.errors import Deferred, DeliveryError
from relay.events.build import Origin
from relay.events.model import ScheduledEvent
from relay.fleet import votes
from relay.fleet.messages import VoteAnswer, VoteMessage
from relay.fleet.routing import AuthorizedSender
from relay.fleet.votes import USER_BURST, MachineVotes, VoteForwarder
from relay.ingest import EventNews, Recorder
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import Store, open_store
from tests import hostile
from tests.approvals.builders import build_event
from tests.clocks import NOON, ManualClock
from tests.eventually import eventually
from tests.store.open_store import read_journal

BODY = {"eventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123", "decision": "approve", "revision": "r1"}
RECORDED = {"approvalId": "a1", "eventId": BODY["eventId"], "state": "granted", "votes": 1}
CALLER = Caller("local:ada", "local", Rights(frozenset({"approve"})))


class Agent:
    """The votes of an agent, and the hub's side of them."""

    def __init__(self) -> None:
        self.published: list[VoteMessage] = []
        self.failure: DeliveryError | None = None
        self.forwarder = VoteForwarder(cast("ApprovalEngine", None), self._publish)

    async def _publish(self, vote: VoteMessage) -> None:
        if self.failure is not None:
            raise self.failure
        self.published.append(vote)

    def vote(self, request_id: str = "id-1", **remarks: Any) -> asyncio.Task[DecisionAnswer]:
        body = DecisionBody.model_validate({**BODY, **remarks})
        request = body.to_request(CALLER, NOON, b"", request_id=request_id)
        return asyncio.create_task(self.forwarder.submit(request))

    async def asked(self, count: int = 1) -> VoteMessage:
        await eventually(lambda: len(self.published) >= count)
        return self.published[-1]

    def answer(self, status: int, body: dict[str, Any], to: int = -1) -> None:
        """Answer the vote with this index."""
        answer = VoteAnswer(nonce=self.published[to].nonce, status=status, body=body)
        self.forwarder.handle_vote_answer(answer)


async def test_a_local_program_gets_the_answer_of_the_hub() -> None:
    agent = Agent()
    call = agent.vote(reason="drained", ticket="CHG-7")
    vote = await agent.asked()
    assert (vote.request_id, vote.user) == ("id-1", "local:ada")
    assert vote.body == {**BODY, "reason": "drained", "ticket": "CHG-7"}
    agent.answer(202, RECORDED)
    assert await call == DecisionAnswer(202, RECORDED)


@pytest.mark.parametrize(
    ("status", "told", "expected", "body"),
    [
        (
            409,
            {"detail": "it has changed", "revision": "r2", "headers": {"X": "y"}, "x": 1},
            409,
            {"detail": "it has changed", "revision": "r2"},
        ),
        (200, {}, 503, {"detail": "the hub gave no reason"}),
        (302, {}, 503, {"detail": "the hub gave no reason"}),
        (499, {}, 503, {"detail": "the hub gave no reason"}),
        (502, {}, 502, {"detail": "the hub gave no reason"}),
    ],
)
async def test_an_answer_that_does_not_say_recorded_is_a_refusal_with_its_reason_or_an_error(
    status: int, told: dict[str, Any], expected: int, body: dict[str, Any]
) -> None:
    agent = Agent()
    call = agent.vote()
    await agent.asked()
    agent.answer(status, told)
    assert await call == DecisionAnswer(expected, body)


async def test_after_silence_the_same_id_may_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(votes, "ANSWER_TIMEOUT", 0.05)
    agent = Agent()
    answer = await agent.vote()
    assert (answer.status, "the same id" in answer.body["detail"]) == (503, True)
    monkeypatch.setattr(votes, "ANSWER_TIMEOUT", 60.0)
    call = agent.vote()
    assert (await agent.asked(2)).request_id == agent.published[0].request_id
    agent.answer(202, RECORDED)
    assert (await call).status == 202


@pytest.mark.parametrize("request_id", ["id-1", "id-2"])
async def test_an_answer_to_another_request_is_not_taken(request_id: str) -> None:
    """An id can be used again with another body: the answer to the first says nothing of that."""
    agent = Agent()
    first, second = agent.vote("id-1"), agent.vote(request_id, decision="hold")
    await agent.asked(2)
    agent.answer(409, {"detail": "another body"}, to=1)
    agent.answer(202, RECORDED, to=0)
    assert ((await first).status, (await second).status) == (202, 409)


async def test_without_the_broker_the_answer_is_503_at_once() -> None:
    agent = Agent()
    agent.failure = Deferred("no connection")
    answer = await agent.vote()
    assert (answer.status, "could not be asked" in answer.body["detail"]) == (503, True)


async def test_the_mode_is_set_on_the_hub() -> None:
    with pytest.raises(NotDecidedHere, match="on the hub"):
        await Agent().forwarder.set_approval_mode("on", "local:ada")


# --- on the hub: a machine votes for its own resource, in its own scope alone


HUB = Origin("hub", "hub-1")
A, B = "vmss-a-1f0c33ab", "vmss-b-9d2e77c0"
RULE = {"name": "all", "approve": {"from": ["vm:vmss-*/*"], "each_resource": True}}


@dataclass(slots=True, kw_only=True)
class VotingHub:
    """A hub that takes votes, and whose only rule asks each machine for one."""

    path: Path
    store: Store
    gate: Gate
    votes: MachineVotes
    clock: ManualClock

    async def observe(self, scope: str, event: ScheduledEvent) -> ScheduledEvent:
        now, recorder = self.clock.now(), Recorder(HUB, None, None)
        news = [EventNews(scope, now, event.event_id, event, 1)]
        await self.store.transact(lambda tx: recorder.record_observations(tx, news, now))
        return event

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
        fields = {"eventId": event.event_id, "decision": decision, "revision": event.revision}
        vote = VoteMessage(
            nonce="n", request_id=request_id, user="local:root", body=fields | changes
        )
        answer = await self.votes.answer(AuthorizedSender(sender_scope, relay, user), vote)
        assert answer is not None, "the vote was dropped"
        return answer

    async def status(self, event: ScheduledEvent, scope: str = A) -> ApprovalStatus:
        def read(tx: Any) -> ApprovalStatus:
            (found,) = tx.occurrences.find_occurrences_by_reference(event.event_id, scope)
            return self.gate.engine.status(tx, found, self.clock.now())

        return await self.store.read(read)

    def recorded(self, name: str) -> list[dict[str, Any]]:
        return [orjson.loads(row.body) for row in read_journal(self.path) if row.kind == name]


def reboot(*resources: str) -> ScheduledEvent:
    return build_event("E-1", resources=resources)


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[VotingHub]:
    clock, path = ManualClock(), tmp_path / "hub.db"
    owner = StateFileScopeAndVm(HUB.scope, None, is_hub=True)
    settings = ApprovalsSettings.model_validate({"tell_first": "0s", "rules": [RULE]})
    async with open_store(StoreSettings(path=path), owner, clock, lambda _: ()) as store:
        port = cast("StartRequestPort", None)
        gate = Gate(ApprovalEngine(settings, HUB), store, port, clock, lambda _: False)
        votes = MachineVotes(gate.submit, clock)
        with gate.in_force():
            yield VotingHub(path=path, store=store, gate=gate, votes=votes, clock=clock)


async def test_a_vote_counts_in_the_scope_of_its_sender_alone(hub: VotingHub) -> None:
    """Both scopes have the same EventId, and a machine of the same name."""
    event = await hub.observe(A, reboot("vmss_0"))
    await hub.observe(B, event)
    assert (await hub.vote("vmss_0", event, sender_scope=B)).body["state"] == "granted"
    assert [(await hub.status(event, scope)).vote_count for scope in (A, B)] == [0, 1]


async def test_the_id_of_another_machine_is_no_repeat(hub: VotingHub) -> None:
    """A machine learns nothing of the answer to another, and takes no id away from it."""
    event = await hub.observe(A, reboot("vmss_0", "vmss_1"))
    await hub.observe(B, event)
    approvals = set()
    for relay, scope in (("vmss_0", A), ("vmss_1", A), ("vmss_0", B)):
        answer = await hub.vote(relay, event, sender_scope=scope, request_id="same")
        assert answer.status == 202
        approvals.add(answer.body["approvalId"])
    assert len(approvals) == 3
    assert (await hub.vote("vmss_7", event, request_id="same")).status == 403


async def test_a_malformed_vote_gets_the_problem_of_the_api_and_no_record(hub: VotingHub) -> None:
    event = await hub.observe(A, reboot("vmss_0"))
    whole = {"eventId": event.event_id, "decision": "approve", "revision": event.revision}
    for field, value in hostile.WRONG_FIELDS:
        hub.clock.advance(60)
        body = hostile.with_wrong_field(whole, field, value)
        vote = VoteMessage(nonce="n", request_id="one", user="local:root", body=body)
        answer = await hub.votes.answer(AuthorizedSender(A, "vmss_0", "vmss"), vote)
        assert answer is not None
        assert (answer.status, answer.body["field"]) == (422, field), value
        assert answer.body["detail"]
    assert hub.recorded("approval.refused") == hub.recorded("approval.recorded") == []


# --- floods


async def test_a_machine_over_its_rate_gets_429_and_delays_no_other(hub: VotingHub) -> None:
    event = await hub.observe(A, reboot("vmss_0", "vmss_1"))
    for number in range(CALLER_BURST):
        await hub.vote("vmss_0", event, request_id=f"{number}", revision="of yesterday")
    recorded = len(hub.recorded("approval.refused"))
    for number in range(CALLER_BURST):
        answer = await hub.vote("vmss_0", event, request_id=f"more-{number}")
        problem = {"detail": f"too many votes of vm:{A}/vmss_0: wait, and try again"}
        assert (answer.status, dict(answer.body)) == (429, problem)
    assert len(hub.recorded("approval.refused")) == recorded
    assert hub.recorded("approval.recorded") == []
    assert (await hub.vote("vmss_1", event)).status == 202
    hub.clock.advance(1)
    assert (await hub.vote("vmss_0", event, request_id="later")).status == 202


async def test_a_flood_gets_no_answer_in_the_end_and_then_one_a_second(hub: VotingHub) -> None:
    """An answer is a confirmed message: a flood of them would delay the other machines."""
    event = await hub.observe(A, reboot("vmss_0", "vmss_1"))
    body = {"eventId": "E-1", "decision": "approve", "revision": event.revision}
    vote = VoteMessage(nonce="n", request_id="one", user="local:root", body=body)
    flooding, quiet = AuthorizedSender(A, "vmss_0", "vmss"), AuthorizedSender(A, "vmss_1", "vmss")

    async def flood(count: int) -> list[int | None]:
        answers = [await hub.votes.answer(flooding, vote) for _ in range(count)]
        return [None if answer is None else answer.status for answer in answers]

    statuses = await flood(3 * CALLER_BURST)
    assert statuses == [202] * CALLER_BURST + [429] * CALLER_BURST + [None] * CALLER_BURST
    answer = await hub.votes.answer(quiet, vote)
    assert answer is not None
    assert answer.status == 202
    hub.clock.advance(1)
    assert (await flood(20))[10:] == [429] + [None] * 9


async def test_a_user_who_makes_up_relays_is_limited_and_delays_nobody_else(hub: VotingHub) -> None:
    event = await hub.observe(A, reboot("vmss_0", "vmss_1"))
    statuses = [
        (await hub.vote(f"made-up-{number}", event, decision="none")).status
        for number in range(USER_BURST + CALLER_BURST - 1)
    ]
    assert statuses == [422] * USER_BURST + [429] * (CALLER_BURST - 1)
    answer = await hub.vote("vmss_0", event)
    detail = "too many votes of user vmss: wait, and try again"
    assert (answer.status, answer.body["detail"]) == (429, detail)
    assert (await hub.vote("vmss_0", event, user="another")).status == 202
