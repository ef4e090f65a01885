"""Tells in the log what the relay recorded: one line for each event, once, after the commit.

A replay after a restart records nothing, so it tells nothing again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from itertools import islice

from relay.events.cloudevent import CloudEvent
from relay.log_fields import log_extra
from relay.store import RecordedEvent
from relay.store.sqlite import Store
from relay.telemetry.lines import log_line_of_event

LINES_PER_TURN = 32
"""Lines that are written in one turn of the event loop. A burst leaves others their turn."""
_log = logging.getLogger("relay.story")


class RecordedEventLogger:
    """Writes the line of each event that the store recorded: `schedule_log_lines` listens to it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._store: Store | None = None
        self._untold: deque[RecordedEvent] = deque()
        self._is_due = False  # a turn is scheduled, or events are being read

    def subscribe_to_store(self, store: Store) -> None:
        """Tell what this store records from now on."""
        self._store = store
        store.listeners.recorded.append(self.schedule_log_lines)

    def schedule_log_lines(self, events: Sequence[RecordedEvent]) -> None:
        """Write the lines of these events soon. Those that were recorded earlier are not new."""
        self._untold.extend(events)
        self._schedule_write()

    def write_remaining_lines(self) -> None:
        """Write what is left. The store is closed, so events that are not in memory are short."""
        while self._untold:
            recorded = self._untold.popleft()
            self._write(recorded, recorded.event)

    def _schedule_write(self) -> None:
        if self._untold and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._write_next_lines)

    def _write_next_lines(self) -> None:
        self._is_due = False
        for _ in range(min(LINES_PER_TURN, len(self._untold))):
            if self._untold[0].event is None:
                self._read_events_not_in_memory()
                return
            recorded = self._untold.popleft()
            self._write(recorded, recorded.event)
        self._schedule_write()

    def _read_events_not_in_memory(self) -> None:
        """Read events that are not in memory, as many as are told in one turn."""
        if self._store is None:
            return
        self._is_due = True
        batch = list(islice(self._untold, LINES_PER_TURN))
        positions = [recorded.position for recorded in batch if recorded.event is None]
        reading = self._store.submit_read(lambda tx: tx.journal.bodies_at_positions(positions))
        reading.add_done_callback(lambda done: self._write_lines_after_journal_read(batch, done))

    def _write_lines_after_journal_read(
        self, batch: Sequence[RecordedEvent], reading: asyncio.Future[dict[int, bytes]]
    ) -> None:
        bodies = {} if reading.cancelled() or reading.exception() else reading.result()
        for recorded in batch:
            if not self._untold or self._untold[0] is not recorded:
                break  # `write_remaining_lines` was faster
            self._untold.popleft()
            body = bodies.get(recorded.position)
            event = recorded.event or (CloudEvent.parse(body) if body is not None else None)
            self._write(recorded, event)
        self._is_due = False
        self._schedule_write()

    def _write(self, recorded: RecordedEvent, event: CloudEvent | None) -> None:
        try:
            if event is None:
                _log_event_with_unreadable_body(recorded)
                return
            log_cloud_event(event, recorded.position)
        except Exception:  # noqa: BLE001  # a line that cannot be made must not end the relay
            _log.exception("internal error: the line of %s cannot be made", recorded.name)


def log_cloud_event(event: CloudEvent, position: int | None) -> None:
    """Write the line of an event. It has no position if it could not be recorded."""
    line = log_line_of_event(event, position)
    if _log.isEnabledFor(line.level):
        _log.log(line.level, "%s", line.message, extra={"fields": line.fields})


def _log_event_with_unreadable_body(recorded: RecordedEvent) -> None:
    fields = log_extra(type=recorded.name, id=recorded.id, position=recorded.position)
    _log.info("%s of %s was recorded", recorded.name, recorded.event_key, extra=fields)
