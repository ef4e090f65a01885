"""One entry per event and wanting sink, the log of attempts, and the state of the sinks."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION
from relay.events.timestamps import format_sortable, parse_timestamp
from relay.outbox import Attempt, Entry, EntryState, SinkState
from relay.outbox.bulk_insert import bulk_insert

_ENTRY = "id, sink, position, lane, type, event_key, not_before, attempts, next_at, coalesce(revived, recorded)"
_SUBJECT = "CASE WHEN json_valid(CAST(j.body AS TEXT)) THEN json_extract(CAST(j.body AS TEXT), '$.subject') END"
_SHOWN = (
    f"e.id, e.sink, iif(e.event_key IS NULL, NULL, {_SUBJECT}), e.type, e.state, e.attempts, e.next_at, e.reason, e.last_status, "
    "e.recorded, e.settled FROM entry e LEFT JOIN journal j ON j.position = e.position"
)


@dataclass(frozen=True, slots=True)
class Delivery:
    """An entry as it is shown to people and programs."""

    id: int
    sink: str
    event_id: str | None
    type: str
    state: EntryState
    attempts: int
    next_at: str | None
    reason: str | None
    last_status: int | None
    recorded: str
    settled: str | None

    def to_json(self) -> dict[str, Any]:
        """As the API gives it."""
        return {
            "id": self.id,
            "sink": self.sink,
            "eventId": self.event_id,
            "type": f"{TYPE_PREFIX}{self.type}{TYPE_VERSION}",
            "state": self.state,
            "attempts": self.attempts,
            "nextAttempt": self.next_at,
            "reason": self.reason,
            "lastStatus": self.last_status,
            "recorded": self.recorded,
            "settled": self.settled,
        }


@dataclass(frozen=True, slots=True)
class LoggedAttempt:
    """A try as the log has it: when it began, how many seconds it took, and at most the first KiB of what was answered."""

    number: int
    at: str
    elapsed: float
    outcome: str
    status: int | None
    reason: str | None
    response: str | None


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which dead letters are meant: those that meet every condition given. ``event_key`` is an EventId in lower case."""

    sink: str | None = None
    type: str | None = None
    event_key: str | None = None
    since: datetime | None = None
    """Given up at that moment or later."""


