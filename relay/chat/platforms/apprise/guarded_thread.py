"""Runs blocking calls in threads of their own, which cannot connect to refused addresses.

The thread pool of the event loop is not used: a few threads that hang there would stop every sink
from resolving names, and the process waits for a pool at its end.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Generic, TypeVar

from typing_extensions import override

from relay.net.egress import AddressRefused, is_refused

T = TypeVar("T")
_CONNECTING_EVENTS = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})
"""Audit events (https://docs.python.org/3/library/audit_events.html)."""


class SerialCaller(Generic[T]):
    """Calls one function at a time, each in a thread of its own.

    A late call delays the next one, so threads do not pile up.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._finished: asyncio.Future[None] | None = None

    async def call(self, function: Callable[[], T], timeout: float) -> tuple[T, bool]:  # noqa: ASYNC109  # waiting for an earlier call counts, too
        """Call a function within ``timeout`` seconds, including the wait for an earlier call.

        Returns its result, and whether it tried to connect to a refused address. Raises what the
        function raises. Raises TimeoutError; the function then continues, and nobody gets its
        result.
        """
        _install_connection_audit_hook()
        async with asyncio.timeout(timeout):
            while self._finished is not None and not self._finished.done():
                await asyncio.wait({self._finished})
            finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            thread = _ConnectionGuardedThread(function, finished, self._name)
            thread.start()  # can fail; the next call must not wait for a thread that never started
            self._finished = finished
            await asyncio.shield(finished)
        return thread.result(), thread.is_address_refused


class _ConnectionGuardedThread(threading.Thread, Generic[T]):
    """A thread that the process does not wait for. `_check_connection` watches its connections."""

    def __init__(
        self, function: Callable[[], T], finished: asyncio.Future[None], name: str
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.is_address_refused = False
        self._function = function
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._outcome: T | Exception

    @override
    def run(self) -> None:
        try:
            self._outcome = self._function()
        except Exception as error:  # noqa: BLE001  # `result` raises it again
            self._outcome = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finished.set_result, None)

    def result(self) -> T:
        """Return what the function returned, or raise what it raised, after it has finished."""
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


@functools.cache
def _install_connection_audit_hook() -> None:
    """Check connections until the process ends: an audit hook cannot be removed (PEP 578)."""
    sys.addaudithook(_check_connection)


def _check_connection(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse the connections of guarded threads to metadata and host addresses.

    The interpreter calls an audit hook before it connects a socket, whichever library connects.
    """
    if event not in _CONNECTING_EVENTS:
        return
    thread, target = threading.current_thread(), arguments[1]
    if not isinstance(thread, _ConnectionGuardedThread) or not isinstance(target, tuple):
        return
    if any(is_refused(ip_address(address)) for address in _resolve_host(str(target[0]))):
        thread.is_address_refused = True
        raise AddressRefused


def _resolve_host(host: str) -> list[str]:
    """Return the addresses to which a socket would connect for a host."""
    try:
        ip_address(host)
    except ValueError:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    return [host]
