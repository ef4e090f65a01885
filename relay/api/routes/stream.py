"""``/v1/stream``: every CloudEvent as it is journalled, as server-sent events.

Source: HTML Living Standard, section 9.2, "Server-sent events". Each stream reads the journal by itself from where it
stands, so it has no queue that could grow, no gap and no repeat, however slow its consumer is.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence

from aiohttp import web

from relay.api import Relay
from relay.api.schema.problems import Problem
from relay.api.schema.responses import COMMON_HEADERS
from relay.api.schema.route import Call, Parameter, Route
from relay.api.server.connection import disconnect_event
from relay.events.cloudevent import CloudEvent
from relay.outbox import RecordedEvent
from relay.outbox.transaction import Transaction

MEDIA = "text/event-stream"
KEEP_ALIVE_INTERVAL = 15.0
"""Seconds of silence after which a comment is sent, so that whatever is between does not give the connection up."""
SLOW_READER_TIMEOUT = 10.0
"""Seconds that a consumer may take to make room for more; then it is dropped, and can resume."""
MAX_STREAMS = 64
"""Streams at once."""
_BATCH = 50
_LAST = Parameter(
    "Last-Event-ID",
    "header",
    "resume behind this position of the journal; 0: from its beginning",
    pattern=r"^[0-9]{1,18}$",
)
_POSITION = re.compile(_LAST.pattern, re.ASCII)
_log = logging.getLogger(__name__)


class Streams:
    """All that are open: woken when something is recorded, and ended with the relay."""

    def __init__(self) -> None:
        self._wakes: set[asyncio.Event] = set()
        self._relay: Relay | None = None

    def attach(self, relay: Relay) -> None:
        """The relay runs."""
        self._relay = relay
        relay.store.listeners.recorded.append(self._on_recorded)

    def detach(self) -> None:
        """It is about to stop: every stream ends."""
        if self._relay is not None:
            self._relay.store.listeners.recorded.remove(self._on_recorded)
        self._relay = None
        self._wake_all()

    def routes(self) -> tuple[Route, ...]:
        """What can be called."""
        return (
            Route(
                "GET",
                "/v1/stream",
                "CloudEvents as server-sent events: `id` is the position in the journal, `event` the type, `data` the CloudEvent",
                self._follow,
                {200: str},
                needs="read",
                parse=_last_event_id,
                parameters=(_LAST,),
                media=(MEDIA,),
            ),
        )

    def _on_recorded(self, _recorded: Sequence[RecordedEvent]) -> None:
        self._wake_all()

    def _wake_all(self) -> None:
        for wake in self._wakes:
            wake.set()

    async def _follow(self, call: Call) -> web.StreamResponse:
        relay = call.relay
        if len(self._wakes) >= MAX_STREAMS:
            raise Problem(
                429,
                f"{MAX_STREAMS} streams are open, the most there may be",
                headers={"Retry-After": "15"},
            )
        response = web.StreamResponse(
            headers={**COMMON_HEADERS, "Content-Type": MEDIA, "X-Accel-Buffering": "no"}
        )
        wake = disconnect_event(call.request)
        self._wakes.add(wake)
        try:
            position = await relay.store.read(lambda tx: _start(tx, call.content))
            await response.prepare(call.request)
            await self._send_all(relay, call.request, response, position)
            await response.write_eof()
        except TimeoutError:
            _log.info(
                "a stream of %s was dropped: it did not take what was sent within %g s",
                call.caller.principal,
                SLOW_READER_TIMEOUT,
            )
            if call.request.transport is not None:
                call.request.transport.abort()
        finally:
            self._wakes.remove(wake)
        return response

    async def _send_all(
        self, relay: Relay, request: web.Request, response: web.StreamResponse, position: int
    ) -> None:
        """Send what is behind that position while the relay runs and somebody is there. Raises TimeoutError where it is not taken."""
        wake = disconnect_event(request)
        sent = b"id: %d\n\n" % position  # no event, but where to resume before there is one
        while self._relay is relay and request.transport is not None:
            async with asyncio.timeout(SLOW_READER_TIMEOUT):
                await response.write(sent)
            wake.clear()
            found = await relay.store.read(
                lambda tx, behind=position: tx.journal.after(behind, _BATCH)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            )
            if found:
                sent, position = b"".join(_frame(at, event) for at, event in found), found[-1][0]
                continue
            sent = b": still here\n\n"
            try:
                async with asyncio.timeout(KEEP_ALIVE_INTERVAL):
                    await wake.wait()
                sent = b""
            except TimeoutError:
                pass


def _last_event_id(request: web.Request, _body: bytes) -> int | None:
    given = [value for value in request.headers.getall(_LAST.name, []) if value]
    if not given:
        return None
    if len(given) > 1 or _POSITION.fullmatch(given[0]) is None:
        raise Problem(400, "Last-Event-ID: expected the id of an event of this stream, once")
    return int(given[0])


def _start(tx: Transaction, last: int | None) -> int:
    """Where a stream begins: behind what it had, else at the end. A position that is not there yet is another journal's."""
    head = tx.head().position
    if last is None:
        return head
    return last if last <= head else 0


def _frame(position: int, event: CloudEvent) -> bytes:
    # The JSON has no line ends of its own: they would be \n inside of text.
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (position, event.type.encode(), event.body)