class Deliveries:
    """The tables of deliveries, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._next: int | None = (
            None  # looked up once in a transaction, which nobody else writes in
        )

    def next_id(self) -> int:
        """The id of the entry that is added next."""
        if self._next is None:
            found = self._connection.execute(
                "SELECT seq FROM sqlite_sequence WHERE name = 'entry'"
            ).fetchone()
            self._next = int(found[0]) + 1 if found else 1
        return self._next

    def add_entries(self, entries: Iterable[Entry]) -> None:
        """Sinks want events; the entries have the ids from `next_id` on."""
        rows = [
            (
                *(one.id, one.sink, one.position, one.ordering_key, one.type, one.event_key),
                format_sortable(one.not_before) if one.not_before else None,
                format_sortable(one.recorded),
            )
            for one in entries
        ]
        self._next = self.next_id() + len(rows)
        bulk_insert(
            self._connection,
            "entry (id, sink, position, lane, type, event_key, not_before, recorded)",
            rows,
        )

    def waiting(self, sink: str | None = None) -> list[Entry]:
        """What waits, of one sink or of all, in the order in which it was recorded."""
        found = self._connection.execute(
            f"SELECT {_ENTRY} FROM entry WHERE state = 'waiting' AND (:sink IS NULL OR sink = :sink) ORDER BY id",  # noqa: S608  # our own text
            {"sink": sink},
        )
        return [_entry(row) for row in found]

    def has_waiting(self, event_key: str) -> bool:
        """Whether any sink has yet to get something about an event."""
        found = self._connection.execute(
            "SELECT 1 FROM entry WHERE event_key = ? AND state = 'waiting' LIMIT 1", (event_key,)
        )
        return found.fetchone() is not None

    def log_attempt(self, entry: int, attempt: Attempt) -> None:
        """Log an attempt."""
        self._connection.execute(
            "UPDATE entry SET attempts = attempts + 1, last_status = ? WHERE id = ?",
            (attempt.status, entry),
        )
        self._connection.execute(
            "INSERT INTO attempt SELECT id, attempts, ?, ?, ?, ?, ?, ? FROM entry WHERE id = ?",
            (
                format_sortable(attempt.at),
                attempt.elapsed,
                attempt.outcome,
                attempt.status,
                attempt.reason,
                attempt.response,
                entry,
            ),
        )

    def mark_delivered(self, arrived: Sequence[tuple[int, Attempt]]) -> None:
        """Log the attempts that got through, and settle their entries: one statement for each table.

        See docs/protocol.md#one-statement-for-each-table.
        """
        rows = orjson.dumps(
            [
                [
                    entry,
                    format_sortable(one.at),
                    one.elapsed,
                    one.status,
                    one.response,
                    format_sortable(one.ended_at),
                ]
                for entry, one in arrived
            ]
        )
        # json_extract rather than ->>, which SQLite knows from 3.38.
        self._connection.execute(
            "WITH arrived AS (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[3]') AS status, "
            "json_extract(value, '$[5]') AS ended FROM json_each(?)) "
            "UPDATE entry SET state = 'delivered', reason = NULL, next_at = NULL, attempts = attempts + 1, "
            "last_status = arrived.status, settled = arrived.ended FROM arrived WHERE entry.id = arrived.id",
            (rows.decode(),),
        )
        self._connection.execute(
            "WITH arrived AS (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS at, "
            "json_extract(value, '$[2]') AS took, json_extract(value, '$[3]') AS status, json_extract(value, '$[4]') AS answer "
            "FROM json_each(?)) "
            "INSERT INTO attempt SELECT entry.id, attempts, at, took, 'delivered', status, NULL, answer FROM arrived JOIN entry USING (id)",
            (rows.decode(),),
        )

    def defer(self, entry: int, attempt: Attempt, until: datetime) -> None:
        """Not yet: log the attempt, and try again at that moment."""
        self.log_attempt(entry, attempt)
        self._connection.execute(
            "UPDATE entry SET next_at = ?, reason = ? WHERE id = ?",
            (format_sortable(until), attempt.reason, entry),
        )

    def settle(self, entry: int, state: EntryState, reason: str | None, at: datetime) -> None:
        """Delivered, superseded or parked."""
        self._connection.execute(
            "UPDATE entry SET state = ?, reason = ?, next_at = NULL, settled = ? WHERE id = ?",
            (state, reason, format_sortable(at), entry),
        )

    def redeliver(self, entry: int, at: datetime) -> Entry | None:
        """Make a parked entry wait again, as old as if it were new; None where there is none for a sink that is still there."""
        changed = self._connection.execute(
            "UPDATE entry SET state = 'waiting', settled = NULL, next_at = NULL, revived = ? WHERE id = ? AND state = 'parked' "
            "AND sink IN (SELECT name FROM sink)",
            (format_sortable(at), entry),
        ).rowcount
        found = self._connection.execute(
            f"SELECT {_ENTRY} FROM entry WHERE id = ? AND ?", (entry, changed)
        ).fetchone()  # noqa: S608  # our own text
        return _entry(found) if found else None

    def redeliver_matching(
        self, which: DeadLetterFilter, at: datetime, *, after: int, until: datetime, limit: int
    ) -> list[Entry]:
        """As `revive`, of the oldest that are meant, behind that id and given up by ``until``."""
        condition, values = _meant(which, after, until)
        ids = [
            row[0]
            for row in self._connection.execute(
                f"SELECT id FROM entry WHERE {condition} ORDER BY id LIMIT ?", (*values, limit)
            )
        ]  # noqa: S608  # our own text
        return [entry for one in ids if (entry := self.redeliver(one, at)) is not None]

    def count_dead_letters(self, which: DeadLetterFilter, *, after: int, until: datetime) -> int:
        """How many dead letters are meant that `revive_some` would take up."""
        condition, values = _meant(which, after, until)
        found = self._connection.execute(f"SELECT count(*) FROM entry WHERE {condition}", values)  # noqa: S608  # our own text
        return int(found.fetchone()[0])

    def find_delivery(self, entry: int) -> Delivery | None:
        """One entry as it is shown."""
        found = self._connection.execute(f"SELECT {_SHOWN} WHERE e.id = ?", (entry,)).fetchone()
        return Delivery(*found) if found else None

    def attempts(self, entry: int) -> list[LoggedAttempt]:
        """The attempts to deliver an entry, the oldest first."""
        found = self._connection.execute(
            "SELECT number, at, took, outcome, status, reason, answer FROM attempt WHERE entry = ? ORDER BY number",
            (entry,),
        )
        return [LoggedAttempt(*row) for row in found]

    def page(
        self,
        *,
        states: Iterable[EntryState] = (),
        event_key: str | None = None,
        sink: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[Delivery]:
        """Entries as they are shown, the newest first, older than a given one."""
        wanted = tuple(states)
        marks = ", ".join("?" * len(wanted))
        condition = f"AND e.state IN ({marks})" if wanted else ""
        found = self._connection.execute(
            f"SELECT {_SHOWN} WHERE e.id < ? AND (? IS NULL OR e.event_key = ?) AND (? IS NULL OR e.sink = ?) {condition} "  # our own text
            "ORDER BY e.id DESC LIMIT ?",
            (
                before if before is not None else 2**62,
                event_key,
                event_key,
                sink,
                sink,
                *wanted,
                limit,
            ),
        )
        return [Delivery(*row) for row in found]

    def sink_states(self) -> dict[str, tuple[SinkState, str | None]]:
        """The sinks of the last start with their state and, where stopped, the reason."""
        found = self._connection.execute("SELECT name, state, reason FROM sink")
        return {name: (state, reason) for name, state, reason in found}

    def set_sink_state(self, name: str, state: SinkState, reason: str | None = None) -> None:
        """Remember a sink and its state."""
        self._connection.execute(
            "INSERT OR REPLACE INTO sink VALUES (?, ?, ?)", (name, state, reason)
        )

    def remove_sink(self, name: str, reason: str, at: datetime) -> int:
        """A sink is configured no more: park what waits for it, drop its relay.*; returns how many were parked."""
        self._connection.execute("DELETE FROM sink WHERE name = ?", (name,))
        self._connection.execute(
            "DELETE FROM entry WHERE sink = ? AND state = 'waiting' AND type LIKE 'relay.%'",
            (name,),
        )
        return self._connection.execute(
            "UPDATE entry SET state = 'parked', reason = ?, next_at = NULL, settled = ? WHERE sink = ? AND state = 'waiting'",
            (reason, format_sortable(at), name),
        ).rowcount

    def prune(self, before: datetime, dead_letters: int) -> int:
        """Forget deliveries, and their attempts, that were settled before that moment, and the oldest dead letters over a number.

        Returns how many dead letters went because of that number.
        """
        self._connection.execute("DELETE FROM entry WHERE settled < ?", (format_sortable(before),))
        return self._connection.execute(
            "DELETE FROM entry WHERE state = 'parked' AND id <= "
            "(SELECT id FROM entry WHERE state = 'parked' ORDER BY id DESC LIMIT 1 OFFSET ?)",
            (dead_letters,),
        ).rowcount


def _meant(which: DeadLetterFilter, after: int, until: datetime) -> tuple[str, tuple[object, ...]]:
    """The condition, and the values of its parameters, of dead letters whose sink is still there."""
    parts: list[tuple[str, object]] = [("id > ?", after), ("settled <= ?", format_sortable(until))]
    given = {"sink = ?": which.sink, "type = ?": which.type, "event_key = ?": which.event_key}
    parts += [(text, value) for text, value in given.items() if value is not None]
    if which.since is not None:
        parts.append(("settled >= ?", format_sortable(which.since)))
    fixed = "state = 'parked' AND sink IN (SELECT name FROM sink)"
    return " AND ".join([fixed, *(text for text, _ in parts)]), tuple(value for _, value in parts)


def _entry(row: tuple[Any, ...]) -> Entry:
    id_, sink, position, lane, type_, event_key, not_before, attempts, next_at, recorded = row
    moment = parse_timestamp(recorded)
    assert moment is not None  # noqa: S101  # we wrote it
    return Entry(
        id_,
        sink,
        position,
        lane,
        type_,
        event_key,
        parse_timestamp(not_before),
        attempts,
        parse_timestamp(next_at),
        moment,
    )
