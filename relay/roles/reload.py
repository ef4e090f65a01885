"""Reloads the configuration of a running relay: all of it, or nothing.

One reload runs after the other. `RunningRelay.change` takes a configuration over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from relay.clock import Clock
from relay.config import LoadedConfig
from relay.config.changes import KeyChange, find_key_changes, key_needs_restart
from relay.errors import ConfigError, ReloadRefused, StoreUnavailable
from relay.roles.inner_half import RunningRelay

_log = logging.getLogger(__name__)


class Reloader:
    def __init__(
        self,
        relay: RunningRelay,
        loaded: LoadedConfig,
        load: Callable[[], LoadedConfig],
        clock: Clock,
        reporting: Callable[[], AbstractAsyncContextManager[None]],
        on_reload: Callable[[LoadedConfig], object] = lambda _: None,
    ) -> None:
        """``load`` reads the configuration. It runs in a thread, and raises ConfigError.

        ``reporting`` tells the service manager of each reload, and ``on_reload`` is called with
        each configuration that was taken over.
        """
        self.problem: str | None = None
        self.loaded_at = clock.now()
        self._relay = relay
        self._loaded = loaded
        self._load = load
        self._clock = clock
        self._reporting = reporting
        self._on_reload = on_reload
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[list[KeyChange]]] = set()
        self._has_ended = False

    async def reload(self, by: str) -> list[KeyChange]:
        """Take over the configuration as it is now; return what has changed.

        ``by`` is who asked for it, for the log. Raises ReloadRefused with nothing changed. A caller
        who is cancelled does not stop the reload.
        """
        if self._has_ended:
            raise ReloadRefused("the relay is stopping", is_stopping=True)
        task = asyncio.create_task(self._reload(by), name="reload")
        self._tasks.add(task)
        task.add_done_callback(self._discard_task)
        return await asyncio.shield(task)

    async def cancel_all_reloads(self) -> None:
        """Begin no more reloads, and cancel those that run: the relay stops."""
        self._has_ended = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _discard_task(self, task: asyncio.Task[list[KeyChange]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    async def _reload(self, by: str) -> list[KeyChange]:
        async with self._lock, self._reporting():
            try:
                loaded, changes = await self._change()
            except ReloadRefused as error:
                self.problem = error.reason
                _log.error(
                    "the configuration was not reloaded (asked for by %s), the earlier one stays "
                    "in force: %s",
                    by,
                    "; ".join(error.reason.splitlines()),
                )
                raise
            self._on_reload(loaded)
            self._loaded, self.loaded_at, self.problem = loaded, self._clock.now(), None
            _log.info(
                "the configuration was reloaded (asked for by %s): %s",
                by,
                ", ".join(f"{change.key} {change.kind}" for change in changes)
                or "nothing has changed",
            )
            return changes

    async def _read(self) -> LoadedConfig:
        """Return it. Raises ReloadRefused."""
        try:
            return await asyncio.to_thread(self._load)
        except ConfigError as error:
            raise ReloadRefused(str(error)) from error
        except Exception as error:
            # The settings of an installed sink can raise anything.
            _log.exception("the configuration could not be read")
            raise ReloadRefused(
                f"it could not be read: {type(error).__name__}; the log says more"
            ) from error

    async def _change(self) -> tuple[LoadedConfig, list[KeyChange]]:
        """Take over the configuration as it is now; return what differs. Raises ReloadRefused."""
        loaded = await self._read()
        if loaded.is_empty and not self._loaded.is_empty:
            raise ReloadRefused(
                f"{loaded.file}: expected keys, the file is empty. Is it being written?"
            )
        changes = find_key_changes(self._loaded.config, loaded.config)
        keys = [change.key for change in changes if key_needs_restart(change.key)]
        if keys:
            named = ", ".join(_place_of_key(key, loaded) for key in keys)
            raise ReloadRefused(
                f"restart required for: {named}. Nothing was changed", restart_keys=keys
            )
        try:
            if changes:
                await self._relay.store.transact(lambda tx: tx.head())  # can it be written?
                await self._relay.change(loaded.config)
        except (ConfigError, StoreUnavailable) as error:
            raise ReloadRefused(str(error)) from error
        except Exception as error:
            # A sink can raise anything, an installed one too.
            _log.exception("the parts for the new configuration could not be made")
            raise ReloadRefused(
                f"its parts could not be made: {type(error).__name__}; the log says more"
            ) from error
        return loaded, changes


def _place_of_key(key: str, loaded: LoadedConfig) -> str:
    """Return a key with its file and line: ``store.path (relay.yaml:7)``."""
    lines = [line for outer, line in loaded.lines.items() if f"{key}.".startswith(f"{outer}.")]
    return f"{key} ({loaded.file}:{lines[0]})" if lines else key
