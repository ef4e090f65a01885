"""A stand-in for a service of Apprise: the receiver of ``json://``.

Source: https://appriseit.com/services/json/
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from yarl import URL

from relay.net.http import basic_authorization
from tests.cli.command import serve_handler

TOKEN = "t0ken-in-path"
PASSWORD = "t0ken-as-password"
PATH = f"/notify/{TOKEN}"


@dataclass(slots=True, kw_only=True)
class AppriseService:
    """One receiver, which answers every call with ``status``."""

    port: int = 0
    status: int = 200
    release: asyncio.Event | None = None
    """Calls get no answer until this is set; None: they are answered at once."""
    messages: list[str] = field(default_factory=list)
    """Title and text of the accepted messages."""
    message_types: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    """The paths of all calls."""
    user_agents: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return apprise_url(self.port)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path)
        if self.release is not None:
            await self.release.wait()
        authorization = request.headers.get("Authorization")
        if self.status in {301, 302, 307, 308}:
            location = f"http://127.0.0.1:{self.port}/elsewhere"
            return web.Response(status=self.status, headers={"Location": location})
        if self.status != 200:
            text = f"{request.path} {authorization} {await request.text()}"
            return web.Response(status=self.status, text=text)
        if request.path != PATH or authorization != basic_authorization("relay", PASSWORD):
            return web.Response(status=401)
        body = await request.json()
        self.messages.append(f"{body['title']}\n{body['message']}")
        self.message_types.append(body["type"])
        self.user_agents.append(request.headers["User-Agent"])
        return web.Response()


def apprise_url(port: int) -> str:
    return f"json://relay:{PASSWORD}@127.0.0.1:{port}{PATH}"


@asynccontextmanager
async def running_service() -> AsyncIterator[AppriseService]:
    service = AppriseService()
    async with serve_handler(service.handle) as url:
        service.port = URL(url).port or 0
        yield service
        if service.release is not None:
            service.release.set()
