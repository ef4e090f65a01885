"""The HTTP server: opens the sockets, serves the routes, and turns errors into problems.

The roles of the relay enter `Server`, and attach their parts to `Server.state` once they run. It
listens on TCP with or without TLS, and on the local socket. A middleware around the handlers of the
routes answers every exception as a problem and counts the responses. A reload of the configuration
replaces clients, tokens and certificates, while connections stay; a certificate is also read again
when its files change.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, Self

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
from relay.api.settings import (
    ApiSettings,
    ServerTlsSettings,
    automatic_socket,
    supports_local_sockets,
)
from relay.api.state import ServerState
from relay.approvals.gate import NotDecidedHere
from relay.clock import Clock
from relay.errors import ConfigError, StoreUnavailable
from relay.files import FileBackedValue, create_private_folder, require_small_regular_file
from relay.logs import log_extra

_BACKLOG = 128
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
        if settings.tls != state.callers.settings.tls:
            tls = None if settings.tls is None else file_backed_server_context(settings.tls)

        def use() -> None:
            self._tls = tls
            state.replace_callers(callers)

        return use

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            application = self._make_application()
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await self._listen(stack, runner)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.state.detach_relay()
        await self._stack.aclose()

    def _make_application(self) -> web.Application:
        middlewares = [_error_middleware(self.state)]
        application = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
        add_route = partial(application.router.add_route, expect_handler=_ignore_expectation)
        for route in ROUTES:
            handler = aiohttp_handler(route, self.state)
            has_head = route.method == "GET" and STREAM_MEDIA_TYPE not in route.media_types
            for method in (route.method, "HEAD") if has_head else (route.method,):
                add_route(method, route.path, handler)
        return application

    async def _listen(self, stack: AsyncExitStack, runner: web.AppRunner) -> None:
        settings, limits = self.state.callers.settings, self.state.limits
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
        local = _open_local_socket(stack, settings.socket, self._state_file)
        listeners = [(sock, connect_over_tcp) for sock in sockets]
        if local is not None:
            listeners.append((local[0], lambda: connection(over_local)))
            self.address += f" and {local[1]}"
        for sock, connect in listeners:
            server = await asyncio.get_running_loop().create_server(
                connect, sock=sock, backlog=_BACKLOG
            )
            stack.callback(server.close)


def _error_middleware(state: ServerState) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        began = state.clock.monotonic()
        response = await _run_handler(request, handler)
        state.responses_by_status[response.status] += 1
        method, status = request.method, response.status
        resource = request.match_info.route.resource
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


async def open_tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address; port 0: one free port for all. Raises ConfigError."""
    sockets: list[socket.socket] = []
    try:
        results = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        addresses = dict.fromkeys((family, address[0]) for family, _, _, _, address in results)
        for family, address in addresses:
            sock = socket.create_server((str(address), port), family=family, backlog=_BACKLOG)
            # Accepted connections inherit it. The kernel would take megabytes for a slow reader.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
            sockets.append(sock)
            port = sock.getsockname()[1]
    except OSError as error:
        for sock in sockets:
            sock.close()
        expected = f"an address that is free, {host}:{port}: {error.strerror or error}"
        if error.errno == errno.EADDRNOTAVAIL:
            expected = f"an address of this machine, no interface has that of {host}:{port}"
        raise ConfigError(f"api.listen: expected {expected}") from error
    return sockets


def _open_local_socket(
    stack: AsyncExitStack, path: Path | Literal["auto"] | None, state_file: Path | None
) -> tuple[socket.socket, Path] | None:
    """Listen on the socket of ``api.socket`` until the stack is left; return it and its path.

    Return None if there is none. If that beside the state file cannot be made, log what to do:
    without it, the relay works and the command line needs a key. It is for the user of the relay
    alone: the group of a user may have many members. Raises ConfigError about another path.
    """
    if path != "auto":
        return None if path is None else (stack.enter_context(_local_socket(path)), path)
    if state_file is None or not supports_local_sockets():
        return None
    with suppress(OSError):  # the store needs it too, and says why it cannot be made
        create_private_folder(state_file.parent)
    try:
        path = automatic_socket(state_file)
        return stack.enter_context(_local_socket(path, mode=0o600)), path
    except ConfigError as error:
        _log.warning(
            "there is no local socket, so the command line needs --url and a key: %s. Set "
            "api.socket to a path in a folder where this user may write, or to null",
            str(error).removeprefix("api.socket: "),
        )
        return None


@contextmanager
def _local_socket(path: Path, *, mode: int = 0o660) -> Iterator[socket.socket]:
    """Listen on a local socket for those whom its mode admits, and remove it at the end.

    Replaces the socket of a relay that has ended, but not one that accepts connections. Raises
    ConfigError.
    """
    if not supports_local_sockets():
        raise ConfigError(
            "api.socket: this system has no local sockets that say who calls; "
            "remove it, and use api.listen with clients"
        )
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            _remove_stale_socket(path)
            # Linux derives the mode of the file from that of the socket and the umask. So the file
            # never has a wider mode.
            os.fchmod(sock.fileno(), mode)
            sock.bind(str(path))
            own_file = path.stat()
            path.chmod(mode)
            sock.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"api.socket: expected a path where a socket can be made, {path}: "
                f"{error.strerror or error}"
            ) from error
        try:
            yield sock
        finally:
            sock.close()
            with suppress(OSError):
                if os.path.samestat(path.stat(), own_file):
                    path.unlink()


def _remove_stale_socket(path: Path) -> None:
    """Remove a socket that accepts no connections. Raises ConfigError for any other file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"api.socket: expected a socket or nothing at {path}, got another file; "
            "remove it or choose another path"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # the listener's queue is full
    raise ConfigError(
        f"api.socket: another relay listens on {path}; stop it, or choose another path"
    )


def file_backed_server_context(settings: ServerTlsSettings) -> FileBackedValue[ssl.SSLContext]:
    """Return the TLS context for new connections. Raises ConfigError if the files are unusable."""
    return FileBackedValue(
        (settings.cert_file, settings.key_file, settings.client_ca_file),
        partial(make_server_context, settings),
        on_failure=lambda error: _log.warning("%s. The previous certificate stays in use", error),
    )


def make_server_context(settings: ServerTlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL 1.1 lets clients renegotiate, with another certificate and at the server's cost.
    context.options |= ssl.OP_NO_RENEGOTIATION
    expected = (
        f"api.tls: expected a certificate in PEM in {settings.cert_file} and its key, "
        f"not encrypted, in {settings.key_file}"
    )
    try:
        require_small_regular_file(settings.cert_file)
        require_small_regular_file(settings.key_file)
        # The empty password keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(settings.cert_file, settings.key_file, password="")
        if settings.client_ca_file is not None:
            expected = (
                f"api.tls.client_ca_file: expected certificates in PEM in {settings.client_ca_file}"
            )
            context.verify_mode = ssl.CERT_REQUIRED
            require_small_regular_file(settings.client_ca_file)
            context.load_verify_locations(settings.client_ca_file)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
        raise ConfigError(f"{expected}: {reason}") from error
    return context
