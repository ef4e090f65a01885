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

from relay.log_once import LogOnce

START_PATIENCE = 10.0
"""When a relay that still starts is reported as started, so that it does not hold up the boot."""
_PINGS_PER_WATCHDOG = 4
"""A ping may be late by three quarters of the watchdog's time."""
_log = LogOnce(logging.getLogger(__name__))


async def _tell(*assignments: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send a message such as READY=1. Waits while the socket of the service manager is full."""
    name = environment.get("NOTIFY_SOCKET", "")
    if not name:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.settimeout(0)  # the loop waits, not the socket
            # A path, or a name in the abstract namespace, which begins with a zero character.
            connection.connect(f"\0{name[1:]}" if name[0] == "@" else name)
            message = "\n".join(assignments).encode()
            await asyncio.get_running_loop().sock_sendall(connection, message)
    except OSError as error:
        _log.log_if_changed(
            logging.WARNING,
            "the service manager cannot be told %s: %s",
            assignments[0],
            error.strerror or error,
        )


def _watchdog(environment: Mapping[str, str]) -> float | None:
    """Return the seconds after which a silent process is killed; None: never."""
    text = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # it is meant for the process that started this one
    return int(text) / 1e6 if text.isascii() and text.isdecimal() and int(text) else None


@asynccontextmanager
async def report_to_service_manager(
    is_up: asyncio.Event,
    stop: asyncio.Event,
    *,
    environment: Mapping[str, str] = os.environ,
    start_patience: float = START_PATIENCE,
) -> AsyncIterator[None]:
    """Report the start, the stop and each sign of life of this event loop while the body runs."""
    if not environment.get("NOTIFY_SOCKET"):
        yield
        return

    async def tell_states() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(start_patience):
                await is_up.wait()
        if not is_up.is_set():
            waits = "STATUS=Starting. The log says what the relay waits for."
            await _tell("READY=1", waits, environment=environment)
            await is_up.wait()
        await _tell("READY=1", "STATUS=Running", environment=environment)
        await stop.wait()
        await _tell("STOPPING=1", "STATUS=Sending what can be sent", environment=environment)

    async def send_pings() -> None:
        while watchdog is not None:
            await _tell("WATCHDOG=1", environment=environment)
            await asyncio.sleep(watchdog / _PINGS_PER_WATCHDOG)

    watchdog = _watchdog(environment)
    tasks = [asyncio.create_task(each, name="systemd") for each in (tell_states(), send_pings())]
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
    microseconds = time.monotonic_ns() // 1000  # on Linux that of CLOCK_MONOTONIC
    await _tell("RELOADING=1", f"MONOTONIC_USEC={microseconds}", "STATUS=Reloading")
    status = "Running"
    try:
        yield
    except BaseException:
        status = "Running with an earlier configuration. The log says why."
        raise
    finally:
        await _tell("READY=1", f"STATUS={status}")
