"""The connections of HTTP/1.1 callers: aiohttp's request handler, with a maximum, and problems.

Beyond the maximum, the oldest connection without a good call in progress gives way to the new one,
so that nobody is shut out (docs/decisions.md#who-gives-way-and-who-is-let-through).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
import struct
from asyncio.sslproto import SSLProtocol
from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web
from typing_extensions import override

from relay.api.responses import Problem, internal_error
from relay.logs import ThrottledLog

_MAX_LINE_BYTES = 8190
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits against slow, broken and hostile callers, in seconds. Tests set lower ones."""

    max_connections: int = 256
    """Open connections over TCP."""
    max_local_connections: int = 64
    """Open connections on the local socket."""
    handshake_timeout: float = 5.0
    idle_timeout: float = 15.0
    """Time that a connection may be idle, and time for the head of a request."""
    body_timeout: float = 10.0
    """Time for the body of a request."""
    linger_timeout: float = 1.0
    """Time for reading the rest of a refused body."""
    send_timeout: float = 15.0
    """Time in which a caller must receive its response."""
    max_large_answers: int = 4
    """Pages of one caller that are built or sent at once: slow readers hold few of them."""
    max_long_reads: int = 4
    """Pages and batches of streams that the thread of the store reads between two writes."""
    max_streams: int = 64
    max_streams_per_principal: int = 8
    stream_keep_alive_interval: float = 15.0
    """Silence after which a stream sends a comment, so that proxies keep the connection."""
    stream_send_timeout: float = 10.0
    """Time in which the reader of a stream must make room for more."""


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


@dataclass(slots=True)
class ConnectionGroup:
    maximum: int
    open: dict[Connection, None] = field(default_factory=dict)
    warnings: ThrottledLog = field(default_factory=lambda: ThrottledLog(_log))

    def add(self, connection: Connection) -> None:
        """Add a connection. If the maximum is open, one of the others gives way."""
        if len(self.open) >= self.maximum:
            text = f"the maximum of {self.maximum} connections is open: each new one replaces the "
            text += "oldest that has no good call in progress"
            self.warnings.warning("crowd", text, asyncio.get_running_loop().time())
            oldest = next(iter(self.open))
            next((other for other in self.open if not other.in_good_call), oldest).abort()
        self.open[connection] = None


class Connection(web.RequestHandler):
    """A connection.

    `in_good_call`: a call with valid credentials is in progress. `wakeup` is set when the
    connection is lost, for handlers that wait for something else, which may set it too.
    """

    __slots__ = ("_group", "_responses_by_status", "handshake", "in_good_call", "peer", "wakeup")

    def __init__(
        self,
        manager: web.Server,
        group: ConnectionGroup,
        limits: ServerLimits,
        counts: Counter[int],
    ) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp itself passes None for no log
            keepalive_timeout=limits.idle_timeout,
            lingering_time=limits.linger_timeout,
            max_headers=64,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            auto_decompress=False,
        )
        self.peer = Peer("unknown")
        self.in_good_call = False
        self.wakeup = asyncio.Event()
        self.handshake: asyncio.Transport | None = None
        """The transport below TLS."""
        self._group = group
        group.add(self)
        self._responses_by_status = counts

    def abort(self) -> None:
        self.leave_group()
        transport = self.transport or self.handshake
        if transport is not None:
            transport.abort()

    def leave_group(self) -> None:
        self._group.open.pop(self, None)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # TCP, TLS and local sockets have no others
        # A response is sent when the kernel has all of it. Otherwise a peer that reads nothing
        # could keep the rest of a small one here, and the connection open.
        transport.set_write_buffer_limits(high=1, low=0)
        self.peer = _peer_of(transport)
        if self not in self._group.open:  # it gave way before it was made
            transport.abort()

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.leave_group()
        self.wakeup.set()

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
            return Problem(status, "expected a request in HTTP/1.1", closes=True).to_response()
        _log.error("internal error while a request was read or answered", exc_info=exc)
        return internal_error().to_response()

    @override
    def log_exception(self, *args: object, **kw: object) -> None:
        """Log no traceback for malformed requests: docs/protocol.md#malformed-requests."""


class TlsProtocol(SSLProtocol):
    """The TLS of a connection, which counts from the beginning of its handshake."""

    def __init__(self, connection: Connection, context: ssl.SSLContext, timeout: float) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            connection,
            context,
            None,  # type: ignore[arg-type]  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=timeout,  # type: ignore[arg-type]  # a fraction is allowed
            ssl_shutdown_timeout=2.0,
        )
        self._connection = connection

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # TCP has no others
        self._connection.handshake = transport
        super().connection_made(transport)

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._connection.leave_group()  # of a failed handshake it hears nothing


def _peer_of(transport: asyncio.Transport) -> Peer:
    """Return the other end. The kernel names a local user: SO_PEERCRED, unix(7), Linux."""
    sock = transport.get_extra_info("socket")
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        return Peer(transport.get_extra_info("peername")[0])
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return Peer("the local socket", uid)


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address. An IPv4 peer of an IPv6 socket has an IPv4 address."""
    address = ipaddress.ip_address(text)
    return (isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped) or address


def connection_of(request: web.Request) -> Connection:
    connection = request.protocol
    assert isinstance(connection, Connection)  # noqa: S101  # `Server` makes no others
    return connection


async def send_response(
    request: web.Request, response: web.StreamResponse, seconds: float
) -> web.StreamResponse:
    """Send the response, and abort the connection if the peer does not receive it in time."""
    try:
        async with asyncio.timeout(seconds):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        connection_of(request).abort()
    return response
