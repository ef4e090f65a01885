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
from typing import Any

import orjson

from relay.approvals.machines import machine_principal
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
from relay.rate_limits import CALLER_BURST, CALLER_RATE, TokenBuckets

CHANNEL = "fleet"
RIGHTS = Rights(frozenset({"approve", "hold"}))
"""What a machine may do, for itself alone."""
USER_RATE = 50.0
USER_BURST = 2000
"""Votes of all machines of a RabbitMQ user: in a second, and at once.

All machines of a scale set may vote at the same time. The limit matters because a user can speak
for relays that it makes up.
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

    async def decide(self, sender: Sender, vote: VoteMessage) -> VoteAnswer:
        """Decide a vote and return the answer to it. The decision is on disk then.

        A repeat gets its first answer. The answer is 503 if the decision cannot be written.
        """
        answer = await self._decide(sender, vote)
        return VoteAnswer(request_id=vote.request_id, status=answer.status, body=answer.body)

    async def _decide(self, sender: Sender, vote: VoteMessage) -> DecisionAnswer:
        principal = machine_principal(sender.scope, sender.relay)
        if not self._admit(principal, sender.user):
            return _refusal(429, "too many votes of this machine: wait, and try again")
        if _REQUEST_ID.fullmatch(vote.request_id) is None:
            return _refusal(400, "expected a request id of at most 256 visible ASCII characters")
        try:
            body = validate_body(vote.body)
        except MalformedBody as error:
            return _refusal(400, str(error))
        except InvalidField as error:
            return _refusal(422, str(error), field=error.field)
        answer = await self._submit(self._request(sender, principal, vote, body))
        if answer.accepted and not answer.repeat:
            _log.info("%s of %s by %s at %s", body.decision, body.eventId, vote.user, principal)
        return answer

    def _admit(self, principal: str, user: str) -> bool:
        """Whether the machine and its user are within their rates."""
        now = self._clock.monotonic()
        if self._machines.take(principal, now):
            return False  # a machine over its rate takes no token from the others of its user
        if self._users.take(user, now):
            self._machines.refund(principal, now)
            return False
        return True

    def _request(
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
