"""AMQP frames on their way from and to the broker.

The reader removes what would end the connection. aiormq closes a connection if it cannot decode a
property: a timestamp beyond the year 9999, a message_id that is not UTF-8, headers nested a
thousand deep. The broker would then deliver the message again, and so on: anybody who may publish
to a queue could stop its consumer for good.
"""

from __future__ import annotations

import asyncio
import struct

import pamqp.frame
from typing_extensions import override  # in typing from Python 3.12

MAX_BODY_BYTES = 64 * 1024
"""Bytes of a message's body by default. A message with a larger body arrives without any body."""
_FRAME_HEAD = struct.Struct(">BHI")  # type, channel, size of the payload
_CONTENT_HEAD = struct.Struct(">HHQ")  # class, weight, size of the body; flags, properties follow
_HEADER_FRAME = 2
_BODY_FRAME = 3
_FRAME_END = b"\xce"
_NO_PROPERTIES = bytes(2)


class SanitizingReader(asyncio.StreamReader):
    """Reads frames from the broker, without undecodable properties and without large bodies."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._max_body_bytes = max_body_bytes
        self._frame = b""  # the rest of a frame: aiormq reads each frame in three parts
        self._bytes_to_skip: dict[int, int] = {}  # by channel, of a body that is left out

    @override
    async def readexactly(self, n: int) -> bytes:
        if not self._frame:
            self._frame = await self._next_frame()
        part, self._frame = self._frame[:n], self._frame[n:]
        return part

    async def _next_frame(self) -> bytes:
        while True:
            head = await super().readexactly(_FRAME_HEAD.size)
            if head.startswith(b"AMQP"):  # another protocol version: aiormq reports it
                return head
            frame_type, channel, size = _FRAME_HEAD.unpack(head)
            payload = (await super().readexactly(size + 1))[:-1]
            if frame_type == _BODY_FRAME and self._bytes_to_skip.get(channel):
                self._bytes_to_skip[channel] -= size
                continue
            if frame_type == _HEADER_FRAME:
                payload, self._bytes_to_skip[channel] = sanitize_content_header(
                    payload, self._max_body_bytes
                )
            return _FRAME_HEAD.pack(frame_type, channel, len(payload)) + payload + _FRAME_END


def content_frames(channel: int, header: bytes, body: bytes, max_size: int) -> bytes:
    """Return the frames of a message: its content header, and its body in parts that fit."""
    parts = [_FRAME_HEAD.pack(_HEADER_FRAME, channel, len(header)), header, _FRAME_END]
    for start in range(0, len(body), max_size):
        part = body[start : start + max_size]
        parts += (_FRAME_HEAD.pack(_BODY_FRAME, channel, len(part)), part, _FRAME_END)
    return b"".join(parts)


def sanitize_content_header(
    header: bytes, max_body_bytes: int = MAX_BODY_BYTES
) -> tuple[bytes, int]:
    """Return a decodable payload for a header frame, and how many bytes of its body to skip."""
    class_id, weight, body_size = _CONTENT_HEAD.unpack_from(header)
    properties = header[_CONTENT_HEAD.size :]
    try:
        pamqp.frame.unmarshal(_FRAME_HEAD.pack(_HEADER_FRAME, 1, len(header)) + header + _FRAME_END)
    except Exception:  # noqa: BLE001  # a crafted property can raise anything in the decoder
        properties = _NO_PROPERTIES
    skipped = body_size if body_size > max_body_bytes else 0
    return _CONTENT_HEAD.pack(class_id, weight, body_size - skipped) + properties, skipped
