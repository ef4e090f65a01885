"""`/v1/stream`: every CloudEvent as it is recorded, as server-sent events.

Source: HTML Living Standard, section 9.2, "Server-sent events". Each stream reads the journal from
its own position. So it needs no queue, and loses or repeats nothing with a slow reader. The hash
beside each position shows a reader that comes again whether the journal is still the same.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Annotated

import orjson
from aiohttp import web

from relay.api.calls import Call, Parameter, get
from relay.api.connections import connection_of
from relay.api.responses import COMMON_HEADERS, too_many
from relay.api.sessions import SESSION
from relay.events.cloudevent import CloudEvent
from relay.sentences import said
from relay.store import JournalHead
from relay.store.transaction import Transaction

MEDIA_TYPE = "text/event-stream"
_BATCH_SIZE = 50
_BATCH_BYTES = 2**17
_log = logging.getLogger(__name__)


_LastEventId = Annotated[
    str | None,
    Parameter(
        "Last-Event-ID",
        "resume after this `id` or this `journalhead` of the stream; "
        "0, or what this journal does not have: from its beginning",
        r"^([0-9]{1,18}(:[0-9a-f]{64})?)?$",
        "an id or a journalhead of this stream",
        place="header",
    ),
]


@get(
    "/v1/stream",
    "CloudEvents as server-sent events: `id` is the position in the journal, "
    "`journalhead` the position with its hash, `event` the type, `data` the CloudEvent, "
    "`said` its sentence as a JSON string",
    media_types=(MEDIA_TYPE,),
    needs="read",
)
async def stream_events(call: Call, last_event_id: _LastEventId) -> web.StreamResponse:
    relay, limits, wakeups = call.relay, call.server.limits, call.server.stream_wakeups
    principal = call.caller.principal
    own, maximum = sum(other == principal for other in wakeups.values()), ""
    if own >= limits.max_streams_per_principal:
        maximum = f"{limits.max_streams_per_principal} streams of {principal}"
    elif len(wakeups) >= limits.max_streams:
        maximum = f"{limits.max_streams} streams"
    if maximum:
        raise too_many(f"the maximum of {maximum} is open", 15)
    response = web.StreamResponse(
        headers={**COMMON_HEADERS, "Content-Type": MEDIA_TYPE, "X-Accel-Buffering": "no"}
    )
    wakeup = connection_of(call.request).wakeup
    wakeups[wakeup] = principal
    try:
        head = await relay.store.read(lambda tx: _start(tx, last_event_id))
        await response.prepare(call.request)
        await _send_events(call, response, head)
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


async def _send_events(call: Call, response: web.StreamResponse, head: JournalHead) -> None:
    """Send events until relay, session or connection ends. Raises TimeoutError: slow reader."""
    relay, limits = call.relay, call.server.limits
    wakeup = connection_of(call.request).wakeup
    frames = _frame(head)  # no event, but from where the stream goes on
    while _goes_on(call, wakeup):
        async with asyncio.timeout(limits.stream_send_timeout):
            await response.write(frames)
        wakeup.clear()
        async with call.server.long_reads:
            events = await relay.store.read(partial(_events_after, head.position))
        if events:
            frames = b"".join(_frame(head, event) for head, event in events)
            head = events[-1][0]
            continue
        try:
            async with asyncio.timeout(limits.stream_keep_alive_interval):
                await wakeup.wait()
            frames = b""
        except TimeoutError:
            frames = b": still here\n\n"


def _goes_on(call: Call, wakeup: asyncio.Event) -> bool:
    request, server = call.request, call.server
    if request.transport is None or server.relay is None or wakeup not in server.stream_wakeups:
        return False
    session, sign_in = request.get(SESSION), server.callers.sign_in
    return session is None or (sign_in is not None and sign_in.sessions.is_open(session))


def _start(tx: Transaction, last_event_id: str | None) -> JournalHead:
    """Return the head after which the stream begins; without an id, the end of the journal."""
    if not last_event_id:
        return tx.head()
    position, _, digest = last_event_id.partition(":")
    return tx.journal.head_at(int(position), digest)


def _events_after(position: int, tx: Transaction) -> list[tuple[JournalHead, CloudEvent]]:
    return tx.journal.events_after(position, _BATCH_SIZE, _BATCH_BYTES)


def _frame(head: JournalHead, event: CloudEvent | None = None) -> bytes:
    place = b"id: %d\njournalhead: %s\n" % (head.position, str(head).encode())
    if event is None:
        return place + b"\n"
    # The JSON contains no line breaks: they are escaped in strings.
    content = (place, event.type.encode(), orjson.dumps(said(event.name, event.data)), event.body)
    return b"%sevent: %s\nsaid: %s\ndata: %s\n\n" % content
