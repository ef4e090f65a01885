"""The tables of deliveries: entries, attempts, and the states of the sinks.

There is one entry for each event and each sink that wants it. It waits until it is *settled*:
delivered, superseded or a dead letter (``parked``). The dispatcher and its workers write here what
becomes of entries; the API reads them as people see them.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

import orjson
from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION, delivery_priority
from relay.events.timestamps import format_sortable
from relay.store import Attempt, AttemptOutcome, Entry, EntryState, SinkState
from relay.store.rows import bulk_insert, next_autoincrement_id, parse_rows

_ENTRY_COLUMNS = (
    "id, sink, position, ordering_key, type, event_key, not_before, attempts, next_at, "
    "coalesce(redelivered, recorded) AS recorded"
)
# The journal has the EventId in its original case. A damaged row may be no JSON.
_SUMMARY_QUERY = (
    "SELECT e.id, e.sink, "  # noqa: S608  # our own text
    "iif(e.event_key IS NULL, NULL, CASE WHEN json_valid(CAST(j.body AS TEXT)) "
    "THEN json_extract(CAST(j.body AS TEXT), '$.subject') END) AS eventId, "
    f"'{TYPE_PREFIX}' || e.type || '{TYPE_VERSION}' AS type, e.state, e.attempts, "
    "e.next_at AS nextAttempt, e.reason, e.last_status AS lastStatus, e.recorded, e.settled "
    "FROM entry e LEFT JOIN journal j ON j.position = e.position"
)
_TRIED_COLUMNS = ("id", "at", "elapsed", "outcome", "status", "reason", "response", "ended")
_TRIED = "WITH tried AS (SELECT {} FROM json_each(?)) ".format(  # noqa: S608  # our own text
    ", ".join(f"json_extract(value, '$[{i}]') AS {name}" for i, name in enumerate(_TRIED_COLUMNS))
)
"""The table of `Deliveries.log_attempts`. SQLite has ->> only from version 3.38 on."""


class DeliverySummary(TypedDict):
    """One event for one sink."""

    id: int
    sink: str
    eventId: str | None
    """null if the delivery is not about an Azure event."""
    type: str
    state: EntryState
    attempts: int
    nextAttempt: str | None
    reason: str | None
    lastStatus: int | None
    recorded: str
    settled: str | None


class DeliveryAttempt(TypedDict):
    """One attempt of a delivery."""

    number: int
    at: str
    tookSeconds: float
    outcome: AttemptOutcome
    status: int | None
    """The receiver's status, if it gave one."""
    reason: str | None
    answer: str | None
    """At most the first KiB of the receiver's response."""


_ENTRY = TypeAdapter(Entry)
_SUMMARY = TypeAdapter(DeliverySummary)
_ATTEMPT = TypeAdapter(DeliveryAttempt)


