"""A service that Apprise speaks to: the receiver of its ``json://`` (https://appriseit.com/services/json/), which answers as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from relay.net.http import basic_authorization

TOKEN = "t0ken-in-path"
PASSWORD = "t0ken-as-password"
PATH = f"/notify/{TOKEN}"


@dataclass(slots=True)
class Service:
    """One receiver. ``messages`` are title and text of what it took, in order; ``calls`` the paths of all that came.

    ``agents``: who said that they sent it.
    """

    port: int = 0
    status: int = 200
    hung: asyncio.Event | None = None
    dripping: bool = False
    """Whether answers come a byte a second and have no end: no timeout between two bytes helps."""
    messages: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Apprise's URL of it."""
        return url_of(self.port)

    async def take(self, request: web.Request) -> web.StreamResponse:
        """What a call comes to."""
        self.calls.append(request.path)
        if self.dripping:
            return await _dripped(request)
        if self.hung is not None:
            await self.hung.wait()
        if self.status in {301, 302, 307, 308}:
            return web.Response(
                status=self.status, headers={"Location": f"http://127.0.0.1:{self.port}/elsewhere"}
            )
        if self.status != 200:
            return web.Response(
                status=self.status,
                text=f"{request.path} {request.headers.get('Authorization')} {await request.text()}",
            )
        if request.path != PATH or request.headers.get("Authorization") != basic_authorization(
            "relay", PASSWORD
        ):
            return web.Response(status=401)
        body = await request.json()
        self.messages.append(f"{body['title']}\n{body['message']}")
        self.kinds.append(body["type"])
        self.agents.append(request.headers["User-Agent"])
        return web.Response()


async def _dripped(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b".")
        await asyncio.sleep(1)


def url_of(port: int, *, more: str = "") -> str:
    """Apprise's URL of a receiver at a port."""
    return f"json://relay:{PASSWORD}@127.0.0.1:{port}{PATH}{more}"


@asynccontextmanager
async def service() -> AsyncIterator[Service]:
    """A receiver that takes what comes."""
    made = Service()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    try:
        yield made
    finally:
        if made.hung is not None:
            made.hung.set()
        await runner.cleanup()
