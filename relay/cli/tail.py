"""``tail``: follows the relay's stream of CloudEvents, across broken connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from relay.cli._events import cloudevent_row
from relay.cli._output import join_names, print_json_line, print_lines, print_to_stderr
from relay.cli.client import Client, RelayCall
from relay.signals import run_until_stopped


class EventStreamParser:
    def __init__(self) -> None:
        self._unfinished_line = b""
        self._frame: dict[bytes, bytes] = {}

    def feed(self, chunk: bytes) -> Iterator[dict[bytes, bytes]]:
        *lines, self._unfinished_line = (self._unfinished_line + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.removesuffix(b"\r").partition(b":")
            if name:  # without one it is a comment, or the end of the frame
                self._frame[name] = value.removeprefix(b" ")
            elif line in (b"", b"\r") and self._frame:
                yield self._frame
                self._frame = {}


_MIN_RECONNECT_DELAY, _MAX_RECONNECT_DELAY = 0.5, 15.0
"""Seconds. The delay doubles with each attempt that fails."""
_MAY_BE_MISSING = "events may be missing: the journal of the relay does not go on where this ended"


async def tail(call: RelayCall) -> None:
    """Print each CloudEvent of the relay as it happens, until Ctrl-C."""
    await run_until_stopped(_follow(call.relay, as_json=call.as_json))


async def _follow(relay: Client, *, as_json: bool) -> None:
    last: str | None = None  # the journalhead of the last frame
    is_broken = False
    delay = _MIN_RECONNECT_DELAY
    while True:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
        stream = EventStreamParser()
        try:
            async with relay.stream_chunks("stream", headers=headers) as chunks:
                async for frame in (
                    frame async for chunk in chunks for frame in stream.feed(chunk)
                ):
                    delay = _MIN_RECONNECT_DELAY
                    head = frame.get(b"journalhead", b"").decode("ascii", "replace")
                    if is_broken:
                        is_broken = False
                        # docs/api.md#the-stream
                        what = "no event is missing" if last and last == head else _MAY_BE_MISSING
                        print_to_stderr(f"connected again; {what}")
                    last = head
                    if b"data" in frame:
                        _print_event(orjson.loads(frame[b"data"]), as_json=as_json)
            reason = "the relay ended the stream"
        except ConnectionError as error:
            if last is None:
                raise
            reason = str(error)
        if not is_broken:
            print_to_stderr(f"{reason}; trying again until the relay answers")
        is_broken = True
        await asyncio.sleep(delay)
        delay = min(2 * delay, _MAX_RECONNECT_DELAY)


def _print_event(event: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json_line(event)
        return
    time, name, principal, details = cloudevent_row(event)
    data = event["data"]
    subject = ""
    if "eventId" in data:
        machines = join_names(data.get("resources")) or "unknown machines"
        subject = f"{data.get('eventType') or 'event'} {data['eventId']} of {machines}"
    parts = (time, f"{name:<21}", subject, principal, details)
    print_lines("  ".join(str(part) for part in parts if part))
