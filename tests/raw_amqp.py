"""AMQP without a library: messages without an id, with broken properties, in another's name."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Self, TypeVar

import pamqp.frame
from pamqp import commands as spec
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.header import ProtocolHeader
from yarl import URL

T = TypeVar("T", bound=Frame)
_HEADER = 2
_LARGEST_FRAME = 131_072


class RefusedError(Exception):
    """The broker closed channel or connection. The text is the broker's."""


class RawChannel:
    def __init__(self, url: str) -> None:
        self._url = URL(url)
        self._confirmed = 0  # messages that `publish_all` has sent

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._url.host, self._url.port)
        self._writer.write(ProtocolHeader().marshal())
        await self._next(spec.Connection.Start)
        secret = f"\0{self._url.user}\0{self._url.password}"
        self._send(
            spec.Connection.StartOk(client_properties={}, mechanism="PLAIN", response=secret), 0
        )
        await self._next(spec.Connection.Tune)
        self._send(spec.Connection.TuneOk(channel_max=8, frame_max=_LARGEST_FRAME, heartbeat=0), 0)
        self._send(spec.Connection.Open(virtual_host="/"), 0)
        await self._next(spec.Connection.OpenOk)
        self._send(spec.Channel.Open(), 1)
        await self._next(spec.Channel.OpenOk)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def publish(
        self, exchange: str, key: str, body: bytes, properties: spec.Basic.Properties | bytes
    ) -> None:
        """Publish, and wait until the broker has routed it. ``properties`` may be raw bytes.

        Raises RefusedError.
        """
        self._write(exchange, key, body, properties)
        self._send(spec.Confirm.Select(), 1)  # answered after what came before
        await self._next(spec.Confirm.SelectOk)

    async def publish_all(
        self, exchange: str, key: str, body: bytes, properties: Sequence[spec.Basic.Properties]
    ) -> int:
        """Publish as fast as the broker reads; return how many messages it did not take."""
        if not self._confirmed:
            self._send(spec.Confirm.Select(), 1)
            await self._next(spec.Confirm.SelectOk)
        first = self._confirmed + 1
        self._confirmed += len(properties)
        confirms = asyncio.create_task(self._count_refused(set(range(first, self._confirmed + 1))))
        for each in properties:
            self._write(exchange, key, body, each)
            await self._writer.drain()
        return await confirms

    async def _count_refused(self, open_tags: set[int]) -> int:
        refused = 0
        while open_tags:
            frame: spec.Basic.Ack | spec.Basic.Nack = await self._next(
                spec.Basic.Ack, spec.Basic.Nack
            )
            last = frame.delivery_tag
            answered = {tag for tag in open_tags if tag <= last} if frame.multiple else {last}
            open_tags -= answered
            refused += len(answered) if isinstance(frame, spec.Basic.Nack) else 0
        return refused

    def _write(
        self, exchange: str, key: str, body: bytes, properties: spec.Basic.Properties | bytes
    ) -> None:
        encoded = properties if isinstance(properties, bytes) else properties.marshal()
        header = struct.pack(">HHQ", spec.Basic.frame_id, 0, len(body)) + encoded
        self._send(spec.Basic.Publish(exchange=exchange, routing_key=key), 1)
        self._writer.write(struct.pack(">BHI", _HEADER, 1, len(header)) + header + b"\xce")
        for start in range(0, len(body), _LARGEST_FRAME // 2):
            self._writer.write(
                pamqp.frame.marshal(ContentBody(body[start : start + _LARGEST_FRAME // 2]), 1)
            )

    def _send(self, frame: Frame, channel: int) -> None:
        self._writer.write(pamqp.frame.marshal(frame, channel))

    async def _next(self, *kinds: type[T]) -> T:
        while True:
            head = await self._reader.readexactly(7)
            rest = await self._reader.readexactly(struct.unpack(">BHI", head)[2] + 1)
            frame = pamqp.frame.unmarshal(head + rest)[2]
            if isinstance(frame, (spec.Channel.Close, spec.Connection.Close)):
                raise RefusedError(f"{frame.reply_code} {frame.reply_text}")
            if isinstance(frame, kinds):
                return frame
            # a confirm of something published earlier


def property_bytes(flag: int, value: bytes) -> bytes:
    """The bytes of a message's only property, by its bit in the flags."""
    return struct.pack(">H", 1 << flag) + value


def table(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content
