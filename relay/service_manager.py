"""Tells the service manager (systemd) when the relay runs, reloads, is alive, and stops.

The service manager names a datagram socket in NOTIFY_SOCKET and the time of its watchdog in
WATCHDOG_USEC. Without NOTIFY_SOCKET nothing is sent. Why this is our own code:
docs/decisions.md#libraries-and-where-there-is-none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from relay.log_once import LogOnce

START_PATIENCE = 10.0
"""When a relay that still starts is reported as started, so that it does not hold up the boot."""
_PINGS_PER_WATCHDOG = 4
"""A ping may be late by three quarters of the watchdog's time."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Where the service manager listens, and how often it wants to hear from this process."""

    address: str
    """A path, or a name in the abstract namespace that begins with a zero character."""
    watchdog: float | None
    """Seconds after which a silent process is killed; None: never."""
    log: LogOnce = field(default_factory=lambda: LogOnce(_log))

    async def tell(self, *assignments: str) -> None:
        """Send a message such as READY=1. Waits while the socket of the service manager is full."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
                connection.settimeout(0)  # the loop waits, not the socket
                connection.connect(self.address)
                message = "\n".join(assignments).encode()
                await asyncio.get_running_loop().sock_sendall(connection, message)
        except OSError as error:
            self.log.log_if_changed(
                logging.WARNING,
                "the service manager cannot be told %s: %s",
                assignments[0],
                error.strerror or error,
            )

    async def tell_states(
        self, is_up: asyncio.Event, stop: asyncio.Event, start_patience: float
    ) -> None:
        """Tell of the start and of the stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(start_patience):
                await is_up.wait()
        if not is_up.is_set():
            await self.tell("READY=1", "STATUS=Starting. The log says what the relay waits for.")
            await is_up.wait()
        await self.tell("READY=1", "STATUS=Running")
        await stop.wait()
        await self.tell("STOPPING=1", "STATUS=Sending what can be sent")

    async def send_pings(self) -> None:
        """Send signs of life, if they are wanted."""
        while self.watchdog is not None:
            await self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog / _PINGS_PER_WATCHDOG)


def find_service_manager(environment: Mapping[str, str]) -> ServiceManager | None:
    """Return the service manager that the environment names, or None."""
    name = environment.get("NOTIFY_SOCKET", "")
    if not name:
        return None
    text = environment.get("WATCHDOG_USEC", "")
    watchdog = int(text) / 1e6 if text.isascii() and text.isdecimal() and int(text) else None
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        watchdog = None  # it is meant for the process that started this one
    return ServiceManager(f"\0{name[1:]}" if name[0] == "@" else name, watchdog)


@asynccontextmanager
async def report_to_service_manager(
    is_up: asyncio.Event,
    stop: asyncio.Event,
    *,
    environment: Mapping[str, str] = os.environ,
    start_patience: float = START_PATIENCE,
) -> AsyncIterator[None]:
    """Report the start, the stop and each sign of life of this event loop while the body runs."""
    manager = find_service_manager(environment)
    if manager is None:
        yield
        return
    coroutines = (manager.tell_states(is_up, stop, start_patience), manager.send_pings())
    tasks = [asyncio.create_task(each, name="service manager") for each in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def report_reload() -> AsyncIterator[None]:
    """Report that the relay reloads its configuration while the body runs, and then that it runs.

    The time tells the service manager that this is the reload it asked for, and no earlier one.
    """
    manager = find_service_manager(os.environ)
    if manager is None:
        yield
        return
    microseconds = time.monotonic_ns() // 1000  # on Linux that of CLOCK_MONOTONIC
    await manager.tell("RELOADING=1", f"MONOTONIC_USEC={microseconds}", "STATUS=Reloading")
    status = "Running"
    try:
        yield
    except BaseException:
        status = "Running with an earlier configuration. The log says why."
        raise
    finally:
        await manager.tell("READY=1", f"STATUS={status}")
