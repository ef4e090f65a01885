"""Bounds how many large answers are built or sent at once, so that slow readers hold few of them.

Each answer is a page of bounded size. A problem is small, so it holds no slot while it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from relay.api.schema.responses import Problem


class AnswerSlots:
    """Slots for large answers. A caller who has none left waits for one of its own."""

    def __init__(self, total: int, per_caller: int, patience: float) -> None:
        """``patience``: the seconds that a call waits for a slot."""
        self._free = asyncio.Semaphore(total)
        self._per_caller = per_caller
        self._patience = patience
        self._by_caller: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def slot(self, caller: str) -> AsyncIterator[None]:
        """Hold a slot while the context lasts. Raises Problem 429 if none becomes free in time."""
        own = self._by_caller.get(caller)
        if own is None:
            own = self._by_caller[caller] = asyncio.Semaphore(self._per_caller)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._patience):
                    await stack.enter_async_context(own)
                    await stack.enter_async_context(self._free)
            except TimeoutError:
                raise Problem(
                    429,
                    "too many answers are being read at once; read them faster, or one by one",
                    headers={"Retry-After": "1"},
                ) from None
            yield
