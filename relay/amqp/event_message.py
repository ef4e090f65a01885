"""Turns an event into an AMQP message. Pure."""

from __future__ import annotations

import re
from datetime import datetime

from aio_pika.abc import DeliveryMode
from pamqp.commands import Basic

from relay.events.cloudevent import CONTENT_TYPE, CloudEvent

MAX_TEXT_BYTES = 255
"""Bytes of a short string in AMQP, and of a header that AMQP 1.0 clients still see as text."""
_MAX_WORD_BYTES = (40, 40, 92, 80)
"""Bytes of each word of a routing key, which has at most 255 with its dots.

A scope has at most 80, the name of a sink at most 64.
"""


def routing_key(event: CloudEvent) -> str:
    """Return ``<family>.<change>.<detail>.<scope>``: four lower-case words of ``[a-z0-9_-]``."""
    family, _, change = event.name.partition(".")
    words = (family, change, event.routing_detail, event.scope)
    return ".".join(
        re.sub(r"[^a-z0-9_-]", "_", word.lower())[:max_bytes] or "none"
        for word, max_bytes in zip(words, _MAX_WORD_BYTES, strict=True)
    )


def message_properties(event: CloudEvent) -> Basic.Properties:
    """Return the properties and headers of the message.

    They repeat attributes of the event. An attribute that is too long is only in the body.
    """
    attributes = {
        name: value
        for name, value in event.attributes.items()
        if len(value.encode()) <= MAX_TEXT_BYTES
    }
    return Basic.Properties(
        content_type=CONTENT_TYPE,
        delivery_mode=DeliveryMode.PERSISTENT,
        message_id=event.id,
        correlation_id=attributes.get("correlationid"),
        message_type=event.type,
        app_id="imds-relay",
        timestamp=datetime.fromisoformat(event.attributes["time"]),
        headers={f"ce-{name}": value for name, value in attributes.items()},
    )
