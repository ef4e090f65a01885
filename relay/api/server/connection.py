"""One HTTP/1.1 connection: aiohttp's request handler with limits, and errors as problems.

It does not decide who may connect: see `relay.api.server.listener`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from typing_extensions import override

from relay.api.schema.responses import Problem, internal_error

_MAX_LINGER_BYTES = 2**20
_MAX_HEADERS = 64
_MAX_LINE_BYTES = 8190
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection: an IP address, or the user id of a local socket's user."""

    address: str
    uid: int | None = None

    @property
    def network(self) -> str:
        """The key for rate limits: an IPv4 address, or the /64 of an IPv6 address.

        One IPv6 host can use all addresses of its /64.
        """
        if self.uid is not None:
            return self.address
        address = ipaddress.ip_address(self.address)
        if isinstance(address, ipaddress.IPv4Address):
            return str(address)
        return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))

    @property
    def is_loopback(self) -> bool:
        """Whether the peer is a program on this machine that connected over TCP."""
        return self.uid is None and ipaddress.ip_address(self.address).is_loopback


class Connection(web.RequestHandler):
    """A connection.

    `is_authenticated`: the peer has shown valid credentials, so no newer connection replaces this
    one. `on_lost` is called when the connection is lost. `wakeup` is set then, for handlers that
    wait for something else, which may set it too.
    """

    __slots__ = ("_on_lost", "_responses_by_status", "is_authenticated", "peer", "wakeup")

    def __init__(
        self,
        manager: web.Server,
        peer: Peer,
        on_lost: Callable[[], object],
        *,
        idle_timeout: float,
        responses_by_status: Counter[int],
    ) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp itself passes None for no log
            keepalive_timeout=idle_timeout,
            lingering_time=0,  # `linger` also limits the bytes
            max_headers=_MAX_HEADERS,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            auto_decompress=False,
        )
        self.peer = peer
        self.is_authenticated = peer.uid is not None
        self.wakeup = asyncio.Event()
        self._on_lost = on_lost
        self._responses_by_status = responses_by_status

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._on_lost()
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
            problem = Problem(status, "expected a request in HTTP/1.1", closes=True)
            return problem.to_response()
        _log.error("internal error while a request was read or answered", exc_info=exc)
        return internal_error().to_response()

    @override
    def log_exception(self, *args: object, **kw: object) -> None:
        """Log no traceback for callers that disconnect or send malformed requests.

        See docs/protocol.md#malformed-requests.
        """


def connection_of(request: web.Request) -> Connection:
    """Return the connection of a request."""
    connection = request.protocol
    assert isinstance(connection, Connection)  # noqa: S101  # `relay.api.server.listener` makes no others
    return connection


async def linger(request: web.Request, seconds: float) -> None:
    """Read some of a refused body, so that the caller gets the response instead of a reset."""
    remaining = _MAX_LINGER_BYTES
    try:
        async with asyncio.timeout(seconds):
            while remaining > 0 and (chunk := await request.content.readany()):
                remaining -= len(chunk)
    except (TimeoutError, OSError, web.RequestPayloadError, HttpProcessingError):
        return
