"""The events as last seen: what the next document is compared with, also after a restart."""

from __future__ import annotations

import sqlite3
from datetime import datetime
from typing import Any

import orjson

from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_sortable
from relay.outbox import Occurrence

_COLUMNS = "id, key, number, data, revision, live, boot_id, first_seen, last_changed, outcome, told"


class Snapshot:
    """The table of occurrences, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def live(self) -> list[Occurrence]:
        """What the document held when it was last recorded, in order of appearance."""
        return self._all("WHERE live ORDER BY id")

    def find(self, event_key: str) -> Occurrence | None:
        """The newest occurrence of an EventId (in lower case)."""
        found = self._all("WHERE key = ? ORDER BY number DESC LIMIT 1", event_key)
        return found[0] if found else None

    def find_at(self, event_key: str, moment: datetime) -> Occurrence | None:
        """The occurrence of an EventId (in lower case) that something said at that moment is about."""
        found = self._all(
            "WHERE key = ? AND first_seen <= ? ORDER BY number DESC LIMIT 1",
            event_key,
            format_sortable(moment),
        )
        if not found:  # the clock was set back since it was first seen
            found = self._all("WHERE key = ? ORDER BY number LIMIT 1", event_key)
        return found[0] if found else None

    def find_next(self, occurrence: Occurrence) -> Occurrence | None:
        """The next occurrence of the same EventId."""
        found = self._all("WHERE key = ? AND number = ?", occurrence.key, occurrence.number + 1)
        return found[0] if found else None

    def seen_together(self, occurrence: Occurrence) -> list[Occurrence]:
        """The events that the same document brought, this one among them, in order of appearance."""
        return self._all("WHERE first_seen = ? ORDER BY id", occurrence.first_seen)

    def get(self, occurrence: int) -> Occurrence:
        """One occurrence. Raises KeyError where there is none."""
        found = self._all("WHERE id = ?", occurrence)
        if not found:
            raise KeyError(occurrence)
        return found[0]

    def page(self, before: int | None, limit: int) -> list[Occurrence]:
        """Occurrences, the newest first, older than a given one."""
        return self._all(
            "WHERE id < ? ORDER BY id DESC LIMIT ?", before if before is not None else 2**62, limit
        )

    def add(
        self, key: str, data: dict[str, Any], boot_id: str | None, told: CloudEvent, at: datetime
    ) -> None:
        """An EventId that was not in the document is there."""
        self._connection.execute(
            "INSERT INTO occurrence (key, number, data, revision, live, boot_id, first_seen, last_changed, told) "
            "VALUES (:key, 1 + (SELECT coalesce(max(number), 0) FROM occurrence WHERE key = :key), "
            ":data, :revision, 1, :boot_id, :at, :at, :told)",
            {
                "key": key,
                "data": orjson.dumps(data).decode(),
                "revision": data["revision"],
                "boot_id": boot_id,
                "at": format_sortable(at),
                "told": told.id,
            },
        )

    def update(self, key: str, data: dict[str, Any], told: CloudEvent, at: datetime) -> None:
        """A live event has a new state."""
        self._connection.execute(
            "UPDATE occurrence SET data = ?, revision = ?, last_changed = ?, told = ? WHERE key = ? AND live",
            (orjson.dumps(data).decode(), data["revision"], format_sortable(at), told.id, key),
        )

    def mark_ended(self, key: str, outcome: str, told: CloudEvent, at: datetime) -> None:
        """A live event has left the document."""
        self._connection.execute(
            "UPDATE occurrence SET live = 0, outcome = ?, last_changed = ?, told = ? WHERE key = ? AND live",
            (outcome, format_sortable(at), told.id, key),
        )

    def set_boot_id(self, occurrence: int, boot_id: str | None) -> None:
        """A boot came that had nothing to do with this event: later ones are compared with this boot id."""
        self._connection.execute(
            "UPDATE occurrence SET boot_id = ? WHERE id = ?", (boot_id, occurrence)
        )

    def prune(self, before: datetime) -> None:
        """Forget what ended before that moment, with its decisions and grants."""
        old = "(SELECT id FROM occurrence WHERE NOT live AND last_changed < ?)"
        for table in ("decision", "start_request"):
            self._connection.execute(
                f"DELETE FROM {table} WHERE occurrence IN {old}", (format_sortable(before),)
            )  # noqa: S608  # our own names
        self._connection.execute(
            f"DELETE FROM occurrence WHERE id IN {old}", (format_sortable(before),)
        )  # noqa: S608  # our own names

    def _all(self, where: str, *values: object) -> list[Occurrence]:
        found = self._connection.execute(f"SELECT {_COLUMNS} FROM occurrence {where}", values)  # noqa: S608  # our own text
        return [
            Occurrence(id_, key, number, orjson.loads(data), revision, bool(live), *rest)
            for id_, key, number, data, revision, live, *rest in found
        ]
