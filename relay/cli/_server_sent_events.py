"""Parses the relay's stream of server-sent events. Without I/O: the caller feeds it bytes.

No field of the relay has several lines. Source: WHATWG HTML, section "Server-sent events".
"""

from __future__ import annotations

from collections.abc import Iterator


class EventStreamParser:
    """Parses the bytes of one connection."""

    def __init__(self) -> None:
        self._unfinished_line = b""
        self._frame: dict[bytes, bytes] = {}

    def feed(self, chunk: bytes) -> Iterator[dict[bytes, bytes]]:
        """Yield the fields of each frame that this chunk completes."""
        *lines, self._unfinished_line = (self._unfinished_line + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.removesuffix(b"\r").partition(b":")
            if name:  # without one it is a comment, or the end of the frame
                self._frame[name] = value.removeprefix(b" ")
            elif line in (b"", b"\r") and self._frame:
                yield self._frame
                self._frame = {}
