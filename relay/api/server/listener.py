"""Accepts connections on one socket, up to a maximum number.

Beyond the maximum, each new connection replaces an open one, so that nobody is shut out
(docs/decisions/0030-who-gives-way.md).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relay.api.server.connection import Connection, Peer
from relay.api.server.limits import ServerLimits

_TLS_SHUTDOWN_TIMEOUT = 2.0
_ACCEPT_RETRY_INTERVAL = 0.5  # seconds, for example after all file descriptors were used
_log = logging.getLogger(__name__)


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
                self._make_room()
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

    def _make_room(self) -> None:
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
