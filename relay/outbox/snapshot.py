"""The table of occurrences: the events as last seen.

The next document is compared with the live ones, also after a restart.
"""

from __future__ import annotations

import sqlite3
from datetime import datetime
from typing import Any

import orjson
from pydantic import TypeAdapter

from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_sortable
from relay.outbox import TrackedEvent
from relay.outbox.rows import PageLimit, read_as, take_page

_OCCURRENCE = TypeAdapter(TrackedEvent)


class Snapshot:
    """Reads and writes the table of occurrences, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def live(self) -> list[TrackedEvent]:
        """Return what the last recorded document held, in order of appearance."""
        return self._select("WHERE live ORDER BY id")

    def find(self, event_key: str) -> TrackedEvent | None:
        """Return the newest occurrence of an EventId (in lower case)."""
        return self._select_first("WHERE key = ? ORDER BY number DESC LIMIT 1", event_key)

    def find_at(self, event_key: str, moment: datetime) -> TrackedEvent | None:
        """Return the occurrence of an EventId (in lower case) at a moment."""
        occurrence = self._select_first(
            "WHERE key = ? AND first_seen <= ? ORDER BY number DESC LIMIT 1",
            event_key,
            format_sortable(moment),
        )
        if occurrence is None:  # the clock was set back since it was first seen
            return self._select_first("WHERE key = ? ORDER BY number LIMIT 1", event_key)
        return occurrence

    def find_next(self, occurrence: TrackedEvent) -> TrackedEvent | None:
        """Return the next occurrence of the same EventId."""
        return self._select_first(
            "WHERE key = ? AND number = ?", occurrence.key, occurrence.number + 1
        )

    def seen_together(self, occurrence: TrackedEvent) -> list[TrackedEvent]:
        """Return the events that first appeared in the same document, this one included."""
        return self._select("WHERE first_seen = ? ORDER BY id", occurrence.first_seen)

    def get(self, occurrence_id: int) -> TrackedEvent:
        """Return one occurrence. Raises KeyError if there is none."""
        occurrence = self._select_first("WHERE id = ?", occurrence_id)
        if occurrence is None:
            raise KeyError(occurrence_id)
        return occurrence

    def page(self, before: int | None, limit: PageLimit) -> tuple[list[TrackedEvent], bool]:
        """Return occurrences with an id less than ``before``, newest first.

        The second value says whether there are more.
        """
        rows = self._rows("WHERE id < coalesce(?, 9e18) ORDER BY id DESC", before)
        page, has_more = take_page(rows, lambda row: len(row["data"]), limit)
        return [_OCCURRENCE.validate_python(dict(row)) for row in page], has_more

    def add(
        self,
        key: str,
        data: dict[str, Any],
        boot_id: str | None,
        event: CloudEvent,
        at: datetime,
    ) -> None:
        """Add an EventId that appeared in the document. ``event`` is the event that reports it."""
        self._connection.execute(
            "INSERT INTO occurrence "
            "(key, number, data, revision, live, boot_id, first_seen, last_changed, told) VALUES "
            "(:key, 1 + (SELECT coalesce(max(number), 0) FROM occurrence WHERE key = :key), "
            ":data, :revision, 1, :boot_id, :at, :at, :event_id)",
            {
                "key": key,
                "data": orjson.dumps(data).decode(),
                "revision": data["revision"],
                "boot_id": boot_id,
                "at": format_sortable(at),
                "event_id": event.id,
            },
        )

    def update(self, key: str, data: dict[str, Any], event: CloudEvent, at: datetime) -> None:
        """Store the new state of a live event."""
        self._connection.execute(
            "UPDATE occurrence SET data = ?, revision = ?, last_changed = ?, told = ? "
            "WHERE key = ? AND live",
            (orjson.dumps(data).decode(), data["revision"], format_sortable(at), event.id, key),
        )

    def mark_ended(self, key: str, outcome: str, event: CloudEvent, at: datetime) -> None:
        """Store that a live event left the document."""
        self._connection.execute(
            "UPDATE occurrence SET live = 0, outcome = ?, last_changed = ?, told = ? "
            "WHERE key = ? AND live",
            (outcome, format_sortable(at), event.id, key),
        )

    def set_boot_id(self, occurrence_id: int, boot_id: str | None) -> None:
        """Store the boot id with which later ones are compared."""
        self._connection.execute(
            "UPDATE occurrence SET boot_id = ? WHERE id = ?", (boot_id, occurrence_id)
        )

    def prune(self, before: datetime) -> None:
        """Delete the occurrences that ended before a moment, with their decisions and grants.

        Prune the journal first: an occurrence is kept while the journal holds a hold on it.
        Otherwise the hold would be in force without its row when the EventId comes back.
        """
        old = (
            "(SELECT id FROM occurrence WHERE NOT live AND last_changed < ? AND id NOT IN "
            "(SELECT occurrence FROM decision WHERE counts AND decision = 'hold' "
            "AND position > coalesce((SELECT position FROM checkpoint), 0)))"
        )
        values = (format_sortable(before),)
        self._connection.execute(f"DELETE FROM decision WHERE occurrence IN {old}", values)  # noqa: S608  # our own text
        self._connection.execute(f"DELETE FROM start_request WHERE occurrence IN {old}", values)  # noqa: S608  # our own text
        self._connection.execute(f"DELETE FROM occurrence WHERE id IN {old}", values)  # noqa: S608  # our own text

    def _select_first(self, where: str, *values: object) -> TrackedEvent | None:
        return next(iter(self._select(where, *values)), None)

    def _select(self, where: str, *values: object) -> list[TrackedEvent]:
        return list(read_as(_OCCURRENCE, self._rows(where, *values)))

    def _rows(self, where: str, *values: object) -> sqlite3.Cursor:
        rows = self._connection.execute(
            "SELECT id, key, number, data, revision, live, boot_id, "  # noqa: S608  # our own text
            f"first_seen, last_changed, outcome, told AS last_event_id FROM occurrence {where}",
            values,
        )
        rows.row_factory = sqlite3.Row
        return rows
