"""`/v1/stream`: every CloudEvent as it is recorded, as server-sent events.

Source: HTML Living Standard, section 9.2, "Server-sent events". Each stream reads the journal from
its own position. So it needs no queue, and loses or repeats nothing with a slow reader.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial

from aiohttp import web

from relay.api.schema.responses import COMMON_HEADERS, Problem
from relay.api.schema.route import Call, Parameter, Route
from relay.api.server.connections import connection_of
from relay.events.cloudevent import CloudEvent
from relay.outbox.transaction import Transaction

MEDIA_TYPE = "text/event-stream"
_BATCH_SIZE = 50
_BATCH_BYTES = 2**17
_LAST_EVENT_ID = Parameter(
    name="Last-Event-ID",
    place="header",
    description="resume after this position of the journal; 0: from its beginning",
    pattern=r"^[0-9]{1,18}$",
)
_POSITION = re.compile(_LAST_EVENT_ID.pattern, re.ASCII)
_log = logging.getLogger(__name__)


async def _stream_events(call: Call) -> web.StreamResponse:
    relay, limits, wakeups = call.relay, call.server.limits, call.server.stream_wakeups
    principal = call.caller.principal
    own = sum(other == principal for other in wakeups.values())
    if own >= limits.max_streams_per_principal:
        raise _too_many_streams_problem(
            f"{limits.max_streams_per_principal} streams of {principal}"
        )
    if len(wakeups) >= limits.max_streams:
        raise _too_many_streams_problem(f"{limits.max_streams} streams")
    response = web.StreamResponse(
        headers={**COMMON_HEADERS, "Content-Type": MEDIA_TYPE, "X-Accel-Buffering": "no"}
    )
    wakeup = connection_of(call.request).wakeup
    wakeups[wakeup] = principal
    try:
        position = await relay.store.read(lambda tx: _start_position(tx, call.parameters))
        await response.prepare(call.request)
        await _send_events(call, response, position)
        await response.write_eof()
    except TimeoutError:
        _log.info(
            "a stream of %s was dropped: its reader did not accept data within %g s",
            principal,
            limits.stream_send_timeout,
        )
        if call.request.transport is not None:
            call.request.transport.abort()
    finally:
        wakeups.pop(wakeup, None)
    return response


async def _send_events(call: Call, response: web.StreamResponse, position: int) -> None:
    """Send the events after this position until the relay stops or the reader disconnects.

    A stream also ends with the session that opened it.

    Raises TimeoutError if the reader is too slow.
    """
    relay, limits = call.relay, call.server.limits
    wakeup = connection_of(call.request).wakeup
    frames = b"id: %d\n\n" % position  # no event, but the position from which to resume
    streams = call.server.stream_wakeups
    while (
        call.server.relay is not None and call.request.transport is not None and wakeup in streams
    ):
        if call.has_ended_session:
            return
        async with asyncio.timeout(limits.stream_send_timeout):
            await response.write(frames)
        wakeup.clear()
        async with call.server.long_reads:
            events = await relay.store.read(partial(_read_events, position=position))
        if events:
            frames = b"".join(_server_sent_event(number, event) for number, event in events)
            position = events[-1][0]
            continue
        try:
            async with asyncio.timeout(limits.stream_keep_alive_interval):
                await wakeup.wait()
            frames = b""
        except TimeoutError:
            frames = b": still here\n\n"


def _too_many_streams_problem(maximum: str) -> Problem:
    return Problem(429, f"the maximum of {maximum} is open", headers={"Retry-After": "15"})


def _parse_last_event_id(request: web.Request) -> int | None:
    values = [value for value in request.headers.getall(_LAST_EVENT_ID.name, []) if value]
    if not values:
        return None
    if len(values) > 1 or _POSITION.fullmatch(values[0]) is None:
        raise Problem(400, "Last-Event-ID: expected the id of an event of this stream, once")
    return int(values[0])


def _start_position(tx: Transaction, last_event_id: int | None) -> int:
    """Return the position after which the stream begins; without an id, the end of the journal.

    A position beyond the end belongs to a previous journal: the stream sends the whole journal.
    """
    end = tx.head().position
    if last_event_id is None:
        return end
    return last_event_id if last_event_id <= end else 0


def _read_events(tx: Transaction, position: int) -> list[tuple[int, CloudEvent]]:
    return tx.journal.events_after(position, _BATCH_SIZE, _BATCH_BYTES)


def _server_sent_event(position: int, event: CloudEvent) -> bytes:
    # The JSON contains no line breaks: they are escaped in strings.
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (position, event.type.encode(), event.body)


ROUTES = (
    Route(
        method="GET",
        path="/v1/stream",
        summary="CloudEvents as server-sent events: `id` is the position in the journal, "
        "`event` the type, `data` the CloudEvent",
        handler=_stream_events,
        media_types=(MEDIA_TYPE,),
        needs="read",
        parameters=(_LAST_EVENT_ID,),
        parse_parameters=_parse_last_event_id,
    ),
)
