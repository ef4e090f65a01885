"""Lets a command run until SIGINT or SIGTERM, which are its normal end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def run_until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Run until the work ends, or until SIGINT or SIGTERM. Return whether a signal came.

    Process 1 of a container ignores a signal without a handler.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, task.cancel)
        except NotImplementedError:
            # Windows has only signal.signal, whose handlers must not touch the loop directly.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(task.cancel))
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return task.cancelled()
