"""The composition root: starts a relay in its role, waits for the signal to stop, and stops it.

`relay.roles` has a module for each role.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from relay.clock import Clock, SystemClock
from relay.config import Config
from relay.fleet.settings import AgentSettings, HubSettings
from relay.imds.discovery import read_boot_id
from relay.roles import RunningRelay
from relay.service_manager import report_to_service_manager

__all__ = ["RunningRelay", "run", "start_relay"]

STOP_TIMEOUT = 9.0
"""When a stop is forced. A service manager waits ten seconds."""
_log = logging.getLogger(__name__)


async def run(config: Config, *, clock: Clock | None = None) -> None:
    """Run until SIGINT or SIGTERM; then drain, and return within ten seconds.

    Raises ConfigError or StoreError if the relay cannot start. Raises an ExceptionGroup if a part
    of a running relay fails: the other parts end with it, because half a relay would be trusted
    and do nothing.
    """
    stop = asyncio.Event()
    is_up = asyncio.Event()

    async def run_until_stopped() -> None:
        async with (
            report_to_service_manager(is_up, stop),
            start_relay(config, clock or SystemClock()),
        ):
            # What the start made stays. With it, a full collection would take 25 ms each time.
            gc.collect()
            gc.freeze()
            # A burst makes many objects that live until they are delivered. The default, 700, looks
            # at them again and again, which is 5 % of a delivery's CPU time.
            gc.set_threshold(10_000)
            is_up.set()
            await stop.wait()
            _log.info("stopping: the relay sends what it can, the store keeps the rest")

    _call_on_stop_signals(stop.set)
    relay = asyncio.create_task(run_until_stopped(), name="relay")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({relay, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not is_up.is_set():
        relay.cancel()  # it may still wait for the metadata service
    _, unfinished = await asyncio.wait({relay}, timeout=STOP_TIMEOUT)
    if unfinished:
        _log.error(
            "the relay did not stop within %g s and is stopped by force; the store keeps "
            "everything that waits",
            STOP_TIMEOUT,
        )
    elif not relay.cancelled():
        relay.result()


def start_relay(
    config: Config, clock: Clock, *, boot: Callable[[], str | None] = read_boot_id
) -> AbstractAsyncContextManager[RunningRelay]:
    """Return the context of a relay in its role: it starts, and is drained in the end.

    ``boot`` returns the machine's boot id. Only the role that runs is imported: a plain relay saves
    the memory of the AMQP libraries.
    """
    match config.fleet:
        case AgentSettings():
            from relay.roles import agent  # noqa: PLC0415

            return agent.start(config, config.fleet, clock, boot)
        case HubSettings():
            from relay.roles import hub  # noqa: PLC0415

            return hub.start(config, config.fleet, clock)
    from relay.roles import plain  # noqa: PLC0415

    return plain.start(config, clock, boot)


def _call_on_stop_signals(stop: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:
            # Windows has only signal.signal, whose handlers must not touch the loop directly.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
