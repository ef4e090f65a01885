"""Parses the relay's stream of server-sent events. Without I/O: the caller feeds it bytes.

It reads the fields ``id`` and ``data``, which are all that the relay sends. Source: WHATWG HTML,
section "Server-sent events".
"""

from __future__ import annotations

from collections.abc import Iterator


class EventStreamParser:
    """Parses the bytes of one connection after another, and knows the last event received."""

    def __init__(self) -> None:
        self.has_connected = False
        """Whether any connection has delivered bytes."""
        self.is_broken = False
        """Whether the last connection has ended and no byte of a new one has come."""
        self._last_id: str | None = None
        self._unfinished_line = b""
        self._id: str | None = None
        self._data: list[bytes] = []

    def request_headers(self) -> dict[str, str]:
        """Return the headers of the next request: they ask for the events after the last one."""
        headers = {"Accept": "text/event-stream"}
        if self._last_id is not None:
            headers["Last-Event-ID"] = self._last_id
        return headers

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that this chunk completes."""
        self.has_connected = True
        self.is_broken = False
        *lines, self._unfinished_line = (self._unfinished_line + chunk).split(b"\n")
        for line in lines:
            yield from self._process_line(line.removesuffix(b"\r"))

    def drop_unfinished_event(self) -> None:
        """Drop the unfinished event: the next connection sends it again."""
        self.has_connected = self.is_broken = True
        self._unfinished_line = b""
        self._id = None
        self._data = []

    def _process_line(self, line: bytes) -> Iterator[bytes]:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"id":
            self._id = value.decode("utf-8", "replace")
        elif name == b"data":
            self._data.append(value)
        elif not line:
            yield from self._yield_finished_event_data()

    def _yield_finished_event_data(self) -> Iterator[bytes]:
        # An id without data marks the position of the stream before its first event.
        if self._id is not None:
            self._last_id = self._id
        data = self._data
        self._id = None
        self._data = []
        if data:
            yield b"\n".join(data)
