"""Runs what a real relay runs beside its requests, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Self


class BackgroundTasks:
    """Runs coroutines while the context is entered. Raises the error of one that has failed."""

    def __init__(self, *work: Awaitable[None]) -> None:
        self._tasks = [asyncio.ensure_future(coroutine) for coroutine in work]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        done, _ = await asyncio.wait(self._tasks)
        for task in done:
            if not task.cancelled():
                task.result()
