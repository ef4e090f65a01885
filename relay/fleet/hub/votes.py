"""Decides what the programs on the machines of a fleet decide about their own machines.

An agent passes on the body of ``POST /v1/approvals``, and this module returns the answer that the
API of the hub would give. Who votes, and for which scope, follows from what RabbitMQ has checked:
the user and the routing key. The body has no say in it. What a machine may decide is up to
`relay.approvals.admission`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import orjson

from relay.approvals.machine_principals import machine_principal
from relay.approvals.request import (
    Caller,
    DecisionAnswer,
    DecisionBody,
    DecisionRequest,
    InvalidField,
    MalformedBody,
    Rights,
    validate_body,
)
from relay.clock import Clock
from relay.fleet.messages import VoteAnswer, VoteMessage
from relay.fleet.routing import Sender
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
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_log = logging.getLogger(__name__)


class MachineVotes:
    """Submits the votes of machines. ``submit`` is that of the gate."""

    def __init__(
        self, submit: Callable[[DecisionRequest], Awaitable[DecisionAnswer]], clock: Clock
    ) -> None:
        self._submit = submit
        self._clock = clock
        self._machines = TokenBuckets(CALLER_RATE, CALLER_BURST)
        self._users = TokenBuckets(USER_RATE, USER_BURST)
        self._answers = TokenBuckets(ANSWER_RATE, CALLER_BURST)

    def admit(self, sender: Sender, vote: VoteMessage) -> VoteAnswer | Literal["decide", "drop"]:
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

    async def decide(self, sender: Sender, vote: VoteMessage) -> VoteAnswer:
        """Decide a vote that was admitted; return the answer to it. The decision is on disk then.

        A repeat gets its first answer. The answer is 503 if the decision cannot be written.
        """
        answer = await self._submit_vote(sender, vote)
        return VoteAnswer(request_id=vote.request_id, status=answer.status, body=answer.body)

    async def _submit_vote(self, sender: Sender, vote: VoteMessage) -> DecisionAnswer:
        principal = machine_principal(sender.scope, sender.relay)
        if _REQUEST_ID.fullmatch(vote.request_id) is None:
            return _refusal(400, "expected a request id of at most 256 visible ASCII characters")
        try:
            body = validate_body(vote.body)
        except MalformedBody as error:
            return _refusal(400, str(error))
        except InvalidField as error:
            return _refusal(422, str(error), field=error.field)
        answer = await self._submit(self._make_decision_request(sender, principal, vote, body))
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

    def _charge_sender(self, sender: Sender) -> str | None:
        """Return who is over their rate: the machine, or its user; None: neither is."""
        principal, now = machine_principal(sender.scope, sender.relay), self._clock.monotonic()
        if self._machines.take(principal, now):
            return principal  # it takes no token from the other machines of its user
        if self._users.take(sender.user, now):
            self._machines.refund(principal, now)
            return f"user {sender.user}"
        return None

    def _make_decision_request(
        self, sender: Sender, principal: str, vote: VoteMessage, body: DecisionBody
    ) -> DecisionRequest:
        return body.to_request(
            Caller(principal, CHANNEL, RIGHTS),
            self._clock.now(),
            _canonical_json(vote.body),
            arrival_scope=sender.scope,
            request_id=vote.request_id,
        )


def _canonical_json(body: Mapping[str, Any]) -> bytes:
    return orjson.dumps(dict(body), option=orjson.OPT_SORT_KEYS)


def _refusal(status: int, detail: str, **members: str) -> DecisionAnswer:
    return DecisionAnswer(status, {"detail": detail, **members})
