"""Runs what blocks in threads of its own: late ones are left to themselves, and none connects where no sink may.

Not in the loop's own pool: a few threads that hang there would keep every sink from looking up a name, and a pool is waited
for at the end.
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


class SerialThread(Generic[T]):
    """Does one piece of blocking work at a time; one that is late keeps the next waiting, so threads do not pile up."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._done: asyncio.Future[None] | None = None

    async def run(self, work: Callable[[], T], seconds: float) -> tuple[T, bool]:
        """Do it within so many seconds, those included that an earlier piece of work is late.

        Returns what it returns, and whether it tried an address that no sink may reach. Raises what it raises, and
        TimeoutError: the work then goes on unheard.
        """
        _guard_threads()
        async with asyncio.timeout(seconds):
            while self._done is not None and not self._done.done():
                await asyncio.wait({self._done})
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            thread = _Thread(work, done, self._name)
            thread.start()  # a machine can be out of threads: nobody is to wait for one that never began
            self._done = done
            await asyncio.shield(done)
        return thread.outcome(), thread.refused


class _Thread(threading.Thread, Generic[T]):
    """A thread that the process does not wait for, and whose connections are watched."""

    def __init__(self, work: Callable[[], T], done: asyncio.Future[None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.refused = False
        self._work = work
        self._done, self._loop = done, asyncio.get_running_loop()
        self._outcome: Callable[[], T]

    @override
    def run(self) -> None:
        try:
            result = self._work()
        except Exception as error:  # noqa: BLE001  # raised again where somebody waits for it
            self._outcome = functools.partial(_raise, error)
        else:
            self._outcome = lambda: result
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._done.set_result, None)

    def outcome(self) -> T:
        """What came of the work, once it is done."""
        return self._outcome()


def _raise(error: Exception) -> Any:
    raise error


@functools.cache
def _guard_threads() -> None:
    """From now on no such thread connects to a refused address, whichever library dials.

    An audit hook sees every connection of the interpreter before it is made (PEP 578), and can refuse it. It cannot be taken
    away again, so it looks at these threads alone.
    """
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        return
    thread, target = threading.current_thread(), arguments[1]
    if (
        isinstance(thread, _Thread)
        and isinstance(target, tuple)
        and any(map(_is_refused, _addresses(str(target[0]))))
    ):
        thread.refused = True
        raise AddressRefused


def _addresses(host: str) -> list[str]:
    """The addresses that are dialled for a host; of a name, those that connecting would look up, unseen."""
    try:
        ip_address(host)
    except ValueError:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None)]
    return [host]


def _is_refused(address: str) -> bool:
    return is_refused(ip_address(address))
