"""Accepts connections on one socket, up to a maximum number.

Beyond the maximum, a new connection replaces the oldest one without valid credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from relay.api.server.connection import Connection, Peer
from relay.api.server.sockets import identify_peer

_TLS_SHUTDOWN_TIMEOUT = 2.0
_ACCEPT_RETRY_INTERVAL = 0.5  # seconds, for example after all file descriptors were used
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _OpenConnection:
    """An accepted socket. `connection` is None during the TLS handshake."""

    sock: socket.socket
    connection: Connection | None = None

    @property
    def is_authenticated(self) -> bool:
        return self.connection is not None and self.connection.is_authenticated

    def abort(self) -> None:
        if self.connection is not None and self.connection.transport is not None:
            self.connection.transport.abort()
            return
        with contextlib.suppress(OSError):  # the peer has disconnected already
            self.sock.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True, kw_only=True)
class Listener:
    """One listening socket.

    `connect` makes the connection to a peer and receives the callback for its end. `tls_context`
    returns the context for the next connection; None means no TLS.
    """

    sock: socket.socket
    connect: Callable[[Peer, Callable[[], object]], Connection]
    max_connections: int
    handshake_timeout: float
    tls_context: Callable[[], ssl.SSLContext] | None = None
    _open: dict[_OpenConnection, None] = field(default_factory=dict)  # the oldest first
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
                if self._make_room():
                    group.create_task(self._open_connection(sock, address))
                else:
                    sock.close()

    async def _open_connection(self, sock: socket.socket, address: Any) -> None:
        opened = _OpenConnection(sock)
        self._open[opened] = None
        has_tls = self.tls_context is not None
        try:
            connection = self.connect(
                identify_peer(sock, address), lambda: self._open.pop(opened, None)
            )
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self.tls_context() if self.tls_context is not None else None,
                ssl_handshake_timeout=self.handshake_timeout if has_tls else None,
                ssl_shutdown_timeout=_TLS_SHUTDOWN_TIMEOUT if has_tls else None,
            )
            opened.connection = connection
        except OSError as error:  # includes ssl.SSLError
            self._open.pop(opened, None)
            _log.debug("a connection could not be established: %s", error)
        except Exception:  # noqa: BLE001  # an internal error must not end the listener
            self._open.pop(opened, None)
            _log.exception("internal error while a connection was established")

    def _make_room(self) -> bool:
        """Return whether another connection may be opened. Aborts an old one if necessary."""
        if len(self._open) < self.max_connections:
            if len(self._open) <= self.max_connections // 2:
                self._has_warned = False
            return True
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the maximum of %d connections is open: new ones replace the oldest ones "
                "without valid credentials",
                self.max_connections,
            )
        oldest = next((opened for opened in self._open if not opened.is_authenticated), None)
        if oldest is None:
            return False
        del self._open[oldest]
        oldest.abort()
        return True
