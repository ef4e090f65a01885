"""Turns an event into an AMQP message. Pure.

This module encodes the properties itself, because pamqp takes four times as long
(docs/decisions.md#rabbitmq-by-plain-connections-that-we-open-again).
"""

from __future__ import annotations

import struct
from datetime import datetime
from functools import lru_cache

from aio_pika.abc import DeliveryMode
from pamqp.commands import Basic

from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.events.names import routing_word

MAX_TEXT_BYTES = 255
"""Bytes of a short string in AMQP, and of a header that AMQP 1.0 clients still see as text."""
_MAX_WORD_BYTES = (40, 40, 92, 80)
"""Bytes of each word of a routing key, which has at most 255 with its dots.

A scope has at most 80, the name of a sink at most 64.
"""
_CONTENT_HEAD = struct.Struct(">HHQH")  # class, weight, size of the body, flags of the properties
_LONG = struct.Struct(">I")
_TIMESTAMP = struct.Struct(">Q")
_CORRELATION_ID = Basic.Properties.flags["correlation_id"]
_USER_ID = Basic.Properties.flags["user_id"]
_ALWAYS = sum(
    Basic.Properties.flags[name]
    for name in (
        *("content_type", "headers", "delivery_mode"),
        *("message_id", "timestamp", "message_type", "app_id"),
    )
)
"""The flags of the properties that every message has."""


def routing_key(event: CloudEvent) -> str:
    """Return ``<family>.<change>.<detail>.<scope>``: four lower-case words of ``[a-z0-9_-]``."""
    return _routing_key(event.name, event.routing_detail, event.scope)


@lru_cache(maxsize=128)
def _routing_key(name: str, detail: str, scope: str) -> str:
    family, _, change = name.partition(".")
    words = (family, change, detail, scope)
    return ".".join(map(routing_word, words, _MAX_WORD_BYTES))


def content_header(
    event: CloudEvent, *, user_id: str | None = None, persistent: bool = True
) -> bytes:
    """Return the content header of the message, with its properties and headers.

    They repeat attributes of the event. An attribute that is too long is only in the body. The
    broker accepts only the sender's own name as ``user_id``. A message that is not ``persistent``
    does not survive a restart of the broker.
    """
    texts = {
        name: text
        for name, value in sorted(event.attributes.items())
        if len(text := value.encode()) <= MAX_TEXT_BYTES
    }
    headers = b"".join(
        [_encode_header_name(name) + _LONG.pack(len(text)) + text for name, text in texts.items()]
    )
    correlation_id = texts.get("correlationid")
    time = datetime.fromisoformat(event.attributes["time"])
    # In the order of their flags, see section 4.2.6.1 of AMQP 0-9-1.
    return b"".join(
        (
            _CONTENT_HEAD.pack(
                Basic.frame_id,
                0,
                len(event.body),
                _ALWAYS | (_CORRELATION_ID if correlation_id else 0) | (_USER_ID if user_id else 0),
            ),
            _CONTENT_TYPE,
            _LONG.pack(len(headers)),
            headers,
            _PERSISTENT if persistent else _TRANSIENT,
            _encode_short_string(correlation_id) if correlation_id else b"",
            _encode_short_string(event.id.encode()),
            _TIMESTAMP.pack(int(time.timestamp())),
            _encode_short_string(event.type.encode()),
            _encode_short_string(user_id.encode()) if user_id else b"",
            _APP_ID,
        )
    )


@lru_cache(maxsize=128)
def _encode_header_name(attribute: str) -> bytes:
    """Return the name of the header for this attribute, and that its value is a long string."""
    return _encode_short_string(f"ce-{attribute}".encode()) + b"S"


def _encode_short_string(text: bytes) -> bytes:
    """Encode a short string. Raises ValueError if it is too long."""
    return bytes((len(text),)) + text


_CONTENT_TYPE = _encode_short_string(CONTENT_TYPE.encode())
_PERSISTENT = bytes((DeliveryMode.PERSISTENT,))
_TRANSIENT = bytes((DeliveryMode.NOT_PERSISTENT,))
_APP_ID = _encode_short_string(b"imds-relay")
