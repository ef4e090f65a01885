"""The connections of HTTP/1.1 callers: accepts them up to a maximum, and limits each.

A `Listener` accepts on one socket. Beyond the maximum, each new connection replaces an open one, so
that nobody is shut out (docs/decisions/0030-who-gives-way.md). A `Connection` is aiohttp's request
handler with limits, and errors as problems: a response must be received in time, and releases what
its request held only then. A call is good if its credentials were valid and its caller had calls
left. The pipeline says so with `mark_authenticated`. The listener chooses which connection gives
way by `holder`, `in_good_call` and `used_at`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from typing_extensions import override

from relay.api.schema.responses import Problem, internal_error_problem
from relay.api.server.limits import ServerLimits

UNTIL_SENT = web.RequestKey("until_sent", contextlib.AsyncExitStack)
"""What a request holds until its response is sent. It is released before a problem is sent."""
_MAX_LINGER_BYTES = 2**20
_MAX_HEADERS = 64
_MAX_LINE_BYTES = 8190
_TLS_SHUTDOWN_TIMEOUT = 2.0
_ACCEPT_RETRY_INTERVAL = 0.5  # seconds, for example after all file descriptors were used
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection: an IP address, or the user id of a local socket's user."""

    address: str
    uid: int | None = None

    @property
    def network(self) -> str:
        """The key for rate limits: an IPv4 address, the /64 of an IPv6 address, or the local user.

        One IPv6 host can use all addresses of its /64, and a program on this machine all loopback
        addresses.
        """
        if self.uid is not None:
            return f"uid {self.uid}"
        if self.is_loopback_tcp:
            return "loopback"
        address = _ip_address(self.address)
        if isinstance(address, ipaddress.IPv4Address):
            return str(address)
        return str(ipaddress.ip_network((address, 64), strict=False))

    @property
    def is_loopback_tcp(self) -> bool:
        """Whether the peer is a program on this machine that connected over TCP."""
        return self.uid is None and _ip_address(self.address).is_loopback


class Connection(web.RequestHandler):
    """A connection, one of `group`: those that are open and share a maximum.

    `principal` made the last call, if that call was good. `in_good_call`: a good call is in
    progress. `used_at`: when the last good call began or ended, or else the connection, by the
    clock of the event loop.

    `wakeup` is set when the connection is lost, for handlers that wait for something else, which
    may set it too.
    """

    __slots__ = (
        "_limits",
        "_responses_by_status",
        "_sock",
        "_wait",
        "group",
        "in_good_call",
        "peer",
        "principal",
        "used_at",
        "wakeup",
    )

    def __init__(
        self,
        manager: web.Server,
        sock: socket.socket,
        peer: Peer,
        group: set[Connection],
        *,
        limits: ServerLimits,
        responses_by_status: Counter[int],
    ) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp itself passes None for no log
            keepalive_timeout=limits.idle_timeout,
            lingering_time=0,  # `_drain_refused_body` also limits the bytes
            max_headers=_MAX_HEADERS,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            auto_decompress=False,
        )
        self.peer = peer
        self.group = group
        self.principal: str | None = None
        self.in_good_call = False
        self.used_at = self._loop.time()
        self.wakeup = asyncio.Event()
        self._sock = sock
        self._wait: asyncio.Timeout | None = None
        self._limits = limits
        self._responses_by_status = responses_by_status

    @property
    def holder(self) -> str:
        """The principal of the last call if that was good, or else the peer's address."""
        return self.principal or self.peer.network

    def mark_authenticated(self, principal: str) -> None:
        """Record that the call in progress is a good one of this principal."""
        self.principal = principal
        self.in_good_call = True
        self.used_at = self._loop.time()

    def abort(self) -> None:
        """Close the connection now, also during its TLS handshake or while it is being closed."""
        self.group.discard(self)
        if self.transport is not None:
            self.transport.abort()
            return
        with contextlib.suppress(OSError):  # the peer has disconnected already
            self._sock.shutdown(socket.SHUT_RDWR)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # TCP, TLS and local sockets have no others
        # A response is sent when the kernel has all of it. Otherwise a peer that reads nothing
        # could keep the rest of a small one here, and the connection open.
        transport.set_write_buffer_limits(high=1, low=0)

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.group.discard(self)
        self.wakeup.set()
        if self._wait is not None:
            self._wait.reschedule(self._loop.time())

    @contextlib.asynccontextmanager
    async def cancel_on_disconnect(self) -> AsyncIterator[None]:
        """End a wait when the connection is lost. Raises ConnectionResetError.

        Nothing limits the calls of lost connections, so each of them must end soon.
        """
        try:
            async with asyncio.timeout(None) as wait:
                if self.transport is None:
                    wait.reschedule(self._loop.time())
                self._wait = wait
                try:
                    yield
                finally:
                    self._wait = None
        except TimeoutError:
            raise ConnectionResetError("the caller has disconnected") from None

    @override
    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the response, and abort the connection if the peer does not receive it in time."""
        async with request.get(UNTIL_SENT) or contextlib.AsyncExitStack():
            if not self.in_good_call:
                self.principal = None
            elif self._exceeds_principal_limit() and not resp.prepared:
                resp.force_close()
            try:
                async with asyncio.timeout(self._limits.send_timeout):
                    result = await super().finish_response(request, resp, start_time)
            except TimeoutError:
                self.abort()
                return resp, True
            if not request.content.at_eof():
                await _drain_refused_body(request, self._limits.linger_timeout)
            if self.in_good_call:
                self.in_good_call = False
                self.used_at = self._loop.time()
            return result

    def _exceeds_principal_limit(self) -> bool:
        """Whether the principal has more connections than it may keep."""
        count = sum(other.principal == self.principal for other in self.group)
        return count > self._limits.max_connections_per_principal

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP with a problem, log only errors of the relay, and close."""
        if isinstance(exc, ConnectionError):
            raise exc
        self._responses_by_status[status] += 1
        if status < 500:
            problem = Problem(status, "expected a request in HTTP/1.1", closes=True)
            return problem.to_response()
        _log.error("internal error while a request was read or answered", exc_info=exc)
        return internal_error_problem().to_response()

    @override
    def log_exception(self, *args: object, **kw: object) -> None:
        """Log no traceback for callers that disconnect or send malformed requests.

        See docs/protocol.md#malformed-requests.
        """


