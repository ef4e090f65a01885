"""``tail``: follows the relay's stream of CloudEvents, across broken connections."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._event_text import cloudevent_row
from relay.cli._options import AsJson
from relay.cli._output import join_names, print_json_line, print_lines, print_to_stderr
from relay.cli._server_sent_events import EventStreamParser
from relay.signals import run_until_stopped

_MIN_RECONNECT_DELAY, _MAX_RECONNECT_DELAY = 0.5, 15.0
"""Seconds. The delay doubles with each attempt that fails."""


@with_client
async def tail(relay: Client, *, as_json: AsJson = False) -> None:
    """Print each CloudEvent of the relay as it happens, until Ctrl-C."""
    await run_until_stopped(_follow(relay, as_json=as_json))


async def _follow(relay: Client, *, as_json: bool) -> None:
    stream = EventStreamParser()
    delay = _MIN_RECONNECT_DELAY
    while True:
        try:
            async with relay.stream_chunks("stream", headers=stream.request_headers()) as chunks:
                if stream.is_broken:
                    print_to_stderr("connected again; no event is missing")
                async for chunk in chunks:
                    delay = _MIN_RECONNECT_DELAY
                    for data in stream.feed(chunk):
                        _print_event(orjson.loads(data), as_json=as_json)
            reason = "the relay ended the stream"
        except ConnectionError as error:
            if not stream.has_connected:
                raise
            reason = str(error)
        if not stream.is_broken:
            print_to_stderr(f"{reason}; trying again until the relay answers")
        stream.drop_unfinished_event()
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
