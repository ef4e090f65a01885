"""The open event streams: wakes them when an event is recorded, and ends them with the relay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from relay.outbox import RecordedEvent
from relay.outbox.sqlite import Store


class OpenStreams:
    """The wake-up events of all open streams."""

    def __init__(self) -> None:
        self._wakeups: set[asyncio.Event] = set()
        self._store: Store | None = None

    def __len__(self) -> int:
        return len(self._wakeups)

    @property
    def is_attached(self) -> bool:
        """Whether the relay runs. Streams end when it stops."""
        return self._store is not None

    def attach(self, store: Store) -> None:
        """Wake the streams whenever this store records events."""
        self._store = store
        store.listeners.recorded.append(self._on_recorded)

    def detach(self) -> None:
        """End every stream."""
        if self._store is not None:
            self._store.listeners.recorded.remove(self._on_recorded)
        self._store = None
        self._wake_all()

    @contextmanager
    def register(self, wakeup: asyncio.Event) -> Iterator[None]:
        """Set this event, while the context is entered, whenever a stream must look for news."""
        self._wakeups.add(wakeup)
        try:
            yield
        finally:
            self._wakeups.remove(wakeup)

    def _on_recorded(self, _recorded: Sequence[RecordedEvent]) -> None:
        self._wake_all()

    def _wake_all(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()
