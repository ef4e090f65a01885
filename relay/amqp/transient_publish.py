"""Publishes messages that may be lost, without a confirm."""

from __future__ import annotations

import pamqp.frame
from aiormq.abc import AbstractChannel
from pamqp.commands import Basic

from relay.amqp.connection import Connection
from relay.amqp.event_message import content_header
from relay.amqp.frames import content_frames
from relay.amqp.publish_channel import is_blocked, max_part_bytes
from relay.events.cloudevent import CloudEvent


def is_open(connection: Connection, channel: AbstractChannel) -> bool:
    """Whether frames may be written: on a channel that is closed they end the connection."""
    is_known = channel.connection.channels.get(channel.number) is channel
    return is_known and not channel.is_closed and not connection.is_over


def publish_transient(
    connection: Connection,
    channel: AbstractChannel,
    *,
    exchange: str,
    key: str,
    event: CloudEvent,
    user: str,
) -> bool:
    """Write an event as this user; return whether it was written. It may be lost after that."""
    if not is_open(connection, channel) or is_blocked(channel):
        return False
    method = Basic.Publish(exchange=exchange, routing_key=key)
    header = content_header(event, user_id=user, persistent=False)
    connection.write_frames(
        pamqp.frame.marshal(method, channel.number)
        + content_frames(channel.number, header, event.body, max_part_bytes(channel))
    )
    return True
