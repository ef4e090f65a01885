"""Answers the votes of machines: what programs on the VMs of a fleet decide about their own VM.

A vote is the body of ``POST /v1/approvals``, which an agent passes on. `VoteAnswerer` takes votes
from the hub and sends the answers. `MachineVoteSubmitter` limits their rate and submits each to the
gate: the answer is that of the API of the hub.

A machine votes in its scope: the VMs that read the same document. Which machine votes, and in which
scope, follows from what RabbitMQ has checked: the user of the agent and the routing key, which
names the agent (its relay word) and the scope. Nothing in the body changes that. What a machine may
decide is up to `relay.approvals.admission`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

import orjson

from relay.approvals.machine_principals import machine_principal
from relay.approvals.request import (
    Caller,
    DecisionAnswer,
    DecisionRequest,
    InvalidField,
    MalformedJsonBody,
    Rights,
    validate_body,
)
from relay.clock import Clock
from relay.errors import DeliveryError
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.hub.link import CumulativeAcknowledger
from relay.fleet.messages import VoteAnswer, VoteMessage
from relay.fleet.routing import AuthorizedSender, command_key
from relay.log_fields import log_extra
from relay.rate_limits import CALLER_BURST, CALLER_RATE, TokenBuckets

CHANNEL = "fleet"
RIGHTS = Rights(frozenset({"approve", "hold"}))
"""What a machine may do, for itself alone."""
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
MAX_VOTES_AT_ONCE = 200
"""Votes that are decided at the same time. The others wait in the queue."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_log = logging.getLogger(__name__)


class MachineVoteSubmitter:
    """Submits the votes of machines. ``submit`` is that of the gate."""

    def __init__(
        self, submit: Callable[[DecisionRequest], Awaitable[DecisionAnswer]], clock: Clock
    ) -> None:
        self._submit = submit
        self._clock = clock
        self._machines = TokenBuckets(CALLER_RATE, CALLER_BURST)
        self._users = TokenBuckets(USER_RATE, USER_BURST)
        self._answers = TokenBuckets(ANSWER_RATE, CALLER_BURST)

    def apply_rate_limit_to_vote(
        self, sender: AuthorizedSender, vote: VoteMessage
    ) -> VoteAnswer | Literal["decide", "drop"]:
        """Return what to do with a vote that has arrived: decide it, drop it, or answer this.

        Call it once for each vote.
        """
        exceeded = self._charge_sender(sender)
        if exceeded is None:
            return "decide"
        if self._answers.take(exceeded, self._clock.monotonic()):
            return "drop"
        detail = f"too many votes of {exceeded}: wait, and try again"
        return VoteAnswer(request_id=vote.request_id, status=429, body={"detail": detail})

    async def decide(self, sender: AuthorizedSender, vote: VoteMessage) -> VoteAnswer:
        """Decide a vote that was admitted; return the answer to it. The decision is on disk then.

        A repeat gets its first answer. The answer is 503 if the decision cannot be written.
        """
        answer = await self._submit_vote(sender, vote)
        return VoteAnswer(request_id=vote.request_id, status=answer.status, body=dict(answer.body))

    async def _submit_vote(self, sender: AuthorizedSender, vote: VoteMessage) -> DecisionAnswer:
        principal = machine_principal(sender.scope, sender.relay)
        if _REQUEST_ID.fullmatch(vote.request_id) is None:
            return _refusal(400, "expected a request id of at most 256 visible ASCII characters")
        try:
            body = validate_body(vote.body)
        except MalformedJsonBody as error:
            return _refusal(400, str(error))
        except InvalidField as error:
            return _refusal(422, str(error), field=error.field)
        request = body.to_request(
            Caller(principal, CHANNEL, RIGHTS),
            self._clock.now(),
            orjson.dumps(dict(vote.body), option=orjson.OPT_SORT_KEYS),
            arrival_scope=sender.scope,
            request_id=vote.request_id,
        )
        answer = await self._submit(request)
        if answer.accepted and not answer.repeat:
            _log.info(
                "%s at %s decided: %s of %s",
                vote.user,
                principal,
                body.decision,
                body.eventId,
                extra=log_extra(
                    decision=body.decision,
                    eventId=body.eventId,
                    scope=sender.scope,
                    principal=principal,
                ),
            )
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


class VoteAnswerer:
    """Has each vote decided beside the hub's next messages, and sends the answer to its agent."""

    def __init__(
        self,
        votes: MachineVoteSubmitter,
        send: Callable[[str, CloudEvent], Awaitable[object]],
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        origin: Origin,
        clock: Clock,
    ) -> None:
        """``send`` publishes with a routing key, and raises DeliveryError.

        ``spawn`` runs a task of this name. ``origin`` is the hub.
        """
        self._votes = votes
        self._send = send
        self._spawn = spawn
        self._origin = origin
        self._clock = clock
        self._slots = asyncio.Semaphore(MAX_VOTES_AT_ONCE)

    async def start_answering_vote(
        self,
        sender: AuthorizedSender,
        vote: VoteMessage,
        tag: int,
        settlements: CumulativeAcknowledger,
    ) -> None:
        """Return once the vote has its turn. It is acknowledged when it is decided.

        ``tag`` is the delivery tag of its message.
        """
        admitted = self._votes.apply_rate_limit_to_vote(sender, vote)
        if admitted == "drop":
            settlements.acknowledge(tag)
            return
        refusal = None if admitted == "decide" else admitted
        await self._slots.acquire()
        self._spawn(self._answer(sender, vote, refusal, tag, settlements), "hub: vote")

    async def _answer(
        self,
        sender: AuthorizedSender,
        vote: VoteMessage,
        refusal: VoteAnswer | None,
        tag: int,
        settlements: CumulativeAcknowledger,
    ) -> None:
        try:
            answer = refusal or await self._votes.decide(sender, vote)
        except Exception:  # noqa: BLE001  # one vote must not stop the hub
            _log.exception("internal error: a vote was dead-lettered")
            settlements.dead_letter(tag)
            return
        else:
            settlements.acknowledge(tag)
            settlements.flush()
            await self._send_answer(sender, answer)
        finally:
            self._slots.release()

    async def _send_answer(self, sender: AuthorizedSender, answer: VoteAnswer) -> None:
        try:
            await self._send(
                command_key(sender.scope, sender.relay),
                answer.to_event(self._origin, self._clock.now()),
            )
        except DeliveryError as error:
            _log.warning(
                "the answer to a vote of agent %s of scope %s was not sent: %s",
                sender.relay,
                sender.scope,
                error.reason,
            )


def _refusal(status: int, detail: str, **members: str) -> DecisionAnswer:
    return DecisionAnswer(status, {"detail": detail, **members})
