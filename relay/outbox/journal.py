"""The audit trail: an append-only table in which each row's hash covers the row and the hash before it."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from relay.errors import StoreError
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_sortable
from relay.outbox import Head
from relay.outbox.bulk_insert import bulk_insert

GENESIS = Head(0, "0" * 64)
"""The head of a journal that has no rows yet."""


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One row. ``kind`` is the CloudEvent's ``<family>.<change>``, or ``claim`` or ``mode``; ``body`` is JSON."""

    position: int
    at: str
    kind: str
    event_key: str | None
    transition: str | None
    body: bytes
    hash: str


class Journal:
    """The table, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._head: Head | None = (
            None  # looked up once in a transaction, which nobody else writes in
        )

    def head(self) -> Head:
        """Where it ends now."""
        if self._head is None:
            self._head = read_head(self._connection)
        return self._head

    def append(
        self,
        at: datetime,
        kind: str,
        body: bytes,
        *,
        event_key: str | None = None,
        transition: str | None = None,
    ) -> int:
        """Add a row; returns its position."""
        return self.append_all(at, [(kind, event_key, transition, body)])[0]

    def append_all(
        self, at: datetime, facts: Iterable[tuple[str, str | None, str | None, bytes]]
    ) -> range:
        """Add rows in that order, each of a kind, event_key, transition and body; returns their positions."""
        before, moment = self.head(), format_sortable(at)
        position, digest = before.position, before.hash
        added: list[tuple[object, ...]] = []
        for kind, event_key, transition, body in facts:
            position += 1
            digest = row_hash(digest, position, moment, kind, event_key, transition, body)
            added.append((position, moment, kind, event_key, transition, body, digest))
        bulk_insert(self._connection, "journal", added)
        self._head = Head(position, digest)
        return range(before.position + 1, position + 1)

    def append_note(
        self, at: datetime, kind: str, facts: dict[str, Any], *, event_key: str | None = None
    ) -> int:
        """Add a row that is no CloudEvent: a claim, a switch of the mode."""
        return self.append(at, kind, orjson.dumps(facts), event_key=event_key)

    def count_transition(self, transition: str) -> int:
        """How often this transition was told before."""
        found = self._connection.execute(
            "SELECT count(*) FROM journal WHERE transition = ?", (transition,)
        )
        return int(found.fetchone()[0])

    def event(self, position: int) -> CloudEvent:
        """The CloudEvent at a position. Raises KeyError where it was pruned."""
        found = self._connection.execute(
            "SELECT body FROM journal WHERE position = ?", (position,)
        ).fetchone()
        if found is None:
            raise KeyError(position)
        return CloudEvent.parse(found[0])

    def last_change_position(self, event_key: str, before: str | None = None) -> int | None:
        """The position of the newest ``event.*`` about an event; ``before``: of those that were said before that moment."""
        found = self._connection.execute(
            "SELECT position FROM journal WHERE event_key = :key AND kind LIKE 'event.%' AND (:before IS NULL OR at < :before) "
            "ORDER BY position DESC LIMIT 1",
            {"key": event_key, "before": before},
        ).fetchone()
        return found[0] if found else None

    def history(self, event_key: str, since: str) -> list[CloudEvent]:
        """The CloudEvents about an event from that moment on, oldest first."""
        found = self._connection.execute(
            "SELECT body FROM journal WHERE event_key = ? AND at >= ? AND kind != 'claim' ORDER BY position",
            (event_key, since),
        )
        return [CloudEvent.parse(body) for (body,) in found]

    def events_about(self, event_keys: Sequence[str], after: int) -> list[tuple[int, CloudEvent]]:
        """The CloudEvents about any of these events behind a position, oldest first, with theirs."""
        found = self._connection.execute(
            "SELECT position, body FROM journal WHERE event_key IN (SELECT value FROM json_each(?)) AND position > ? AND kind != 'claim' "
            "ORDER BY position",
            (orjson.dumps(event_keys).decode(), after),
        )
        return [(at, CloudEvent.parse(body)) for at, body in found]

    def newest_position(self, event_key: str) -> int:
        """The position of the newest row about an event; 0 where there is none."""
        found = self._connection.execute(
            "SELECT max(position) FROM journal WHERE event_key = ?", (event_key,)
        ).fetchone()[0]
        return int(found or 0)

    def first_position(self, event_key: str, since: str) -> int:
        """The position of the first row about an event from that moment on; that of the head where it was pruned."""
        found = self._connection.execute(
            "SELECT min(position) FROM journal WHERE event_key = ? AND at >= ?", (event_key, since)
        ).fetchone()[0]
        return int(found) if found is not None else self.head().position

    def events_after(self, position: int, limit: int) -> list[tuple[int, CloudEvent]]:
        """CloudEvents behind a position, oldest first, with theirs."""
        found = self._connection.execute(
            "SELECT position, body FROM journal WHERE position > ? AND kind NOT IN ('claim', 'mode') ORDER BY position LIMIT ?",
            (position, limit),
        )
        return [(at, CloudEvent.parse(body)) for at, body in found]

    def prune(self, before: datetime, now: datetime) -> int:
        """Remove rows older than ``before``, but none that an entry still waits for; returns how many.

        A checkpoint with the last hash stays, so the chain still verifies.
        """
        # Up to the first row that is younger, not every older one: a clock that was wrong for a while wrote old dates late.
        first = self._connection.execute(
            "SELECT min((SELECT coalesce(min(position), 9e18) FROM journal WHERE at >= ?), "
            "(SELECT coalesce(min(position), 9e18) FROM entry WHERE state IN ('waiting', 'parked')))",
            (format_sortable(before),),
        ).fetchone()[0]
        last = self._connection.execute(
            "SELECT max(position) FROM journal WHERE position < ?", (first,)
        ).fetchone()[0]
        if last is None:
            return 0
        digest = self._connection.execute(
            "SELECT hash FROM journal WHERE position = ?", (last,)
        ).fetchone()[0]
        self._connection.execute("DELETE FROM checkpoint")
        self._connection.execute(
            "INSERT INTO checkpoint VALUES (?, ?, ?)", (last, digest, format_sortable(now))
        )
        return self._connection.execute("DELETE FROM journal WHERE position <= ?", (last,)).rowcount


def row_hash(
    before: str,
    position: int,
    at: str,
    kind: str,
    event_key: str | None,
    transition: str | None,
    body: bytes,
) -> str:
    """The hash of a row: SHA-256 over the hash before it, its columns as a JSON list, a line feed, and its body."""
    columns = orjson.dumps([before, position, at, kind, event_key, transition])
    return hashlib.sha256(columns + b"\n" + body).hexdigest()


def read_head(connection: sqlite3.Connection) -> Head:
    """Where a journal ends."""
    found = connection.execute(
        "SELECT position, hash FROM journal ORDER BY position DESC LIMIT 1"
    ).fetchone()
    return Head(*found) if found else read_checkpoint(connection)


def read_checkpoint(connection: sqlite3.Connection) -> Head:
    """What the first row's hash goes on from: the last row that was pruned, or nothing."""
    found = connection.execute("SELECT position, hash FROM checkpoint").fetchone()
    return Head(*found) if found else GENESIS