class Deliveries:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.redelivered: list[Entry] = []
        """The entries that wait again, or that a sink gets about an event recorded earlier."""
        self.look_again()

    def look_again(self) -> None:
        """Forget the next id. Otherwise it is read once: nobody else writes meanwhile."""
        self._next_id: int | None = None

    def next_entry_id(self) -> int:
        if self._next_id is None:
            self._next_id = next_autoincrement_id(self._connection, "entry")
        return self._next_id

    def add_entries(self, entries: Iterable[Entry]) -> None:
        """Insert entries. Their ids must count up from `next_entry_id`."""
        rows = [
            (
                *(each.id, each.sink, each.position, each.ordering_key, each.type, each.event_key),
                format_sortable(each.not_before) if each.not_before else None,
                format_sortable(each.recorded),
            )
            for each in entries
        ]
        self._next_id = self.next_entry_id() + len(rows)
        bulk_insert(
            self._connection,
            "entry (id, sink, position, ordering_key, type, event_key, not_before, recorded)",
            rows,
        )

    def waiting_entries(self, sink: str | None = None) -> list[Entry]:
        """Return the waiting entries of one sink or of all, in the order of recording."""
        of_sink = "" if sink is None else "AND sink = :sink"
        rows = self._connection.execute(
            # With the plus sign, SQLite sorts what the index of waiting entries holds. Otherwise it
            # reads the whole table, because that is in the order of ids.
            f"SELECT {_ENTRY_COLUMNS} FROM entry WHERE state = 'waiting' {of_sink} ORDER BY +id",  # noqa: S608  # our own text
            {"sink": sink},
        )
        return list(parse_rows(_ENTRY, rows))

    def is_event_waiting(self, event_key: str) -> bool:
        """Whether an entry about an EventId waits for any sink. Refusals do not count."""
        row = self._connection.execute(
            "SELECT 1 FROM entry WHERE event_key = ? AND state = 'waiting' "
            "AND type != 'approval.refused' LIMIT 1",
            (event_key,),
        ).fetchone()
        return row is not None

    def log_attempts(self, attempts: Sequence[tuple[int, Attempt]]) -> None:
        """Add attempts to the log, each to deliver the entry with this id; settle the delivered.

        It needs one statement for each table: docs/protocol.md#one-statement-for-each-table.
        """
        rows = [
            [
                *(entry_id, format_sortable(each.at), each.elapsed, each.outcome, each.status),
                *(each.reason, each.response, format_sortable(each.ended_at)),
            ]
            for entry_id, each in attempts
        ]
        text = orjson.dumps(rows).decode()
        self._connection.execute(
            f"{_TRIED}UPDATE entry SET state = iif(outcome = 'delivered', 'delivered', state), "  # noqa: S608  # our own text
            "settled = iif(outcome = 'delivered', ended, settled), attempts = attempts + 1, "
            "last_status = tried.status, reason = tried.reason, next_at = NULL "
            "FROM tried WHERE entry.id = tried.id",
            (text,),
        )
        self._connection.execute(
            f"{_TRIED}INSERT INTO attempt SELECT entry.id, attempts, at, elapsed, outcome, "  # noqa: S608  # our own text
            "status, tried.reason, response FROM tried JOIN entry USING (id)",
            (text,),
        )

    def defer(self, entry_id: int, attempt: Attempt, until: datetime) -> None:
        """Log a failed attempt; the next one is due at ``until``."""
        self.log_attempts([(entry_id, attempt)])
        self._connection.execute(
            "UPDATE entry SET next_at = ? WHERE id = ?", (format_sortable(until), entry_id)
        )

    def store_final_state(
        self, entry_id: int, state: EntryState, reason: str | None, at: datetime
    ) -> None:
        self._connection.execute(
            "UPDATE entry SET state = ?, reason = ?, next_at = NULL, settled = ? WHERE id = ?",
            (state, reason, format_sortable(at), entry_id),
        )

    def redeliver(
        self, at: datetime, *, entry_id: int | None = None, sink: str | None = None
    ) -> int:
        """Make one dead letter wait again, those of a sink, or all, as if recorded at ``at``.

        Dead letters of a sink that no longer exists stay. Return how many wait again.
        """
        rows = self._connection.execute(
            "SELECT id FROM entry INDEXED BY entry_parked WHERE state = 'parked' "
            "AND sink IN (SELECT name FROM sink) "
            "AND id = coalesce(:id, id) AND sink = coalesce(:sink, sink)",
            {"id": entry_id, "sink": sink},
        )
        ids = orjson.dumps([entry_id for (entry_id,) in rows]).decode()
        self._connection.execute(
            "UPDATE entry SET state = 'waiting', settled = NULL, next_at = NULL, redelivered = ? "
            "WHERE id IN (SELECT value FROM json_each(?))",
            (format_sortable(at), ids),
        )
        rows = self._connection.execute(
            f"SELECT {_ENTRY_COLUMNS} FROM entry "  # noqa: S608  # our own text
            "WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id",
            (ids,),
        )
        found = list(parse_rows(_ENTRY, rows))
        self.redelivered += found
        return len(found)

    def count_by_sink(self, state: EntryState) -> dict[str, int]:
        """Return how many entries of each sink wait or are dead letters, if it has any."""
        rows = self._connection.execute(
            f"SELECT sink, count(*) FROM entry INDEXED BY entry_{state} "  # noqa: S608  # our own text
            f"WHERE state = '{state}' GROUP BY sink"
        )
        return dict(rows.fetchall())

    def find(self, entry_id: int) -> DeliverySummary | None:
        rows = self._connection.execute(f"{_SUMMARY_QUERY} WHERE e.id = ?", (entry_id,))
        return next(parse_rows(_SUMMARY, rows), None)

    def attempts_of(
        self, entry_id: int, before: int | None = None, limit: int = 1000
    ) -> list[DeliveryAttempt]:
        """Return the newest attempts to deliver an entry with lower numbers, oldest first."""
        rows = self._connection.execute(
            "SELECT number, at, round(elapsed, 6) AS tookSeconds, outcome, status, reason, "
            "response AS answer FROM attempt WHERE entry = ? AND number < coalesce(?, 9e18) "
            "ORDER BY number DESC LIMIT ?",
            (entry_id, before, limit),
        )
        return list(parse_rows(_ATTEMPT, rows))[::-1]

    def page(
        self,
        *,
        states: Sequence[EntryState] = (),
        event_key: str | None = None,
        sink: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[DeliverySummary]:
        """Return deliveries with an id less than ``before``, newest first."""
        # Only the conditions that are given: with others, SQLite would read every entry.
        conditions = ["e.id < coalesce(:before, 9e18)"]
        if event_key is not None:
            conditions.append("e.event_key = :event_key")
        if sink is not None:
            conditions.append("e.sink = :sink")
        if states:
            # The partial indexes need the state in the statement itself.
            alternatives = " OR ".join(f"e.state = '{state}'" for state in states)
            conditions.append(f"({alternatives})")
        rows = self._connection.execute(
            f"{_SUMMARY_QUERY} WHERE {' AND '.join(conditions)} ORDER BY e.id DESC LIMIT :limit",
            {"before": before, "event_key": event_key, "sink": sink, "limit": limit},
        )
        return list(parse_rows(_SUMMARY, rows))

    def sink_states(self) -> dict[str, tuple[SinkState, str | None]]:
        """Return the state of each sink of the last start, and the reason if it is not on."""
        rows = self._connection.execute("SELECT name, state, reason FROM sink")
        return {name: (state, reason) for name, state, reason in rows}

    def set_sink_state(self, name: str, state: SinkState, reason: str | None = None) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO sink VALUES (?, ?, ?)", (name, state, reason)
        )

    def remove_sink(self, name: str, reason: str, at: datetime) -> int:
        """Remove a sink: its entries become dead letters (counted), ``relay.*`` are deleted."""
        self._connection.execute("DELETE FROM sink WHERE name = ?", (name,))
        self._connection.execute(
            "DELETE FROM entry WHERE sink = ? AND state = 'waiting' AND type LIKE 'relay.%'",
            (name,),
        )
        return self._connection.execute(
            "UPDATE entry SET state = 'parked', reason = ?, next_at = NULL, settled = ? "
            "WHERE sink = ? AND state = 'waiting'",
            (reason, format_sortable(at), name),
        ).rowcount

    def prune(self, before: datetime, max_dead_letters: int) -> Counter[str]:
        """Delete entries settled before a moment, with their attempts, and surplus dead letters.

        Over ``max_dead_letters`` the least important go first, and of equal ones the oldest. Return
        how many of these were of which type.
        """
        self._connection.execute("DELETE FROM entry WHERE settled < ?", (format_sortable(before),))
        dead_letters: list[tuple[int, str]] = self._connection.execute(
            "SELECT id, type FROM entry WHERE state = 'parked' ORDER BY id"
        ).fetchall()
        dead_letters.sort(key=lambda row: delivery_priority(row[1]), reverse=True)
        surplus = dead_letters[: max(0, len(dead_letters) - max_dead_letters)]
        self._connection.execute(
            "DELETE FROM entry WHERE id IN (SELECT value FROM json_each(?))",
            (orjson.dumps([entry_id for entry_id, _ in surplus]).decode(),),
        )
        return Counter(type_ for _, type_ in surplus)
