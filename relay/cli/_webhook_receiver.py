"""A webhook receiver as the demo needs one: checks every signature, keeps what came, and can be waited on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from relay.clock import Clock
from relay.events.cloudevent import CloudEvent
from relay.signature import SignatureRefused, verify


class Receiver:
    """What came, each event once. ``told`` is called with each as it comes."""

    def __init__(self, secret: str, clock: Clock, told: Callable[[CloudEvent], None]) -> None:
        self.url = ""
        self.events: dict[str, CloudEvent] = {}
        self.forged = 0
        """Requests without a good signature."""
        self._secret = secret
        self._clock = clock
        self._told = told
        self._came = asyncio.Event()

    async def has(self, name: str, subject: str) -> CloudEvent:
        """Wait for an event by ``<family>.<change>`` and EventId."""
        while True:
            self._came.clear()
            for event in self.events.values():
                if (event.name, event.subject) == (name, subject):
                    return event
            await self._came.wait()

    async def receive(self, request: web.Request) -> web.Response:
        """The handler."""
        body = await request.read()
        try:
            verify([self._secret], request.headers, body, self._clock.now())
        except SignatureRefused:
            self.forged += 1
            return web.Response(status=401)
        event = CloudEvent.parse(body)
        if event.id not in self.events:
            self.events[event.id] = event
            self._told(event)
            self._came.set()
        return web.Response(status=204)


@asynccontextmanager
async def receiving(
    secret: str, clock: Clock, told: Callable[[CloudEvent], None]
) -> AsyncIterator[Receiver]:
    """A receiver that listens on a free port of loopback."""
    receiver = Receiver(secret, clock, told)
    application = web.Application()
    application.router.add_post("/", receiver.receive)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        yield receiver
    finally:
        await runner.cleanup()
