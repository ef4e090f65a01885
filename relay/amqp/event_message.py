"""Turns an event into an AMQP message. Pure."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache

from aio_pika.abc import DeliveryMode
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.events.names import routing_word

MAX_TEXT_BYTES = 255
"""Bytes of a short string in AMQP, and of a header that AMQP 1.0 clients still see as text."""
_MAX_WORD_BYTES = (40, 40, 92, 80)
"""Bytes of each word of a routing key, which has at most 255 with its dots.

A scope has at most 80, the name of a sink at most 64.
"""


def routing_key(event: CloudEvent) -> str:
    """Return ``<family>.<change>.<detail>.<scope>``: four lower-case words of ``[a-z0-9_-]``."""
    return _routing_key(event.name, event.routing_detail, event.scope)


@lru_cache(maxsize=128)
def _routing_key(name: str, detail: str, scope: str) -> str:
    family, _, change = name.partition(".")
    words = (family, change, detail, scope)
    return ".".join(map(routing_word, words, _MAX_WORD_BYTES))


def content_header(
    event: CloudEvent, *, user_id: str | None = None, expiration: int | None = None
) -> bytes:
    """Return the content header of the message, with its properties and headers.

    They repeat attributes of the event. An attribute that is too long is only in the body. The
    broker accepts only the sender's own name as ``user_id``. A queue drops the message after
    ``expiration`` milliseconds.
    """
    texts = {
        name: value
        for name, value in event.attributes.items()
        if len(value.encode()) <= MAX_TEXT_BYTES
    }
    properties = Basic.Properties(
        content_type=CONTENT_TYPE,
        headers={f"ce-{name}": value for name, value in texts.items()},
        delivery_mode=DeliveryMode.PERSISTENT,
        correlation_id=texts.get("correlationid"),
        expiration=None if expiration is None else str(expiration),
        message_id=event.id,
        timestamp=datetime.fromisoformat(event.attributes["time"]),
        message_type=event.type,
        user_id=user_id,
        app_id="imds-relay",
    )
    return ContentHeader(body_size=len(event.body), properties=properties).marshal()
