"""Tells a real cancellation of a task from one that aiormq raises or swallows."""

from __future__ import annotations

import asyncio


def is_current_task_cancelled_by_caller() -> bool:
    """Return whether a caller cancelled the current task.

    When its heartbeat watchdog fires, aiormq raises CancelledError in every task that waits for
    the connection, though nobody cancelled them.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise CancelledError if a caller cancelled the current task.

    Call it before a wait that may never end. aiormq waits with `asyncio.wait_for`, which up to
    Python 3.11 drops a cancellation that arrives in the same turn of the loop as the result.
    """
    if is_current_task_cancelled_by_caller():
        raise asyncio.CancelledError
