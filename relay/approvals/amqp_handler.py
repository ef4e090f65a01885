"""Decides about approvals that arrive over AMQP: the body of ``POST /v1/approvals`` as a message.

The consumer is `relay.amqp.approval_consumer`. This module finds the client that sent a message,
reads the decision and submits it to the gate. It acknowledges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from relay.amqp.approval_message import ApprovalMessage, UnusableMessage
from relay.approvals.gate import Gate
from relay.approvals.request import (
    Caller,
    DecisionBody,
    DecisionRequest,
    InvalidField,
    MalformedBody,
    read_json,
    validate_body,
)
from relay.clock import Clock
from relay.errors import StoreUnavailable
from relay.outbox.sqlite import Store


class AmqpApprovalHandler:
    """Submits each message to the gate as the decision of the client that sent it.

    ``callers`` are the known clients by their RabbitMQ user.
    """

    def __init__(
        self, *, callers: Mapping[str, Caller], gate: Gate, store: Store, clock: Clock
    ) -> None:
        self._callers = callers
        self._gate = gate
        self._store = store
        self._clock = clock

    async def blocking_reason(self) -> str | None:
        """Return why no message can be decided now; None if messages can be decided."""
        if self._store.write_error is not None:
            return "the state file cannot be written"
        try:
            mode = await self._gate.mode()
        except StoreUnavailable:
            return "the state file cannot be read"
        return "approvals are off" if mode == "off" else None

    async def decide(self, message: ApprovalMessage) -> bool:
        """Decide about a message; return False if the decision cannot be recorded now.

        A refused decision is recorded too. Raises UnusableMessage.
        """
        request = read_request(message, self._callers, self._clock.now())
        answer = await self._gate.submit(request)
        return answer.status != 503


def read_request(
    message: ApprovalMessage, callers: Mapping[str, Caller], now: datetime
) -> DecisionRequest:
    """Return the request in a message. Pure. Raises UnusableMessage.

    Only the RabbitMQ user says who sent it; nothing else in the message does.
    """
    caller = callers.get(message.user)
    if caller is None:
        raise UnusableMessage("its user_id is no client's amqp_user")
    return _parse_body(message.body).to_request(
        caller, now, message.body, request_id=message.message_id, message_id=message.message_id
    )


def _parse_body(body: bytes) -> DecisionBody:
    """Return the decision in a body: bare, or as the ``data`` of a CloudEvent."""
    try:
        fields = read_json(body)
        if isinstance(fields, dict) and "specversion" in fields and "data" in fields:
            fields = fields["data"]
        return validate_body(fields)
    except (MalformedBody, InvalidField) as error:
        raise UnusableMessage(f"its body is not a decision: {error}") from None
