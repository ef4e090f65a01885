"""Waits for what must happen. No test sleeps to guess."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")


@overload
async def eventually(
    read: Callable[..., Awaitable[T]],
    holds: Callable[[T], object] = bool,
    *,
    within: float = 60.0,
    every: float = 0.02,
    what: str = "",
) -> T: ...
@overload
async def eventually(
    read: Callable[..., T],
    holds: Callable[[T], object] = bool,
    *,
    within: float = 60.0,
    every: float = 0.02,
    what: str = "",
) -> T: ...
async def eventually(
    read: Callable[..., Any],
    holds: Callable[[Any], object] = bool,
    *,
    within: float = 60.0,
    every: float = 0.02,
    what: str = "",
) -> Any:
    """Read until ``holds`` accepts what was read, and return that.

    ``within`` and ``every`` are in seconds. Raises TimeoutError with ``what`` if it takes longer.
    """
    found: object = None
    try:
        async with asyncio.timeout(within):
            while True:
                result = read()
                found = await result if inspect.isawaitable(result) else result
                if holds(found):
                    return found
                await asyncio.sleep(every)
    except TimeoutError:
        raise TimeoutError(f"waited {within:g} s for {what or read}, last read: {found}") from None
