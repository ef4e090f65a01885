"""Reloads the configuration of a running relay: all of it, or nothing.

One reload runs after the other. `RunningRelay.change` takes a configuration over. The log and the
answer of the API list what differs (`find_key_changes`). If one of these keys needs a restart, the
new configuration is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from relay.api.state import KeyChange
from relay.clock import Clock
from relay.config import Config, LoadedConfig
from relay.config.document import line_of
from relay.errors import ConfigError, ReloadRefused, StoreUnavailable
from relay.roles.inner_half import RunningRelay
from relay.settings import Section

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Reloader:
    relay: RunningRelay
    loaded: LoadedConfig
    load: Callable[[], LoadedConfig]
    """Reads the configuration, in a thread. Raises ConfigError."""
    clock: Clock
    reporting: Callable[[], AbstractAsyncContextManager[None]]
    """Tells the service manager of each reload."""
    on_reload: Callable[[LoadedConfig], object] = lambda _: None
    """Called with each configuration that was taken over."""
    problem: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.loaded_at = self.clock.now()
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[dict[str, KeyChange]]] = set()
        self._has_ended = False

    async def reload(self, by: str) -> dict[str, KeyChange]:
        """Take over the configuration as it is now; return what has changed.

        ``by`` is who asked for it, for the log. Raises ReloadRefused with nothing changed. A caller
        who is cancelled does not stop the reload.
        """
        if self._has_ended:
            raise ReloadRefused("the relay is stopping", is_stopping=True)
        task = asyncio.create_task(self._reload(by), name="reload")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait
        return await asyncio.shield(task)

    async def cancel_all_reloads(self) -> None:
        """Begin no more reloads, and cancel those that run: the relay stops."""
        self._has_ended = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _reload(self, by: str) -> dict[str, KeyChange]:
        async with self._lock, self.reporting():
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
            self.on_reload(loaded)
            self.loaded, self.loaded_at, self.problem = loaded, self.clock.now(), None
            _log.info(
                "the configuration was reloaded (asked for by %s): %s",
                by,
                ", ".join(f"{key} {change}" for key, change in changes.items())
                or "nothing has changed",
            )
            return changes

    async def _change(self) -> tuple[LoadedConfig, dict[str, KeyChange]]:
        """Take over the configuration as it is now; return what differs. Raises ReloadRefused."""
        with _refusing("it could not be read"):
            loaded = await asyncio.to_thread(self.load)
        if loaded.is_empty and not self.loaded.is_empty:
            raise ReloadRefused(
                f"{loaded.file}: expected keys, the file is empty. Is it being written?"
            )
        changes = find_key_changes(self.loaded.config, loaded.config)
        keys = [key for key in changes if key_needs_restart(key)]
        if keys:
            named = ", ".join(place_of_key(key, loaded) for key in keys)
            raise ReloadRefused(
                f"restart required for: {named}. Nothing was changed", restart_keys=keys
            )
        with _refusing("its parts could not be made"):
            if changes:
                await self.relay.store.transact(lambda tx: tx.head())  # can it be written?
                await self.relay.change(loaded.config)
        return loaded, changes


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Raise ReloadRefused for any error. An installed sink and its settings can raise anything."""
    try:
        yield
    except (ConfigError, StoreUnavailable) as error:
        raise ReloadRefused(str(error)) from error
    except Exception as error:
        _log.exception("the new configuration cannot be used: %s", problem)
        text = f"{problem}: {type(error).__name__}; the log says more"
        raise ReloadRefused(text) from error


def place_of_key(key: str, loaded: LoadedConfig) -> str:
    """Return a key with its file and line: ``store.path (relay.yaml:7)``."""
    line = line_of(loaded.document, tuple(key.split(".")))
    return key if line is None else f"{key} ({loaded.file}:{line})"


RESTART_KEYS = (
    "scope",
    "relay",
    "fleet",
    "source.url",
    "source.api_version",
    "store.path",
    "api.listen",
    "api.socket",
)
"""The keys that a reload cannot change, with the keys inside them.

They say who this relay is, and where it is found. All others can change while the relay runs.
"""
_LIVE_KEYS = ("fleet.domains",)
"""The exceptions inside `RESTART_KEYS`."""


def find_key_changes(before: Config, after: Config) -> dict[str, KeyChange]:
    """Return the keys whose values differ. Entries of a list with names are keys: ``sinks.bus``."""
    return dict(_changes_of("", before, after))


def key_needs_restart(key: str) -> bool:
    return _is_under(key, RESTART_KEYS) and not _is_under(key, _LIVE_KEYS)


def _is_under(key: str, keys: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{outer}.") for outer in keys)


def _changes_of(key: str, before: Any, after: Any) -> Iterator[tuple[str, KeyChange]]:
    if before == after:
        return
    if isinstance(before, Section) and type(before) is type(after):
        for field in type(before).model_fields:
            path = f"{key}.{field}" if key else field
            yield from _changes_of(path, getattr(before, field), getattr(after, field))
    elif (old := _by_name(before)) is not None and (new := _by_name(after)) is not None:
        if old == new:
            yield key, "moved"
        for name in dict.fromkeys((*old, *new)):
            if name not in new:
                yield f"{key}.{name}", "removed"
            elif name not in old:
                yield f"{key}.{name}", "added"
            elif old[name] != new[name]:
                yield f"{key}.{name}", "changed"
    else:
        yield key, "changed"


def _by_name(value: Any) -> Mapping[str, Any] | None:
    """Return entries by their names; None if they have none."""
    if not isinstance(value, tuple):
        return value if isinstance(value, Mapping) else None
    named: dict[Any, Any] = {
        getattr(entry, "name", getattr(entry, "user", None)): entry for entry in value
    }
    return named if len(named) == len(value) and None not in named else None
