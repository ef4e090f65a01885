"""The process and its system: signals stop and reload it, and systemd hears how it is.

The service manager names a datagram socket in NOTIFY_SOCKET and the time of its watchdog in
WATCHDOG_USEC. Without NOTIFY_SOCKET nothing is sent. Why this is our own code:
docs/decisions.md#libraries-and-where-there-is-none.

SIGINT and SIGTERM stop, SIGHUP reloads. `run_until_stopped` is for commands whose normal end is a
signal. `relay.app` uses the others one by one, because it stops in steps and reloads. Windows has
no SIGHUP, and its event loop has no signal handlers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from relay.logs import LogOnce

START_PATIENCE = 10.0
"""When a relay that still starts is reported as started, so that it does not hold up the boot."""
_log = LogOnce(logging.getLogger(__name__))


async def _tell(*assignments: str) -> None:
    """Send a message such as READY=1. Waits while the socket of the service manager is full."""
    name = os.environ.get("NOTIFY_SOCKET", "")
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


@asynccontextmanager
async def report_to_service_manager(
    is_up: asyncio.Event, stop: asyncio.Event
) -> AsyncIterator[None]:
    """Report the start, the stop and each sign of life of this event loop while the body runs."""

    async def tell_states() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(START_PATIENCE):
                await is_up.wait()
        if not is_up.is_set():
            waits = "STATUS=Starting. The log says what the relay waits for."
            await _tell("READY=1", waits)
            await is_up.wait()
        await _tell("READY=1", "STATUS=Running")
        await stop.wait()
        await _tell("STOPPING=1", "STATUS=Sending what can be sent")

    async def send_pings() -> None:
        text = os.environ.get("WATCHDOG_USEC", "")
        if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            text = ""  # it is meant for the process that started this one
        seconds = int(text) / 1e6 if text.isascii() and text.isdecimal() else 0.0
        while seconds:  # without a sign of life for so long, the process is killed
            await _tell("WATCHDOG=1")
            await asyncio.sleep(seconds / 4)  # a ping may be late by three quarters of that

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


async def run_until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Run until the work ends, or until SIGINT or SIGTERM. Return whether a signal came."""
    task = asyncio.ensure_future(work)
    call_on_stop_signals(task.cancel)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return task.cancelled()


def call_on_stop_signals(stop: Callable[[], object]) -> None:
    """Call it on SIGINT and SIGTERM: process 1 of a container ignores those without handler."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:
            # Windows has only signal.signal, whose handlers must not touch the loop directly.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))


def block_sighup() -> None:
    """Let SIGHUP wait until `handle_sighup`: its default would end the process."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def handle_sighup(reload: Callable[[], object]) -> None:
    """Call a function in the running event loop on SIGHUP, also on one that was blocked before."""
    if sys.platform == "win32":
        return
    with suppress(NotImplementedError):  # an event loop without signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
