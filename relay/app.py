"""The composition root: starts a relay in its role, reloads it on SIGHUP, and stops it on a signal.

`run` is for ``imds-relay run``. `start_relay` is for whoever stops the relay itself, such as the
demo. Each role (a plain relay, an agent of a fleet, its hub) has a module in `relay.roles` that
assembles its parts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress

from relay.clock import Clock, SystemClock
from relay.config import Config, LoadedConfig
from relay.config.model import start_warnings
from relay.errors import ReloadRefused
from relay.fleet.settings import AgentSettings, HubSettings
from relay.process import (
    call_on_stop_signals,
    handle_sighup,
    report_reload,
    report_to_service_manager,
)
from relay.roles.inner_half import RunningRelay
from relay.roles.reload import Reloader

__all__ = ["RunningRelay", "run", "start_relay"]

MAX_THREADS = 64
STOP_TIMEOUT = 9.0
"""Seconds after which a stop is forced: before the service manager kills, which waits ten."""
_log = logging.getLogger(__name__)


async def run(
    loaded: LoadedConfig,
    load: Callable[[], LoadedConfig],
    *,
    on_reload: Callable[[LoadedConfig], object] = lambda _: None,
) -> None:
    """Run until SIGINT or SIGTERM; then drain, and return within ten seconds.

    SIGHUP calls ``load``, takes over what it returns, and calls ``on_reload`` with that. One that
    comes during the start waits for its end: the file may have changed after it was read.

    Raises ConfigError or StoreError if the relay cannot start. Raises an ExceptionGroup if a part
    of a running relay fails: the other parts end with it, because running a relay would be trusted
    and do nothing.
    """
    # Name look-ups that hang hold threads for long. Nothing else may wait for them.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS))
    stop = asyncio.Event()
    is_up = asyncio.Event()
    hangup = asyncio.Event()
    clock = SystemClock()

    async def run_in_role() -> None:
        async with (
            report_to_service_manager(is_up, stop),
            start_relay(loaded.config, clock) as running,
        ):
            reloader = Reloader(running, loaded, load, clock, report_reload, on_reload)
            running.server.state.reloader = reloader  # the API reloads with it
            # What the start made stays. With it, a full collection would take 25 ms each time.
            gc.collect()
            gc.freeze()
            # A burst makes many objects that live until they are delivered. The default, 700, looks
            # at them again and again, which is 5 % of a delivery's CPU time.
            gc.set_threshold(10_000)
            is_up.set()
            reloads = asyncio.create_task(_reload_on_each_hangup(hangup, reloader), name="reloads")
            try:
                await stop.wait()
            finally:
                reloads.cancel()
                await reloader.cancel_all_reloads()
            _log.info("stopping: the relay sends what it can, the store keeps the rest")

    call_on_stop_signals(stop.set)
    handle_sighup(hangup.set)
    relay = asyncio.create_task(run_in_role(), name="relay")
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


def start_relay(config: Config, clock: Clock) -> AbstractAsyncContextManager[RunningRelay]:
    """Return the context of a relay in its role: it starts, and is drained in the end.

    Only the role that runs is imported: a plain relay saves the memory of the AMQP libraries.
    """
    for warning in start_warnings(config):
        _log.warning("%s", warning)
    match config.fleet:
        case AgentSettings():
            from relay.roles import agent  # noqa: PLC0415

            return agent.start(config, config.fleet, clock)
        case HubSettings():
            from relay.roles import hub  # noqa: PLC0415

            return hub.start(config, config.fleet, clock)
    from relay.roles import plain  # noqa: PLC0415

    return plain.start(config, clock)


async def _reload_on_each_hangup(hangup: asyncio.Event, reloader: Reloader) -> None:
    """Reload on each hangup. Several that come during a reload are one."""
    while True:
        await hangup.wait()
        hangup.clear()
        with suppress(ReloadRefused):  # it is logged
            await reloader.reload("SIGHUP")
