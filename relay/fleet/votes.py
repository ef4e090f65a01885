"""The votes of machines: what programs on the VMs of a fleet decide about their own VM.

`VoteForwarder` is that of the agent: it passes on the body of ``POST /v1/approvals``, and gives the
program the hub's answer. Until the hub has answered, nothing is decided: silence is no answer.
`MachineVotes` is that of the hub: it limits the rate, and has the gate decide.

Which machine votes, and in which scope, follows from what RabbitMQ has checked: the user of the
agent and the routing key. Nothing in the body changes that. What a machine may decide is up to
`relay.approvals.admission`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

import orjson

from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import NotDecidedHere
from relay.approvals.principals import machine_principal
from relay.approvals.request import (
    Caller,
    DecisionAnswer,
    DecisionRequest,
    InvalidField,
    Request,
    Rights,
    refuse,
    validate_body,
)
from relay.clock import CALLER_BURST, CALLER_RATE, Clock, TokenBuckets
from relay.errors import DeliveryError
from relay.fleet.messages import VoteAnswer, VoteMessage
from relay.fleet.routing import AuthorizedSender
from relay.logs import log_extra
from relay.store import Mode
from relay.store.standing_holds import StandingHolds

T = TypeVar("T")
ANSWER_TIMEOUT = 5.0
"""Seconds that a local program waits for the answer."""
_STANDING_HOLDS = "this relay is an agent: standing holds are on the hub"


class VoteForwarder:
    """The `DecisionHandler` of an agent: the hub decides. ``engine`` has approvals off.

    ``publish`` publishes a vote, and raises DeliveryError.
    """

    def __init__(
        self, engine: ApprovalEngine, publish: Callable[[VoteMessage], Awaitable[None]]
    ) -> None:
        self.engine = engine
        self._publish = publish
        self._answers: dict[str, asyncio.Future[VoteAnswer]] = {}  # by the nonce of the vote

    def handle_vote_answer(self, answer: VoteAnswer) -> None:
        """Give an answer of the hub to the program that waits for it, if it still does."""
        future = self._answers.get(answer.nonce)
        if future is not None and not future.done():
            future.set_result(answer)

    async def submit(self, request: Request) -> DecisionAnswer:
        """Return the hub's answer; 503 if it is late. Raises NotDecidedHere for standing holds."""
        if not isinstance(request, DecisionRequest):
            raise NotDecidedHere(_STANDING_HOLDS)
        body = {
            "eventId": request.event_id,
            "decision": request.decision,
            "revision": request.revision,
            **request.remarks,
            "scope": request.scope,
        }
        # A late answer to an earlier request with this id is none to another body.
        nonce = secrets.token_hex(16)
        vote = VoteMessage(
            nonce=nonce,
            request_id=request.request_id or nonce,
            user=request.caller.principal,
            body={name: value for name, value in body.items() if value is not None},
        )
        answered = self._answers[nonce] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                await self._publish(vote)
                answer = await answered
        except TimeoutError:
            return _hub_unavailable_answer(f"the hub did not answer within {ANSWER_TIMEOUT:g} s")
        except DeliveryError as error:
            return _hub_unavailable_answer(f"the hub could not be asked: {error.reason}")
        finally:
            del self._answers[nonce]
        return _read_answer(answer)

    async def read_standing_holds(self, _read: Callable[[StandingHolds], T]) -> T:
        raise NotDecidedHere(_STANDING_HOLDS)

    async def set_approval_mode(self, _mode: Mode, _principal: str) -> Mode:
        raise NotDecidedHere("this relay is an agent: set the mode of approvals on the hub")


def _read_answer(answer: VoteAnswer) -> DecisionAnswer:
    if answer.status == 202:
        return DecisionAnswer(answer.status, answer.body)
    is_refusal = answer.status >= 400 and answer.status in {status.value for status in HTTPStatus}
    problem = {"detail": "the hub gave no reason"}
    for name in ("detail", "field", "revision"):
        if isinstance(value := answer.body.get(name), str):
            problem[name] = value
    return DecisionAnswer(answer.status if is_refusal else 503, problem)


def _hub_unavailable_answer(reason: str) -> DecisionAnswer:
    again = "try again with the same id (the header Idempotency-Key)"
    return refuse(503, f"{reason}. Nobody knows whether anything was decided: {again}")


# --- on the hub


USER_RATE = 50.0
USER_BURST = 1000
"""Votes of all machines of a RabbitMQ user: in a second, and at once.

All machines of a scale set may vote at the same time. The limit matters because a user can speak
for relays that it makes up.
"""
ANSWER_RATE = 1.0
"""Answers 429 in a second, after a burst of `CALLER_BURST`. Each answer costs a confirmed message.

Further votes get no answer, so that a flood costs the hub little more than to read it.
"""
_log = logging.getLogger(__name__)


class MachineVotes:
    """Answers votes within their rates. ``submit`` is that of the gate."""

    def __init__(
        self, submit: Callable[[DecisionRequest], Awaitable[DecisionAnswer]], clock: Clock
    ) -> None:
        self._submit = submit
        self._clock = clock
        self._machines = TokenBuckets(CALLER_RATE, CALLER_BURST)
        self._users = TokenBuckets(USER_RATE, USER_BURST)
        self._answers = TokenBuckets(ANSWER_RATE, CALLER_BURST)

    async def answer(self, sender: AuthorizedSender, vote: VoteMessage) -> VoteAnswer | None:
        """Return the answer to a vote, whose decision is on disk then; None: it gets none.

        A repeat gets its first answer. The answer is 503 if the decision cannot be written.
        """
        if exceeded := self._charge_sender(sender):
            if self._answers.take(exceeded, self._clock.monotonic()):
                return None
            answer = refuse(429, f"too many votes of {exceeded}: wait, and try again")
        else:
            answer = await self._submit_vote(sender, vote)
        return VoteAnswer(nonce=vote.nonce, status=answer.status, body=dict(answer.body))

    async def _submit_vote(self, sender: AuthorizedSender, vote: VoteMessage) -> DecisionAnswer:
        principal = machine_principal(sender.scope, sender.relay)
        try:
            body = validate_body(vote.body)
        except InvalidField as error:
            return refuse(422, str(error), error.field)
        request = body.to_request(
            Caller(principal, "fleet", Rights(frozenset({"approve", "hold"}))),
            self._clock.now(),
            orjson.dumps(dict(vote.body), option=orjson.OPT_SORT_KEYS),
            arrival_scope=sender.scope,
            request_id=vote.request_id,
        )
        answer = await self._submit(request)
        if answer.accepted and not answer.repeat:
            decision, event_id = body.decision, body.eventId
            extra = log_extra(
                decision=decision, eventId=event_id, scope=sender.scope, principal=principal
            )
            what = f"{decision} of {event_id}"
            _log.info("%s at %s decided: %s", vote.user, principal, what, extra=extra)
        return answer

    def _charge_sender(self, sender: AuthorizedSender) -> str | None:
        """Return who is over their rate: the machine, or its user; None: neither is."""
        principal, now = machine_principal(sender.scope, sender.relay), self._clock.monotonic()
        if self._machines.take(principal, now):
            return principal  # it takes no token from the other machines of its user
        if self._users.take(sender.user, now):
            self._machines.refund(principal, now)
            return f"user {sender.user}"
        return None
