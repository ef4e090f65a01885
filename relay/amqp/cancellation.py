"""Whether somebody wants a task to end: the libraries cancel whom nobody cancelled, and swallow cancellations that somebody meant."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether somebody cancelled this task.

    When its watchdog fires, aiormq makes everybody who waits on the connection raise CancelledError, cancelled or not.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise the cancellation again that was lost on the way, before anything is waited for that may never come.

    Up to Python 3.11 `asyncio.wait_for`, which aiormq waits with, drops one that comes in the same turn as its result.
    """
    if is_cancelled():
        raise asyncio.CancelledError
