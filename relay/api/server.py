"""The HTTP server: opens the sockets, serves the routes, and turns errors into problems.

The roles of the relay enter `Server`, and attach their parts to `Server.state` once they run. A
middleware around the handlers of the routes answers every exception as a problem and counts the
responses. A reload of the configuration replaces clients, tokens and certificates, while
connections stay.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from relay.api.callers import Callers
from relay.api.calls import MAX_BODY_BYTES, aiohttp_handler, check_content_length
from relay.api.connections import (
    Connection,
    ConnectionGroup,
    ServerLimits,
    TlsProtocol,
    send_response,
)
from relay.api.responses import Problem, internal_error, problem_of_aiohttp
from relay.api.routes import ROUTES
from relay.api.routes.stream import MEDIA_TYPE as STREAM_MEDIA_TYPE
from relay.api.settings import ApiSettings
from relay.api.sockets import (
    BACKLOG,
    file_backed_server_context,
    open_local_socket,
    open_tcp_sockets,
)
from relay.api.state import ServerState
from relay.approvals.gate import NotDecidedHere
from relay.clock import Clock
from relay.errors import StoreUnavailable
from relay.files import FileBackedValue
from relay.logs import log_extra

_SHUTDOWN_TIMEOUT = 1.0  # seconds for calls in progress
_log = logging.getLogger(__name__)


class Server:
    """Listens while its context is entered. Calls that need the relay fail until it is attached.

    Entering raises ConfigError if the server cannot listen, for example on a used address or with
    an unreadable certificate.
    """

    def __init__(
        self,
        settings: ApiSettings,
        clock: Clock,
        limits: ServerLimits | None = None,
        *,
        state_file: Path | None = None,
    ) -> None:
        """``state_file`` is that of the relay. Without it, api.socket: auto makes no socket."""
        self.settings = settings
        """What is in force; a reload replaces it."""
        self._clock = clock
        self._state_file = state_file
        callers = Callers(settings, clock)
        self.state = ServerState(clock=clock, limits=limits or ServerLimits(), callers=callers)
        self._stack = AsyncExitStack()
        self._tls: FileBackedValue[ssl.SSLContext] | None = None
        self.address = settings.listen
        self.port = settings.port
        """The TCP port on which the server listens."""

    def prepare_reload(self, settings: ApiSettings) -> Callable[[], None]:
        """Return a function that makes the server use other clients, tokens and certificates.

        Only the preparation can fail: it raises ConfigError if the certificate is unusable.
        Connections and streams stay, except the streams of callers whose client has changed. The
        addresses must be the same.
        """
        state, tls = self.state, self._tls
        callers = Callers(settings, self._clock, state.callers)
        if settings.tls != self.settings.tls:
            tls = None if settings.tls is None else file_backed_server_context(settings.tls)

        def use() -> None:
            before = state.callers
            self.settings, self._tls = settings, tls
            state.callers = callers
            state.end_streams(lambda whose: callers.what_makes(whose) != before.what_makes(whose))

        return use

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            runner = web.AppRunner(
                self._make_application(), access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await self._listen(stack, runner)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.state.detach_relay()
        await self._stack.aclose()

    def _make_application(self) -> web.Application:
        application = web.Application(
            middlewares=[_error_middleware(self.state)], client_max_size=MAX_BODY_BYTES
        )
        for route in ROUTES:
            handler = aiohttp_handler(route, self.state)
            has_head = route.method == "GET" and STREAM_MEDIA_TYPE not in route.media_types
            for method in (route.method, "HEAD") if has_head else (route.method,):
                application.router.add_route(
                    method, route.path, handler, expect_handler=_ignore_expectation
                )
        return application

    async def _listen(self, stack: AsyncExitStack, runner: web.AppRunner) -> None:
        settings, limits, loop = self.settings, self.state.limits, asyncio.get_running_loop()
        assert runner.server is not None  # noqa: S101  # the runner is set up
        counts = self.state.responses_by_status
        connection = partial(Connection, runner.server, limits=limits, counts=counts)
        self._tls = None if settings.tls is None else file_backed_server_context(settings.tls)
        over_tcp = ConnectionGroup(limits.max_connections)  # a host name can have several sockets
        over_local = ConnectionGroup(limits.max_local_connections)

        def connect_over_tcp() -> asyncio.BaseProtocol:
            if self._tls is None:
                return connection(over_tcp)
            # `create_server` takes one context for good: it would keep a certificate authority
            # that was removed. This is what it makes of the context.
            return TlsProtocol(connection(over_tcp), self._tls.get(), limits.handshake_timeout)

        sockets = await open_tcp_sockets(settings.host, settings.port)
        for sock in sockets:
            stack.enter_context(sock)
        self.port = sockets[0].getsockname()[1]
        scheme = "http" if self._tls is None else "https"
        self.address = f"{scheme}://{settings.listen.rpartition(':')[0]}:{self.port}"
        local = open_local_socket(stack, settings.socket, self._state_file)
        listeners = [(sock, connect_over_tcp) for sock in sockets]
        if local is not None:
            listeners.append((local[0], lambda: connection(over_local)))
            self.address += f" and {local[1]}"
        for sock, connect in listeners:
            server = await loop.create_server(connect, sock=sock, backlog=BACKLOG)
            stack.callback(server.close)


def _error_middleware(state: ServerState) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        began = state.clock.monotonic()
        response = await _run_handler(request, handler)
        state.responses_by_status[response.status] += 1
        method, status, resource = (
            request.method,
            response.status,
            request.match_info.route.resource,
        )
        path = None if resource is None else resource.canonical
        seconds = round(state.clock.monotonic() - began, 6)
        extra = log_extra(method=method, path=path, status=status, seconds=seconds)
        place = path or "an unknown path"
        _log.debug("%s %s was answered with %d", method, place, status, extra=extra)
        return await send_response(request, response, state.limits.send_timeout)

    return middleware


async def _run_handler(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        check_content_length(request)
        return await handler(request)
    except Problem as problem:
        return problem.to_response()
    except web.HTTPException as error:
        return problem_of_aiohttp(error).to_response()
    except NotDecidedHere as error:
        return Problem(409, str(error)).to_response()
    except StoreUnavailable:
        detail = "the state file can be neither read nor written now; try again"
        return Problem(503, detail).to_response()
    except ConnectionError:
        raise
    except Exception:  # noqa: BLE001  # an internal error must not end the connection without a response
        resource = request.match_info.route.resource
        _log.exception("%s %s could not be answered", request.method, resource)
        return internal_error().to_response()


async def _ignore_expectation(_request: web.Request) -> None:
    """Keep aiohttp from answering Expect: `aiohttp_handler` does so before it reads the body."""
