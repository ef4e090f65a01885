"""Frames as aiormq reads and writes them: made harmless on the way in, gathered on the way out.

Whoever may publish to a queue could stop its consumer for good: aiormq gives up the connection over a property
that it cannot decode (a timestamp beyond the year 9999, a message_id that is not UTF-8, headers nested a thousand deep),
the broker then gives the message to the next connection, and so on.
"""

from __future__ import annotations

import asyncio
import struct

import pamqp.frame
from typing_extensions import override  # in typing from Python 3.12

MAX_BODY_BYTES = 64 * 1024
"""Bytes of a message's body that are read. Of a larger one nothing is: it arrives without a body."""
_HEAD = struct.Struct(">BHI")  # type, channel, bytes of the payload
_CONTENT = struct.Struct(">HHQ")  # class, weight, bytes of the body; flags and properties follow
_HEADER, _BODY = 2, 3
_END = b"\xce"


class SanitizingReader(asyncio.StreamReader):
    """A stream from the broker, read frame by frame. A header that cannot be decoded arrives without properties."""

    def __init__(self) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._frame = b""  # what is left of one, which aiormq reads in three pieces
        self._left_out: dict[
            int, int
        ] = {}  # by channel: bytes of a body that are still to come, and are not handed on

    @override
    async def readexactly(self, n: int) -> bytes:
        """As of any stream."""
        if not self._frame:
            self._frame = await self._next()
        taken, self._frame = self._frame[:n], self._frame[n:]
        return taken

    async def _next(self) -> bytes:
        while True:
            head = await super().readexactly(_HEAD.size)
            if head.startswith(b"AMQP"):  # the broker speaks another version: aiormq says so
                return head
            kind, channel, size = _HEAD.unpack(head)
            payload = (await super().readexactly(size + 1))[:-1]
            if kind == _BODY and self._left_out.get(channel):
                self._left_out[channel] -= size
                continue
            if kind == _HEADER:
                payload, self._left_out[channel] = strip_properties(payload)
            return _HEAD.pack(kind, channel, len(payload)) + payload + _END


class CoalescingWriter(asyncio.StreamWriter):
    """A stream to the broker. What is written in one turn of the loop goes out in one piece, as aiormq writes each message alone."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        protocol: asyncio.StreamReaderProtocol,
        reader: asyncio.StreamReader,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(transport, protocol, reader, self._loop)
        self._written: list[bytes] = []

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """As of any stream."""
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written.append(bytes(data))

    @override
    async def drain(self) -> None:
        """As of any stream."""
        self._flush()
        await super().drain()

    @override
    def write_eof(self) -> None:
        """As of any stream."""
        self._flush()
        super().write_eof()

    @override
    def close(self) -> None:
        """As of any stream."""
        self._flush()
        super().close()

    def _flush(self) -> None:
        written, self._written = self._written, []
        if written:
            super().write(b"".join(written))


def strip_properties(header: bytes) -> tuple[bytes, int]:
    """The payload of a header frame as it may be handed on, and how many bytes of the body behind it are to be left out."""
    class_id, weight, size = _CONTENT.unpack_from(header)
    properties = header[_CONTENT.size :]
    try:
        pamqp.frame.unmarshal(_HEAD.pack(_HEADER, 1, len(header)) + header + _END)
    except Exception:  # noqa: BLE001  # whatever a crafted property makes the decoder raise
        properties = bytes(2)
    left_out = size if size > MAX_BODY_BYTES else 0
    return _CONTENT.pack(class_id, weight, size - left_out) + properties, left_out
