"""A message as the broker delivers it, without a broker."""

from __future__ import annotations

from typing import Any, cast

from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader


def delivered(exchange: str, key: str, body: bytes = b"{}", **properties: Any) -> DeliveredMessage:
    deliver = Basic.Deliver("tag", 1, redelivered=False, exchange=exchange, routing_key=key)
    header = ContentHeader(0, len(body), Basic.Properties(**properties))
    return DeliveredMessage(deliver, header, body, cast("AbstractChannel", None))
