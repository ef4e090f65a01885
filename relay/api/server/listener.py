"""Accepts connections on one socket, so many at once: when there are too many, the oldest of a stranger gives way."""

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

HANDSHAKE_TIMEOUT = 5.0
"""Seconds for agreeing on TLS."""
_GOODBYE = 2.0  # seconds for ending it in good order
_REST = 0.5  # seconds before the next try where the machine cannot accept, as it has no file descriptors left
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Guest:
    """A connection that was accepted; ``connection`` is None while TLS is still being agreed on."""

    sock: socket.socket
    connection: Connection | None = None

    @property
    def known(self) -> bool:
        return self.connection is not None and self.connection.known

    def leave(self) -> None:
        """Make way, at once."""
        if self.connection is not None and self.connection.transport is not None:
            self.connection.transport.abort()
            return
        with contextlib.suppress(OSError):  # the far side has gone already
            self.sock.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class Listener:
    """One listening socket.

    ``peer_of`` says who is at the other end of an accepted socket, ``connect`` makes its connection and is handed what to
    call when that is lost; ``tls`` gives the context for the next one (None: no TLS). ``most`` may be open at once.
    """

    sock: socket.socket
    peer_of: Callable[[socket.socket, Any], Peer]
    connect: Callable[[Peer, Callable[[], None]], Connection]
    most: int
    tls: Callable[[], ssl.SSLContext] | None = None
    _guests: dict[_Guest, None] = field(default_factory=dict)
    _full: bool = False

    async def run(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    sock, address = await loop.sock_accept(self.sock)
                except OSError as error:
                    _log.warning("a connection could not be accepted: %s", error.strerror)
                    await asyncio.sleep(_REST)
                    continue
                if self._room():
                    group.create_task(self._receive(sock, address))
                else:
                    sock.close()

    async def _receive(self, sock: socket.socket, address: Any) -> None:
        guest = _Guest(sock)
        self._guests[guest] = None
        tls = self.tls() if self.tls is not None else None
        try:
            connection = self.connect(
                self.peer_of(sock, address), lambda: self._guests.pop(guest, None)
            )
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT if tls is not None else None,
                ssl_shutdown_timeout=_GOODBYE if tls is not None else None,
            )
            guest.connection = connection
        except OSError as error:  # no TLS, or not as we want it; ssl.SSLError is one of these
            self._guests.pop(guest, None)
            _log.debug("a connection came to nothing: %s", error)
        except Exception:  # noqa: BLE001  # a mistake of ours may cost one connection, and not the next
            self._guests.pop(guest, None)
            _log.exception("a connection could not be begun")

    def _room(self) -> bool:
        """Whether there is room for one more, made where need be."""
        if len(self._guests) < self.most:
            self._full = self._full and len(self._guests) > self.most // 2
            return True
        if not self._full:
            self._full = True
            _log.warning(
                "%d connections are open, the most there may be: the oldest without good credentials give way",
                self.most,
            )
        oldest = next((guest for guest in self._guests if not guest.known), None)
        if oldest is None:
            return False
        del self._guests[oldest]
        oldest.leave()
        return True
