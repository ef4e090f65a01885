"""What a message for approvals says, and who says it. Pure: nothing of a message is believed but what the broker has checked."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiormq.abc import DeliveredMessage

from relay.amqp.frames import MAX_BODY_BYTES
from relay.api import Client
from relay.api.auth.authentication import client_caller
from relay.approvals.request import (
    Caller,
    DecisionBody,
    InvalidField,
    MalformedBody,
    read_json,
    validate_body,
)

_TOLD = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")  # what CloudEvents allow in the causationid


class UnusableMessage(Exception):
    """A message that no client's decision can be made of. The text says why, and may quote what was sent."""


def parse_message(
    message: DeliveredMessage, exchange: str, key: str, clients: Sequence[Client]
) -> tuple[Caller, str, DecisionBody]:
    """Whose decision a message is, the id that makes a repeat known, and the decision. Raises UnusableError.

    ``exchange`` and ``key`` are where it must have been published to. RabbitMQ 3.10 checks no topic permission for the
    CC header (docs/protocol.md#topic-permissions-and-the-cc-header). A message that comes by it has another key, and its
    sender may have no right to this one. RabbitMQ checks none for what a queue dead-letters either, and the queue's owner
    chooses exchange and key: such a message has the header x-death.
    """
    properties = message.header.properties
    if (message.exchange, message.routing_key) != (exchange, key):
        raise UnusableMessage(f"it was not published to {exchange} with the routing key {key}")
    if "x-death" in (properties.headers or {}):
        raise UnusableMessage("it is the dead letter of some queue, and was not published here")
    return (
        authenticate_sender(properties.user_id, clients),
        parse_message_id(properties.message_id),
        parse_body(message.body),
    )


def authenticate_sender(user_id: str | None, clients: Sequence[Client]) -> Caller:
    """The client whose ``amqp_user`` the broker has vouched for. Raises UnusableError where there is none.

    Nothing else of a message says who sent it.
    """
    if not user_id:
        raise UnusableMessage("it has no user_id, so nobody vouches for its sender")
    for client in clients:
        if client.amqp_user == user_id:
            return client_caller(client, "amqp")
    raise UnusableMessage("its user_id is no client's amqp_user")


def parse_message_id(message_id: str | None) -> str:
    """The id that makes a repeat known, and that the answer names. Raises UnusableError where there is none."""
    if not message_id:
        raise UnusableMessage("it has no message_id, so a repeat could not be known")
    if _TOLD.fullmatch(message_id) is None:
        raise UnusableMessage("its message_id holds control characters")
    return message_id


def parse_body(raw: bytes) -> DecisionBody:
    """The decision in a message, bare or as the ``data`` of a CloudEvent. Raises UnusableError."""
    if not raw:
        raise UnusableMessage(f"it has no body, or one of more than {MAX_BODY_BYTES} bytes")
    try:
        fields = read_json(raw)
        if isinstance(fields, dict) and "specversion" in fields and "data" in fields:
            fields = fields["data"]
        return validate_body(fields)
    except (MalformedBody, InvalidField) as error:
        raise UnusableMessage(f"its body is no decision: {error}") from None
