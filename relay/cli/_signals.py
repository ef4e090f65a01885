"""Programs that run until somebody stops them: SIGINT and SIGTERM are their normal end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Run until it ends, or until Ctrl-C or SIGTERM, which also process 1 of a container obeys then. True: it was stopped."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, task.cancel)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return task.cancelled()