def read_rows(connection: sqlite3.Connection) -> Iterator[JournalRow]:
    """Every row, oldest first."""
    for row in connection.execute(
        "SELECT position, at, kind, event_key, transition, body, hash FROM journal ORDER BY position"
    ):
        yield JournalRow(*row)


def verify_journal(connection: sqlite3.Connection, expected: Head | None = None) -> tuple[Head, int]:
    """Walk the whole chain; returns the head and the number of rows.

    ``expected`` is a head that was seen before, elsewhere: a ``journalhead`` that some consumer holds shows a cut tail.
    Raises StoreError that names the first position at which the chain does not hold.
    """
    connection.execute("SAVEPOINT verify")  # one view of the file, also while a relay prunes it
    try:
        return _walk(connection, expected)
    except sqlite3.Error as error:
        raise StoreError(f"journal: it cannot be read: {error}") from error
    finally:
        connection.execute("RELEASE verify")


def _walk(connection: sqlite3.Connection, expected: Head | None) -> tuple[Head, int]:
    head, count = read_checkpoint(connection), 0
    _compare(head, expected)
    for row in read_rows(connection):
        if row.position != head.position + 1:
            raise StoreError(
                f"journal: expected position {head.position + 1}, found {row.position}: rows were removed or inserted"
            )
        if row.hash != row_hash(
            head.hash, row.position, row.at, row.kind, row.event_key, row.transition, row.body
        ):
            raise StoreError(
                f"journal: the row at position {row.position} is not the one that was written"
            )
        head, count = Head(row.position, row.hash), count + 1
        _compare(head, expected)
    if expected is not None and expected.position > head.position:
        raise StoreError(
            f"journal: it ends at position {head.position}, {expected.position} was seen before: its tail was cut"
        )
    return head, count


def _compare(head: Head, expected: Head | None) -> None:
    if expected is not None and head.position == expected.position and head != expected:
        raise StoreError(
            f"journal: the row at position {head.position} is not the one that was seen before"
        )
