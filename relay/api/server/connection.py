"""One connection: aiohttp's handling of HTTP/1.1, bounded, with problems instead of its own error pages and tracebacks."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from typing_extensions import override

from relay.api.schema.problems import Problem

IDLE_TIMEOUT = 15.0
"""Seconds that a connection may be idle, or take for the head of a request."""
LINGER_TIMEOUT = 1.0
"""Seconds in which the rest of a body that was refused is read, up to a limit."""
_LINGER_BYTES = 2**20
_MOST_FIELDS = 64
_LONGEST_FIELD = 8190
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end: an address, or a user of the local socket (``uid``)."""

    address: str
    uid: int | None = None

    @property
    def network(self) -> str:
        """Whom its calls count for: an IPv4 address for itself, an IPv6 one for its /64, all of which one host may have."""
        if self.uid is not None:
            return self.address
        parsed = ipaddress.ip_address(self.address.partition("%")[0])
        if parsed.version == 4:  # the version of IP
            return str(parsed)
        return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))

    @property
    def is_loopback(self) -> bool:
        """Whether it is an address of this machine that others cannot have."""
        return self.uid is None and ipaddress.ip_address(self.address.partition("%")[0]).is_loopback


class Connection(web.RequestHandler):
    """``known``: somebody with good credentials is at the other end. ``ended`` is called when it is lost.

    ``wake`` is set then too, for a handler that waits and would not notice.
    """

    __slots__ = ("_count", "_ended", "known", "peer", "wake")

    def __init__(
        self,
        manager: web.Server,
        peer: Peer,
        *,
        count: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None is how aiohttp itself is told to write none
            keepalive_timeout=IDLE_TIMEOUT,
            lingering_time=0,  # `linger` is bounded in bytes too
            max_headers=_MOST_FIELDS,
            max_line_size=_LONGEST_FIELD,
            max_field_size=_LONGEST_FIELD,
            auto_decompress=False,
        )
        self.peer = peer
        self.known = peer.uid is not None
        self.wake = asyncio.Event()
        self._count = count
        self._ended = ended

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._ended()
        self.wake.set()

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP, or not as we read it: a problem, and the end of the connection. Nothing is logged."""
        if isinstance(exc, ConnectionError):
            raise exc
        if status >= 500:  # a mistake of ours, outside of what the server's own net catches
            _log.error("a call could not be answered", exc_info=exc)
        self._count(status)
        detail = (
            "expected a request in HTTP/1.1"
            if status < 500
            else "a mistake in the relay; its log says more"
        )
        return Problem(status, detail, closes=True).to_response()

    @override
    def log_exception(self, *args: object, **kw: object) -> None:
        """A caller that breaks off or sends rubbish gets no traceback.

        See docs/protocol.md#malformed-requests.
        """


def request_peer(request: web.Request) -> Peer:
    """Who is at the other end of a request's connection."""
    return _connection(request).peer


def mark_authenticated(request: web.Request) -> None:
    """Somebody with good credentials is there: the connection is not given up for a newer one."""
    _connection(request).known = True


async def linger(request: web.Request) -> None:
    """Read a little more of a body that was refused, so that the caller sees the answer and not a reset."""
    left = _LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_TIMEOUT):
            while left > 0 and (chunk := await request.content.readany()):
                left -= len(chunk)
    except (TimeoutError, OSError, web.RequestPayloadError, HttpProcessingError):
        return


def disconnect_event(request: web.Request) -> asyncio.Event:
    """Set when the connection is lost; whoever waits for more than that may set it too."""
    return _connection(request).wake


def _connection(request: web.Request) -> Connection:
    connection = request.protocol
    assert isinstance(connection, Connection)  # noqa: S101  # the server makes no others
    return connection
