"""Checks who published a message, as far as RabbitMQ vouches for it. Pure.

`extract_message_of_verified_sender` is for the consumer of approvals: it refuses what did not come
through the approvals exchange with a routing key of the queue. What the body says is read by
`relay.approvals.amqp_handler`. `require_publishing_user` is also for messages of a fleet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiormq.abc import DeliveredMessage

from relay.amqp.connection import MAX_BODY_BYTES
from relay.amqp.topology import ApprovalsQueue

_WITHOUT_CONTROL_CHARACTERS = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")
"""What CloudEvents allow in an attribute, such as ``causationid``."""


class UnusableMessage(Exception):
    """The message is of no use, or of no known sender. The text can quote the message."""


@dataclass(frozen=True, slots=True)
class UnparsedApprovalMessage:
    """A message that was published to the approvals exchange.

    RabbitMQ has checked ``user``. ``scope`` is that of the routing key; None: the queue is for one
    scope. ``message_id`` identifies a repeated message.
    """

    user: str
    scope: str | None
    message_id: str
    body: bytes


def extract_message_of_verified_sender(
    message: DeliveredMessage, queue: ApprovalsQueue
) -> UnparsedApprovalMessage:
    """Return the message. Raises UnusableMessage.

    It must have been published to the exchange of this queue with one of its routing keys. RabbitMQ
    3.10 checks no topic permission for the CC header
    (docs/protocol.md#topic-permissions-and-the-cc-header). A message routed by that header has
    another key, and its sender may have no right to this one. RabbitMQ checks no permission for
    dead letters either, and the owner of a queue chooses their exchange and key. A dead letter has
    the header x-death.
    """
    properties = message.header.properties
    key = queue.key_pattern.fullmatch(message.routing_key or "")
    if message.exchange != queue.exchange or key is None:
        raise UnusableMessage(
            f"it was not published to {queue.exchange} with the routing key {queue.binding_key}"
        )
    user = require_publishing_user(message)
    if not properties.message_id:
        raise UnusableMessage("it has no message_id, so a repeat would not be recognized")
    if _WITHOUT_CONTROL_CHARACTERS.fullmatch(properties.message_id) is None:
        raise UnusableMessage("its message_id contains control characters")
    if not message.body:
        raise UnusableMessage(f"it has no body, or one of more than {MAX_BODY_BYTES} bytes")
    scope = key.groupdict().get("scope")
    return UnparsedApprovalMessage(user, scope, properties.message_id, message.body)


def require_publishing_user(message: DeliveredMessage) -> str:
    """Return the user who published a message. Raises UnusableMessage if nobody vouches for it."""
    properties = message.header.properties
    if "x-death" in (properties.headers or {}):
        raise UnusableMessage("it is the dead letter of a queue, and was not published here")
    if not properties.user_id:
        raise UnusableMessage("it has no user_id, so its sender is unknown")
    return properties.user_id
