"""What a message for approvals says, and who says it. Pure: nothing of a message is believed but what the broker has checked."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiormq.abc import DeliveredMessage

from relay.amqp.frames import LARGEST
from relay.api import Client
from relay.api.auth.authentication import caller_of
from relay.approvals.request import Body, Caller, MalformedError, WrongFieldError, body_of, read_json

_TOLD = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")  # what CloudEvents allow in the causationid


class UnusableError(Exception):
    """A message that no client's decision can be made of. The text says why, and may quote what was sent."""


def open_letter(message: DeliveredMessage, exchange: str, key: str, clients: Sequence[Client]) -> tuple[Caller, str, Body]:
    """Whose decision a message is, the id that makes a repeat known, and the decision. Raises UnusableError.

    ``exchange`` and ``key`` are where it must have been published to. RabbitMQ 3.10 checks no topic permission for the
    CC header (docs/protocol.md#topic-permissions-and-the-cc-header). A message that comes by it has another key, and its
    sender may have no right to this one. RabbitMQ checks none for what a queue dead-letters either, and the queue's owner
    chooses exchange and key: such a message has the header x-death.
    """
    properties = message.header.properties
    if (message.exchange, message.routing_key) != (exchange, key):
        raise UnusableError(f"it was not published to {exchange} with the routing key {key}")
    if "x-death" in (properties.headers or {}):
        raise UnusableError("it is the dead letter of some queue, and was not published here")
    return who(properties.user_id, clients), identity_of(properties.message_id), read(message.body)


def who(user_id: str | None, clients: Sequence[Client]) -> Caller:
    """The client whose ``amqp_user`` the broker has vouched for. Raises UnusableError where there is none.

    Nothing else of a message says who sent it.
    """
    if not user_id:
        raise UnusableError("it has no user_id, so nobody vouches for its sender")
    for client in clients:
        if client.amqp_user == user_id:
            return caller_of(client, "amqp")
    raise UnusableError("its user_id is no client's amqp_user")


def identity_of(message_id: str | None) -> str:
    """The id that makes a repeat known, and that the answer names. Raises UnusableError where there is none."""
    if not message_id:
        raise UnusableError("it has no message_id, so a repeat could not be known")
    if _TOLD.fullmatch(message_id) is None:
        raise UnusableError("its message_id holds control characters")
    return message_id


def read(raw: bytes) -> Body:
    """The decision in a message, bare or as the ``data`` of a CloudEvent. Raises UnusableError."""
    if not raw:
        raise UnusableError(f"it has no body, or one of more than {LARGEST} bytes")
    try:
        fields = read_json(raw)
        if isinstance(fields, dict) and "specversion" in fields and "data" in fields:
            fields = fields["data"]
        return body_of(fields)
    except (MalformedError, WrongFieldError) as error:
        raise UnusableError(f"its body is no decision: {error}") from None
