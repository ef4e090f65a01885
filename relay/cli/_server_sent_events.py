"""Server-sent events, as far as the relay's own stream uses them: an id and data. Pure; whoever reads feeds it bytes.

Source: WHATWG HTML, section "Server-sent events".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One that came whole."""

    id: str | None
    data: bytes


class Stream:
    """Takes the bytes of one connection after the other, and knows where to go on."""

    def __init__(self) -> None:
        self.begun = False
        """Whether there was ever an answer."""
        self.broken = False
        """Whether the last connection has ended, and no byte of a new one came."""
        self._last_id: str | None = None
        self._rest = b""
        self._id: str | None = None
        self._data: list[bytes] = []

    def headers(self) -> dict[str, str]:
        """What the next connection is asked for with."""
        return {
            "Accept": "text/event-stream",
            **({"Last-Event-ID": self._last_id} if self._last_id is not None else {}),
        }

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """The messages that this chunk completes."""
        self.begun, self.broken = True, False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            yield from self._line(line.removesuffix(b"\r"))

    def break_off(self) -> None:
        """The connection has ended: what is not complete comes again."""
        self.begun = self.broken = True
        self._rest, self._id, self._data = b"", None, []

    def _line(self, line: bytes) -> Iterator[Message]:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"id":
            self._id = value.decode("utf-8", "replace")
        elif name == b"data":
            self._data.append(value)
        elif not line:
            # An id without data is where to go on from, before there is any event.
            self._last_id = self._id if self._id is not None else self._last_id
            data, self._data, self._id = self._data, [], None
            if data:
                yield Message(self._last_id, b"\n".join(data))