@dataclass(slots=True, kw_only=True)
class Listener:
    """One listening socket.

    `connect` makes the connection of an accepted socket to a peer. Listeners with the same `group`
    share the maximum. `tls_context` returns the context for the next connection; None means no TLS.
    """

    sock: socket.socket
    connect: Callable[[socket.socket, Peer, set[Connection]], Connection]
    group: set[Connection]
    max_connections: int
    limits: ServerLimits
    tls_context: Callable[[], ssl.SSLContext] | None = None
    _has_warned: bool = False

    async def run(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    sock, address = await loop.sock_accept(self.sock)
                except OSError as error:
                    _log.warning("a connection could not be accepted: %s", error.strerror)
                    await asyncio.sleep(_ACCEPT_RETRY_INTERVAL)
                    continue
                self._abort_one_connection_if_full()
                connection = self.connect(sock, _identify_peer(sock, address), self.group)
                self.group.add(connection)
                group.create_task(self._attach_accepted_socket(sock, connection))

    async def _attach_accepted_socket(self, sock: socket.socket, connection: Connection) -> None:
        try:
            context = None if self.tls_context is None else self.tls_context()
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self.limits.handshake_timeout,
                ssl_shutdown_timeout=None if context is None else _TLS_SHUTDOWN_TIMEOUT,
            )
        except OSError as error:  # includes ssl.SSLError
            self.group.discard(connection)
            _log.debug("a connection could not be established: %s", error)
        except Exception:  # noqa: BLE001  # an internal error must not end the listener
            self.group.discard(connection)
            _log.exception("internal error while a connection was established")

    def _abort_one_connection_if_full(self) -> None:
        """Abort a connection if the maximum is open."""
        if len(self.group) < self.max_connections:
            if len(self.group) <= self.max_connections // 2:
                self._has_warned = False
            return
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the maximum of %d connections is open: each new one replaces one without valid "
                "credentials, or one of the principal with the most",
                self.max_connections,
            )
        counts = Counter(connection.holder for connection in self.group)

        def keeping_order(connection: Connection) -> tuple[bool, int, bool, float]:
            count = counts[connection.holder]
            is_protected = (
                connection.principal is not None
                and connection.transport is not None  # else it is being closed
                and count <= self.limits.max_connections_per_principal
            )
            return (is_protected, -count, connection.in_good_call, connection.used_at)

        min(self.group, key=keeping_order).abort()


def _identify_peer(sock: socket.socket, address: Any) -> Peer:
    """Return the other end of an accepted connection. The kernel names the user of a local one.

    Source: unix(7), SO_PEERCRED (Linux).
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        return Peer(address[0])
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return Peer("the local socket", uid)


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address. An IPv4 peer of an IPv6 socket has an IPv4 address."""
    address = ipaddress.ip_address(text)
    return (isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped) or address


def connection_of(request: web.Request) -> Connection:
    """Return the connection of a request."""
    connection = request.protocol
    assert isinstance(connection, Connection)  # noqa: S101  # `Listener` makes no others
    return connection


async def _drain_refused_body(request: web.BaseRequest, seconds: float) -> None:
    """Read some of a refused body, so that the caller gets the response instead of a reset."""
    remaining = _MAX_LINGER_BYTES
    try:
        async with asyncio.timeout(seconds):
            while remaining > 0 and (chunk := await request.content.readany()):
                remaining -= len(chunk)
    except (TimeoutError, OSError, web.RequestPayloadError, HttpProcessingError):
        return
