"""Decides about approvals that arrive over AMQP: the body of ``POST /v1/approvals`` as a message.

The consumer is `relay.amqp.approval_consumer`. This module finds the client that sent a message,
reads the decision and submits it to the gate. It acknowledges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from relay.amqp.approval_consumer import ReceivedDecision, UnparsedApprovalMessage
from relay.amqp.connection import UnusableMessage
from relay.approvals.gate import DecisionHandler
from relay.approvals.request import (
    Caller,
    DecisionRequest,
    InvalidField,
    MalformedJsonBody,
    read_json,
    validate_body,
)
from relay.clock import Clock
from relay.errors import StoreUnavailable
from relay.store.sqlite import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpApprovalHandler:
    callers: Mapping[str, Caller]
    gate: DecisionHandler
    store: Store
    clock: Clock

    async def blocking_reason(self) -> str | None:
        """Return why no message can be decided now; None if messages can be decided."""
        if self.store.write_error is not None:
            return "the state file cannot be written"
        try:
            mode = await self.store.read(self.gate.engine.effective_approval_mode)
        except StoreUnavailable:
            return "the state file cannot be read"
        return "approvals are off" if mode == "off" else None

    def read(self, message: UnparsedApprovalMessage) -> ReceivedDecision:
        """Return the decision in a message. A refused decision is recorded too.

        Raises UnusableMessage, as the decision does if the rows of its event alone are damaged.
        """
        request = read_request(message, self.callers, self.clock.now())

        async def decide() -> bool:
            # The message can have waited; an approval counts when it is decided.
            answer = await self.gate.submit(replace(request, at=self.clock.now()))
            if answer.status != 503:  # HTTP
                return True
            if answer.is_transient or await self.blocking_reason() is not None:
                return False
            raise UnusableMessage(str(answer.body["detail"]))

        return ReceivedDecision(user=message.user, decision=request.decision, decide=decide)


def read_request(
    message: UnparsedApprovalMessage, callers: Mapping[str, Caller], now: datetime
) -> DecisionRequest:
    """Return the request in a message. Pure. Raises UnusableMessage.

    Only the RabbitMQ user says who sent it, and on a hub only the routing key says for which scope.
    """
    caller = callers.get(message.user)
    if caller is None:
        raise UnusableMessage("its user_id is no client's amqp_user")
    if caller.rights.can <= {"read"}:
        raise UnusableMessage("its client may decide nothing: it has neither approve nor hold")
    try:
        fields = read_json(message.body)
        if isinstance(fields, dict) and "specversion" in fields and "data" in fields:
            fields = fields["data"]  # the body is a CloudEvent
        body = validate_body(fields)
    except (MalformedJsonBody, InvalidField) as error:
        raise UnusableMessage(f"its body is not a decision: {error}") from None
    return body.to_request(
        caller,
        now,
        message.body,
        arrival_scope=message.scope,
        request_id=message.message_id,
        message_id=message.message_id,
    )
