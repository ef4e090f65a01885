"""The HTTP server: its sockets, its routes, and the net below them in which every error becomes a problem."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from relay.api import ApiSettings, Relay
from relay.api.auth.authentication import Authenticator
from relay.api.auth.rejection_log import RejectionLog
from relay.api.routes import approvals, chat, deliveries, events, health, metrics, sinks
from relay.api.routes import confirmations as confirm
from relay.api.routes import explain as weighing
from relay.api.routes import signed_approvals as callbacks
from relay.api.routes.stream import MEDIA, Streams
from relay.api.schema import openapi
from relay.api.schema.problems import Problem, of_http
from relay.api.server.connection import Connection, Peer, linger
from relay.api.server.listener import Listener
from relay.api.server.pipeline import MAX_BODY_BYTES, RequestPipeline, check_length
from relay.api.server.sockets import local_peer, local_socket, open_tcp, tcp_peer
from relay.api.server.tls import ServerTlsContext
from relay.clock import Clock
from relay.errors import StoreUnavailable

MAX_CONNECTIONS = 256
"""Connections on one TCP socket at once."""
MAX_LOCAL_CONNECTIONS = 64
"""The same on the local socket."""
SEND_TIMEOUT = 15.0
"""Seconds that a caller may take to receive its answer."""
_FINISH = 1.0  # seconds that calls under way have at the end
_log = logging.getLogger(__name__)


class Server:
    """Listens while its context is entered; answers what needs the relay once it is attached.

    Entering raises ConfigError where it cannot listen: an address that is taken, a certificate that cannot be read.
    """

    def __init__(self, settings: ApiSettings, clock: Clock) -> None:
        self._settings = settings
        self._desk = RequestPipeline(Authenticator(settings, clock), clock)
        self._streams = Streams()
        self._stack = AsyncExitStack()
        self.address = settings.listen
        """Where it listens, for people."""
        self.port = settings.port
        """The TCP port that it listens on."""

    @property
    def rejections(self) -> RejectionLog:
        """Where those are counted who show no good credentials."""
        return self._desk.rejections

    def attach(self, relay: Relay) -> None:
        """The relay runs: from now on calls reach it."""
        self._desk.attached = relay
        self._streams.attach(relay)

    def detach(self) -> None:
        """The relay is about to stop: calls reach it no more, and streams end."""
        self._desk.attached = None
        self._streams.detach()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=_FINISH)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            listeners = await self._listeners(stack, runner)
            accepting = asyncio.create_task(_accept(listeners), name="api: accept")
            stack.push_async_callback(_cancel, accepting)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()
        await self._stack.aclose()

    def _application(self) -> web.Application:
        desk = self._desk
        table = (
            *events.ROUTES,
            *weighing.ROUTES,
            *approvals.ROUTES,
            *callbacks.ROUTES,
            *chat.routes(desk),
            *confirm.routes(desk),
            *deliveries.ROUTES,
            *sinks.ROUTES,
            *self._streams.routes(),
            *health.ROUTES,
            *metrics.routes(desk),
        )
        application = web.Application(middlewares=[_net(desk)], client_max_size=MAX_BODY_BYTES)
        for route in (*table, *openapi.routes(table)):
            handler = desk.handler(route)
            application.router.add_route(route.method, route.path, handler, expect_handler=_expect)
            if route.method == "GET" and MEDIA not in route.media:
                application.router.add_route("HEAD", route.path, handler, expect_handler=_expect)
        return application

    async def _listeners(self, stack: AsyncExitStack, runner: web.AppRunner) -> list[Listener]:
        manager = runner.server
        assert manager is not None  # noqa: S101  # it was set up

        def connect(peer: Peer, ended: Callable[[], None]) -> Connection:
            return Connection(manager, peer, count=self._count, ended=ended)

        tls = ServerTlsContext(self._settings.tls) if self._settings.tls is not None else None
        listeners = []
        for sock in await open_tcp(self._settings.host, self._settings.port):
            stack.enter_context(_closing(sock))
            listeners.append(
                Listener(
                    sock,
                    tcp_peer,
                    connect,
                    MAX_CONNECTIONS,
                    tls.context if tls is not None else None,
                )
            )
        self.port = listeners[0].sock.getsockname()[1]
        scheme = "https" if tls is not None else "http"
        self.address = f"{scheme}://{self._settings.listen.rpartition(':')[0]}:{self.port}"
        if self._settings.socket is not None:
            sock = stack.enter_context(local_socket(self._settings.socket))
            listeners.append(Listener(sock, local_peer, connect, MAX_LOCAL_CONNECTIONS))
            self.address += f" and {self._settings.socket}"
        return listeners

    def _count(self, status: int) -> None:
        self._desk.responses_by_status[status] += 1


def _net(desk: RequestPipeline) -> Middleware:
    """Below every handler: errors become problems, answers are counted, and no caller holds one up by not reading it."""

    @web.middleware
    async def net(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_length(request)
            response = await handler(request)
        except Problem as problem:
            response = problem.to_response()
        except web.HTTPException as error:
            response = of_http(error).to_response()
        except StoreUnavailable:
            response = Problem(
                503, "the state file can be neither read nor written now, try again"
            ).to_response()
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001  # the last net: a mistake of ours costs one call, and is logged
            _log.exception(
                "%s %s could not be answered", request.method, request.match_info.route.resource
            )
            response = Problem(
                500, "a mistake in the relay; its log says more", closes=True
            ).to_response()
        desk.responses_by_status[response.status] += 1
        await _deliver(request, response)
        return response

    return net


async def _deliver(request: web.Request, response: web.StreamResponse) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the caller did not take its answer") from None
    if not request.content.at_eof():
        await linger(request)


async def _expect(_request: web.Request) -> None:
    """Nothing yet: `read_body` says 100 Continue when it is about to read."""


async def _accept(listeners: list[Listener]) -> None:
    async with asyncio.TaskGroup() as group:
        for listener in listeners:
            group.create_task(listener.run())


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


@contextmanager
def _closing(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    finally:
        sock.close()
