"""What signals of the operating system do: SIGINT and SIGTERM stop, SIGHUP reloads.

`run_until_stopped` is for commands whose normal end is a signal. `relay.app` uses the others, one
by one, because it stops in steps and reloads. Windows has no SIGHUP, and its event loop has no
signal handlers.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


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
