"""The table of occurrences: the events of Azure as last seen, each read as a `TrackedEvent`.

An occurrence is one stay of an EventId in the document. The *live* ones are the snapshot: the
recorder compares the next document with them, also after a restart.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import datetime
from functools import lru_cache
from typing import Any

import orjson
from pydantic import TypeAdapter

from relay.events.timestamps import format_sortable
from relay.store import SINGLE_SCOPE, EventKeyFormat, TrackedEvent
from relay.store.rows import PageLimit, next_autoincrement_id, save_rows, take_page

_OCCURRENCE = TypeAdapter(TrackedEvent)
_COLUMNS = tuple(each.name for each in fields(TrackedEvent))


@lru_cache(maxsize=256)
def _parse(row: tuple[Any, ...]) -> TrackedEvent:
    # The snapshot is read for each new document, and most of its rows have not changed.
    return _OCCURRENCE.validate_python(dict(zip(_COLUMNS, row, strict=True)))


class Occurrences:
    def __init__(self, connection: sqlite3.Connection, keys: EventKeyFormat = SINGLE_SCOPE) -> None:
        self._connection = connection
        self._keys = keys

    def live_occurrences(self, event_keys: Sequence[str] | None = None) -> list[TrackedEvent]:
        """Return the live occurrences, or those with these keys, in order of appearance."""
        if event_keys is None:
            return self._all("INDEXED BY occurrence_live WHERE live ORDER BY id")
        return self._all(
            "INDEXED BY occurrence_live WHERE live "
            "AND key IN (SELECT value FROM json_each(?)) ORDER BY id",
            orjson.dumps(event_keys).decode(),
        )

    def count_live(self) -> list[tuple[str | None, str | None, int]]:
        """Return the EventTypes and EventStatuses of live events, and how many have both."""
        return self._connection.execute(
            "SELECT json_extract(data, '$.eventType'), json_extract(data, '$.eventStatus'), "
            "count(*) FROM occurrence INDEXED BY occurrence_live WHERE live GROUP BY 1, 2"
        ).fetchall()

    def live_scheduled_by_not_before(self, limit: int) -> list[TrackedEvent]:
        """Return the live Scheduled events with the earliest NotBefore, those without one last."""
        return self._all(
            "INDEXED BY occurrence_live WHERE live "
            "AND lower(json_extract(data, '$.eventStatus')) = 'scheduled' "
            "ORDER BY json_extract(data, '$.notBefore') IS NULL, "
            "julianday(json_extract(data, '$.notBefore')), id LIMIT ?",
            limit,
        )

    def ended_between(self, since: datetime, until: datetime) -> list[TrackedEvent]:
        return self._all(
            "INDEXED BY occurrence_ended WHERE NOT live AND last_changed > ? AND last_changed < ?",
            format_sortable(since),
            format_sortable(until),
        )

    def find_newest_occurrence(self, event_key: str) -> TrackedEvent | None:
        return self._one("WHERE key = ? ORDER BY number DESC LIMIT 1", event_key)

    def find_occurrences_by_reference(
        self, reference: str, scope: str | None = None
    ) -> list[TrackedEvent]:
        """Return the newest occurrence of the event in each scope that a reference can mean.

        A reference is an EventId, or on a hub ``<EventId>@<scope>``, in any case. Without a
        ``scope`` an EventId can mean an event in several scopes. If it is in the document of only
        one of them, it means that one.
        """
        # A whole reference is a key: <EventId>@<scope> on a hub, the EventId on any other relay.
        key = reference.lower() if scope is None else self._keys.make_key(scope, reference)
        found = self.find_newest_occurrence(key)
        if found is not None and scope in (None, found.scope):
            return [found]
        if scope is not None or not self._keys.with_scope:
            return []
        prefix = self._keys.make_key("", reference)
        newest = self._all(
            "WHERE key > ? AND key < ? AND number = "
            "(SELECT max(number) FROM occurrence AS other WHERE other.key = occurrence.key) "
            "ORDER BY id DESC",
            prefix,
            prefix + "\x7f",
        )
        # An EventId can contain the separator, too.
        newest = [each for each in newest if each.event.event_id.lower() == reference.lower()]
        live = [occurrence for occurrence in newest if occurrence.live]
        return live if len(live) == 1 else newest

    def find_occurrence_at_time(self, event_key: str, moment: datetime) -> TrackedEvent | None:
        at, known = format_sortable(moment), self.all_of_key(event_key)
        # If the clock was set back since it was first seen, none is as old.
        first = known[0] if known else None
        return next((each for each in reversed(known) if each.first_seen <= at), first)

    def all_of_key(self, event_key: str) -> list[TrackedEvent]:
        return self._all("WHERE key = ? ORDER BY number", event_key)

    def find_following_occurrence(self, occurrence: TrackedEvent) -> TrackedEvent | None:
        """Return the next occurrence of the same event that was not pruned."""
        return self._one(
            "WHERE key = ? AND number > ? ORDER BY number LIMIT 1",
            occurrence.key,
            occurrence.number,
        )

    def first_seen_with(self, occurrence: TrackedEvent) -> list[TrackedEvent]:
        """Return the events that first appeared in the same document, this one included."""
        # They were added one after the other, so those next to it are read up to the first other
        # one on both sides.
        first_other = "SELECT id FROM occurrence WHERE first_seen != ? AND id"
        return self._all(
            f"WHERE id > coalesce(({first_other} < ? ORDER BY id DESC LIMIT 1), 0) "
            f"AND id < coalesce(({first_other} > ? ORDER BY id LIMIT 1), 9e18) "
            "AND scope = ? ORDER BY id",
            *(occurrence.first_seen, occurrence.id) * 2,
            occurrence.scope,
        )

    def require_occurrence(self, occurrence_id: int) -> TrackedEvent:
        """Return one occurrence. Raises KeyError if there is none."""
        occurrence = self._one("WHERE id = ?", occurrence_id)
        if occurrence is None:
            raise KeyError(occurrence_id)
        return occurrence

    def occurrence_page(
        self,
        before: int | None,
        limit: PageLimit,
        *,
        scope: str | None = None,
        live: bool | None = None,
    ) -> tuple[list[TrackedEvent], bool]:
        """Return occurrences with an id less than ``before``, newest first; True: more are left."""
        of_scope, values = ("", ()) if scope is None else ("scope = ? AND ", (scope,))
        among = {
            None: "WHERE ",
            True: "INDEXED BY occurrence_live WHERE live AND ",
            False: "WHERE NOT live AND ",
        }[live]
        # Only the rows of the page are parsed.
        rows = self._rows(
            f"{among}{of_scope}id < coalesce(?, 9e18) ORDER BY id DESC", (*values, before)
        )
        return take_page(rows, lambda row: len(orjson.dumps(row.data)), limit)

    def next_id(self) -> int:
        return next_autoincrement_id(self._connection, "occurrence")

    def save(self, occurrences: Sequence[TrackedEvent]) -> None:
        """Add new occurrences, in their order, and store the new state of known ones."""
        save_rows(
            self._connection,
            "occurrence",
            occurrences,
            upsert="ON CONFLICT (id) DO UPDATE SET data = excluded.data, "
            "revision = excluded.revision, live = excluded.live, "
            "last_changed = excluded.last_changed, outcome = excluded.outcome, "
            "last_event_id = excluded.last_event_id",
        )

    def newest_occurrence_numbers(self, keys: Sequence[str]) -> dict[str, int]:
        rows = self._connection.execute(
            "SELECT key, max(number) FROM occurrence "
            "WHERE key IN (SELECT value FROM json_each(?)) GROUP BY key",
            (orjson.dumps(keys).decode(),),
        )
        return dict(rows.fetchall())

    def set_boot_id(self, occurrence_id: int, boot_id: str | None) -> None:
        self._connection.execute(
            "UPDATE occurrence SET boot_id = ? WHERE id = ?", (boot_id, occurrence_id)
        )

    def prune_ended_occurrences(self, before: datetime) -> None:
        # Only the occurrences before the first young one are read. A clock that was wrong for a
        # while wrote old times late.
        self._connection.execute(
            "DELETE FROM occurrence WHERE id < coalesce((SELECT id FROM occurrence "
            "WHERE first_seen >= :before ORDER BY id LIMIT 1), 9e18) "
            "AND NOT live AND last_changed < :before",
            {"before": format_sortable(before)},
        )

    def _one(self, where: str, *values: object) -> TrackedEvent | None:
        return next(self._rows(where, values), None)

    def _all(self, where: str, *values: object) -> list[TrackedEvent]:
        return list(self._rows(where, values))

    def _rows(self, where: str, values: Sequence[object]) -> Iterator[TrackedEvent]:
        query = f"SELECT {', '.join(_COLUMNS)} FROM occurrence {where}"  # noqa: S608  # our own text
        return map(_parse, self._connection.execute(query, values))
