"""The webhook receiver of the demo: verifies signatures, keeps events, and can be waited on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from relay.clock import Clock
from relay.events.cloudevent import CloudEvent
from relay.signature import SignatureRefused, verify


class WebhookReceiver:
    """Keeps each event once, and calls ``on_event`` with each new one."""

    def __init__(self, secret: str, clock: Clock, on_event: Callable[[CloudEvent], None]) -> None:
        self.url = ""
        self.events: dict[str, CloudEvent] = {}
        """The events received, by their id."""
        self.rejected_requests = 0
        """How many requests had no valid signature."""
        self._secret = secret
        self._clock = clock
        self._on_event = on_event
        self._received = asyncio.Event()

    async def wait_for(self, name: str, event_id: str) -> CloudEvent:
        """Wait for the event with this ``<family>.<change>`` and EventId."""
        while True:
            self._received.clear()
            for event in self.events.values():
                if (event.name, event.subject) == (name, event_id):
                    return event
            await self._received.wait()

    async def handle(self, request: web.Request) -> web.Response:
        """Answer 204, or 401 to a request without a valid signature."""
        body = await request.read()
        try:
            verify([self._secret], request.headers, body, self._clock.now())
        except SignatureRefused:
            self.rejected_requests += 1
            return web.Response(status=401)
        event = CloudEvent.parse(body)
        if event.id not in self.events:
            self.events[event.id] = event
            self._on_event(event)
            self._received.set()
        return web.Response(status=204)


@asynccontextmanager
async def start_webhook_receiver(
    secret: str, clock: Clock, on_event: Callable[[CloudEvent], None]
) -> AsyncIterator[WebhookReceiver]:
    """Yield a receiver that listens on a free port of the loopback interface."""
    receiver = WebhookReceiver(secret, clock, on_event)
    application = web.Application()
    application.router.add_post("/", receiver.handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        yield receiver
    finally:
        await runner.cleanup()
