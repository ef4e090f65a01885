"""Answers the votes of machines: what programs on the VMs of a fleet decide about their own VM.

A vote is the body of ``POST /v1/approvals``, which an agent passes on. Its rate is limited, and the
gate decides it: the answer is that of the API of the hub.

A machine votes in its scope: the VMs that read the same document. Which machine votes, and in which
scope, follows from what RabbitMQ has checked: the user of the agent and the routing key, which
names the agent (its relay word) and the scope. Nothing in the body changes that. What a machine may
decide is up to `relay.approvals.admission`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable

import orjson

from relay.approvals.principals import machine_principal
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
from relay.fleet.messages import VoteAnswer, VoteMessage
from relay.fleet.routing import AuthorizedSender
from relay.logs import log_extra
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
            answer = _refusal(429, f"too many votes of {exceeded}: wait, and try again")
        else:
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


def _refusal(status: int, detail: str, **members: str) -> DecisionAnswer:
    return DecisionAnswer(status, {"detail": detail, **members})
