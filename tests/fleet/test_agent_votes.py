"""Decisions of local programs: the agent passes them to the hub, and the hub's answer back."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import NotDecidedHere
from relay.approvals.request import Caller, DecisionAnswer, DecisionBody, Rights
from relay.errors import Deferred, DeliveryError
from relay.fleet import votes
from relay.fleet.messages import VoteAnswer, VoteMessage
from relay.fleet.votes import VoteForwarder
from tests.clocks import NOON
from tests.eventually import eventually

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
