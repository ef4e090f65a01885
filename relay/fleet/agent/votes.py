"""Passes the decisions of local programs to the hub, and the hub's answers back.

The hub decides and records. Until it has answered, nothing is decided: silence is no answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import NotDecidedHere
from relay.approvals.request import DecisionAnswer, DecisionRequest, Request
from relay.errors import DeliveryError
from relay.fleet.messages import VoteAnswer, VoteMessage
from relay.store import Mode
from relay.store.standing_holds import StandingHolds

T = TypeVar("T")
ANSWER_TIMEOUT = 5.0
"""Seconds that a local program waits for the answer."""
MAX_WAITING = 100
"""Votes that wait for an answer. More are refused."""
_STANDING_HOLDS = "this relay is an agent: standing holds are on the hub"
_ANSWER_MEMBERS = {"detail", "field", "revision"}
"""What the problem of a refused decision may hold."""


class VoteForwarder:
    """The `DecisionHandler` of an agent: the hub decides. ``engine`` has approvals off.

    ``publish`` publishes a vote, and raises DeliveryError.
    """

    def __init__(
        self, engine: ApprovalEngine, publish: Callable[[VoteMessage], Awaitable[None]]
    ) -> None:
        self.engine = engine
        self._publish = publish
        self._answers: dict[str, asyncio.Future[VoteAnswer]] = {}  # by the id of the request

    def handle_vote_answer(self, answer: VoteAnswer) -> None:
        """Give an answer of the hub to the program that waits for it, if it still does."""
        future = self._answers.get(answer.request_id)
        if future is not None and not future.done():
            future.set_result(answer)

    async def submit(self, request: Request) -> DecisionAnswer:
        """Return the hub's answer; 503 if it is late. Raises NotDecidedHere for standing holds."""
        if not isinstance(request, DecisionRequest):
            raise NotDecidedHere(_STANDING_HOLDS)
        request_id = request.request_id or secrets.token_hex(16)
        if request_id in self._answers:
            return _hub_unavailable_answer("another request with this id waits for the hub")
        if len(self._answers) >= MAX_WAITING:
            return _hub_unavailable_answer(f"{MAX_WAITING} requests wait for the hub already")
        vote = VoteMessage(
            request_id=request_id,
            user=request.caller.principal,
            body=_approvals_request_body(request),
        )
        self._answers[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                await self._publish(vote)
                answer = await self._answers[request_id]
        except TimeoutError:
            return _hub_unavailable_answer(f"the hub did not answer within {ANSWER_TIMEOUT:g} s")
        except DeliveryError as error:
            return _hub_unavailable_answer(f"the hub could not be asked: {error.reason}")
        finally:
            del self._answers[request_id]
        return _read_answer(answer)

    async def read_standing_holds(self, _read: Callable[[StandingHolds], T]) -> T:
        raise NotDecidedHere(_STANDING_HOLDS)

    async def approval_mode(self) -> Mode:
        """Return off: this relay decides nothing."""
        return "off"

    async def set_approval_mode(self, _mode: Mode, _principal: str) -> Mode:
        raise NotDecidedHere("this relay is an agent: set the mode of approvals on the hub")


def _approvals_request_body(request: DecisionRequest) -> dict[str, Any]:
    body = {
        "eventId": request.event_id,
        "decision": request.decision,
        "revision": request.revision,
        **request.remarks,
        "scope": request.scope,
    }
    return {name: value for name, value in body.items() if value is not None}


def _read_answer(answer: VoteAnswer) -> DecisionAnswer:
    if answer.status == 202:
        return DecisionAnswer(answer.status, answer.body)
    is_refusal = answer.status >= 400 and answer.status in {status.value for status in HTTPStatus}
    members = {
        name: value
        for name, value in answer.body.items()
        if name in _ANSWER_MEMBERS and isinstance(value, str)
    }
    return DecisionAnswer(
        answer.status if is_refusal else HTTPStatus.SERVICE_UNAVAILABLE,
        {"detail": "the hub gave no reason", **members},
    )


def _hub_unavailable_answer(reason: str) -> DecisionAnswer:
    return DecisionAnswer(
        503,
        {
            "detail": f"{reason}. Nobody knows whether anything was decided: "
            "try again with the same id (the header Idempotency-Key)"
        },
    )
