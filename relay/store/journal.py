"""The audit trail: an append-only table whose rows form a hash chain.

`Transaction.record` appends each CloudEvent; approvals append a ``claim`` before each StartRequest
and an ``answer`` for each answer that is not final, and the mode of approvals is noted as ``mode``.
What the sinks send is read from here. Each row's hash covers the row and the hash before it. Old
rows are pruned; a checkpoint with the last hash of them remains.
"""

from __future__ import annotations

import hashlib
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import orjson

from relay.errors import StoreError
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_sortable
from relay.store import JournalHead
from relay.store.rows import PageLimit, bulk_insert, take_page

APPROVAL_ROWS = (
    "kind IN ('approval.granted', 'approval.recorded', 'approval.reminder', 'approval.voided', "
    "'claim', 'answer', 'startrequest.accepted', 'startrequest.failed')"
)
"""The rows that are folded (`relay.store.approvals`), as in the index ``journal_of_approvals``."""
STANDING_HOLD_ROWS = "kind >= 'standing-hold.' AND kind < 'standing-hold/'"
"""The rows that are folded (`relay.store.standing_holds`), as in ``journal_of_standing_holds``."""
_CLOUDEVENTS = "kind NOT IN ('claim', 'answer', 'mode')"
_CHANGE = "kind >= 'event.' AND kind < 'event/'"
"""The rows about what Azure changed."""
_FIRST_KEPT = (
    # The first row that is not old, even if older ones follow. A clock that was wrong for a while
    # wrote old times late.
    "SELECT min(position) FROM journal WHERE at >= :before",
    # Without these indexes, SQLite would read all entries.
    "SELECT min(position) FROM entry INDEXED BY entry_waiting WHERE state = 'waiting'",
    "SELECT min(position) FROM entry INDEXED BY entry_parked WHERE state = 'parked'",
    (
        "SELECT min((SELECT min(position) FROM journal WHERE event_key = key)) "
        "FROM occurrence INDEXED BY occurrence_live WHERE live"
    ),
    (
        "SELECT min(position) FROM journal INDEXED BY journal_of_approvals "  # noqa: S608  # our own text
        f"WHERE {APPROVAL_ROWS} AND kind = 'approval.recorded' "
        "AND CASE WHEN json_valid(CAST(body AS TEXT)) "  # a damaged row may be no JSON
        "THEN json_extract(CAST(body AS TEXT), '$.data.decision') = 'hold' "
        "AND json_extract(CAST(body AS TEXT), '$.data.expires') > :now END"
    ),
)
"""What finds the positions of the first rows that `Journal.prune` keeps."""
VALUE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What reading a row raises that is not what the relay writes."""
GENESIS = JournalHead(0, "0" * 64)
T = TypeVar("T")
NewRow = tuple[str, str | None, str | None, bytes]
"""Kind, event_key, transition and body of a row to append: see `JournalRow`."""


class JournalRow(NamedTuple):
    """One row.

    ``kind`` is ``<family>.<change>`` of a CloudEvent, ``claim``, ``answer`` or ``mode``.
    ``event_key`` is made by an `EventKeyFormat`. ``transition`` is that of an ``event.*``. ``body``
    is JSON.
    """

    position: int
    at: str
    kind: str
    event_key: str | None
    transition: str | None
    body: bytes
    hash: str


def row_hash(
    before: str,
    position: int,
    at: str,
    kind: str,
    event_key: str | None,
    transition: str | None,
    body: bytes,
) -> str:
    """Return the SHA-256 of the hash before and the columns as JSON, a line feed, the body."""
    columns = orjson.dumps([before, position, at, kind, event_key, transition])
    return hashlib.sha256(columns + b"\n" + body).hexdigest()


def read_pruning_checkpoint(connection: sqlite3.Connection) -> JournalHead:
    """Return the head before the first row: the last pruned row, or `GENESIS`."""
    row = connection.execute("SELECT position, hash FROM checkpoint").fetchone()
    return JournalHead(*row) if row else GENESIS


def read_all_rows(connection: sqlite3.Connection) -> Iterator[JournalRow]:
    return map(JournalRow._make, connection.execute("SELECT * FROM journal ORDER BY position"))


def check_row(before: str, row: JournalRow) -> None:
    """Raise StoreError if a row does not continue the chain of hashes."""
    try:
        digest = row_hash(before, *row[:-1])
    except TypeError:  # damage turned text into bytes, or bytes into text
        digest = None
    if row.hash != digest:
        raise StoreError(
            f"journal: the row at position {row.position} is not the one that was written"
        )


class Journal:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._head: JournalHead | None = None  # read once: nobody else writes meanwhile

    def head(self) -> JournalHead:
        if self._head is None:
            row = self._connection.execute(
                "SELECT position, hash FROM journal ORDER BY position DESC LIMIT 1"
            ).fetchone()
            self._head = JournalHead(*row) if row else read_pruning_checkpoint(self._connection)
        return self._head

    def append_all(self, at: datetime, new_rows: Iterable[NewRow]) -> range:
        head, time = self.head(), format_sortable(at)
        position, digest = head.position, head.hash
        rows: list[tuple[object, ...]] = []
        for kind, event_key, transition, body in new_rows:
            position += 1
            digest = row_hash(digest, position, time, kind, event_key, transition, body)
            rows.append((position, time, kind, event_key, transition, body, digest))
        bulk_insert(self._connection, "journal", rows)
        self._head = JournalHead(position, digest)
        return range(head.position + 1, position + 1)

    def append_non_event_row(
        self, at: datetime, kind: str, facts: Mapping[str, Any], *, event_key: str | None = None
    ) -> None:
        self.append_all(at, [(kind, event_key, None, orjson.dumps(facts))])

    def transition_counts(self, event_keys: Sequence[str]) -> dict[str, int]:
        """Return how often each transition of these events was recorded."""
        return dict(
            self._connection.execute(
                "SELECT transition, count(*) FROM journal WHERE transition IS NOT NULL "
                "AND event_key IN (SELECT value FROM json_each(?)) GROUP BY transition",
                (orjson.dumps(event_keys).decode(),),
            ).fetchall()
        )

    def require_event_at_position(self, position: int) -> CloudEvent:
        """Return the CloudEvent at a position. Raises KeyError if it was pruned."""
        return CloudEvent.parse(self.bodies_at_positions([position])[position])

    def bodies_at_positions(self, positions: Iterable[int]) -> dict[int, bytes]:
        """Return the bodies at these positions, as far as they were not pruned.

        It is one statement with one row, because each row releases the interpreter lock:
        docs/protocol.md#one-statement-for-each-table.
        """
        lengths, texts = self._connection.execute(
            "SELECT json_group_array(json_array(position, length(CAST(body AS BLOB)))), "
            "CAST(group_concat(body, '') AS BLOB) FROM journal "
            "WHERE position IN (SELECT value FROM json_each(?))",
            (orjson.dumps(list(positions)).decode(),),
        ).fetchone()
        bodies: dict[int, bytes] = {}
        start = 0
        for position, length in orjson.loads(lengths):
            bodies[position] = texts[start : start + length]
            start += length
        return bodies

    def last_position_about(self, event_key: str, rows: str = "true") -> int | None:
        """Return the position of the newest row about an EventId, or the newest of such rows."""
        query = f"SELECT max(position) FROM journal WHERE event_key = ? AND {rows}"  # noqa: S608  # our own text
        position: int | None = self._connection.execute(query, (event_key,)).fetchone()[0]
        return position

    def fold(
        self,
        known: T,
        step: Callable[[T, JournalRow], T],
        rows: str,
        event_key: str | None = None,
        *,
        after: int = 0,
    ) -> T:
        """Return what is known with such rows after a position, oldest first, or those of an event.

        Raises StoreError at a row that the chain does not hold, or at which ``step`` raises one of
        `VALUE_ERRORS`: the relay did not write it.
        """
        of_event = "" if event_key is None else "event_key = :key AND "
        found = self._connection.execute(
            "SELECT coalesce("  # noqa: S608  # our own text
            "(SELECT hash FROM journal AS before WHERE before.position = journal.position - 1), "
            "(SELECT hash FROM checkpoint WHERE checkpoint.position = journal.position - 1)), * "
            f"FROM journal WHERE {of_event}{rows} AND position > :after ORDER BY position",
            {"key": event_key, "after": after},
        ).fetchall()
        for before, *columns in found:
            row = JournalRow(*columns)
            check_row(before or GENESIS.hash, row)
            try:
                known = step(known, row)
            except VALUE_ERRORS as error:
                text = f"{type(error).__name__}: {error}"
                raise StoreError(
                    f"journal: the row at position {row.position} cannot be read ({text})"
                ) from error
        return known

    def last_change_of(self, event_key: str) -> int | None:
        """Return the position of the newest ``event.*`` about an EventId."""
        return self.last_position_about(event_key, _CHANGE)

    def history_page(
        self, event_key: str, begin: int, before: int | None, limit: PageLimit
    ) -> tuple[list[JournalRow], bool]:
        """Return CloudEvents about an EventId between positions, newest first; True: more."""
        rows = self._connection.execute(
            "SELECT * FROM journal WHERE event_key = ? AND position >= ? "  # noqa: S608  # our own text
            f"AND position < coalesce(?, 9e18) AND {_CLOUDEVENTS} ORDER BY position DESC",
            (event_key, begin, before),
        )
        return take_page(map(JournalRow._make, rows), lambda row: len(row.body), limit)

    def newest_changes(self, event_key: str, limit: PageLimit) -> list[CloudEvent]:
        """Return the newest ``event.*`` about an EventId, oldest first."""
        rows = self._connection.execute(
            f"SELECT body FROM journal WHERE event_key = ? AND {_CHANGE} ORDER BY position DESC",  # noqa: S608  # our own text
            (event_key,),
        )
        page, _ = take_page(rows, lambda row: len(row[0]), limit)
        return [CloudEvent.parse(body) for (body,) in reversed(page)]

    def events_about(
        self, event_keys: Sequence[str], after: int, limit: PageLimit
    ) -> tuple[list[CloudEvent], bool]:
        """Return the newest CloudEvents about these after a position, oldest first; True: more."""
        rows = self._connection.execute(
            # SQLite sorts the positions of all rows, and only those.
            "SELECT kind, body FROM (SELECT position AS newest FROM journal "
            "WHERE event_key IN (SELECT value FROM json_each(?)) AND position > ? "
            "ORDER BY position DESC LIMIT ?) JOIN journal ON position = newest "
            "ORDER BY newest DESC",
            (orjson.dumps(event_keys).decode(), after, limit.rows + 1),
        )
        page, has_more = take_page(rows, lambda row: len(row[1]), limit)
        events = [(kind, body) for kind, body in reversed(page) if kind not in ("claim", "answer")]
        return [CloudEvent.parse(body) for _, body in events], has_more

    def events_after(
        self, position: int, limit: int, max_bytes: int = sys.maxsize
    ) -> list[tuple[JournalHead, CloudEvent]]:
        """Return CloudEvents after a position, oldest first, each with the head that it became."""
        rows = self._connection.execute(
            "SELECT position, hash, body FROM journal "  # noqa: S608  # our own text
            f"WHERE position > ? AND {_CLOUDEVENTS} ORDER BY position",
            (position,),
        )
        page, _ = take_page(rows, lambda row: len(row[2]), PageLimit(limit, max_bytes))
        return [
            (JournalHead(position, digest), CloudEvent.parse(body))
            for position, digest, body in page
        ]

    def head_at(self, position: int, digest: str = "") -> JournalHead:
        """Return the head that the row at a position became, or else that before the first row.

        If ``digest`` is given, the row must have this hash. So a head of another journal, or one
        whose row was pruned, gives the beginning.
        """
        row = self._connection.execute(
            "SELECT position, hash FROM journal WHERE position = ? AND ? IN ('', hash)",
            (position, digest),
        ).fetchone()
        return JournalHead(*row) if row else read_pruning_checkpoint(self._connection)

    def prune(self, before: datetime, now: datetime, keep_from: int | None = None) -> int:
        """Delete the rows from before a moment and position; return how many.

        Rows that a waiting entry, a dead letter, a live event or a hold that has not expired needs
        are kept, and all after them: an event can come back.
        A checkpoint with the last hash remains, so that the chain can still be verified.
        """
        moments = {"before": format_sortable(before), "now": format_sortable(now)}
        kept = [keep_from]
        kept += [self._connection.execute(query, moments).fetchone()[0] for query in _FIRST_KEPT]
        first_kept = min((each for each in kept if each is not None), default=sys.maxsize)
        last_pruned = self._connection.execute(
            "SELECT position, hash FROM journal WHERE position < ? ORDER BY position DESC LIMIT 1",
            (first_kept,),
        ).fetchone()
        if last_pruned is None:
            return 0
        position, digest = last_pruned
        self._connection.execute("DELETE FROM checkpoint")
        self._connection.execute(
            "INSERT INTO checkpoint VALUES (?, ?, ?)", (position, digest, format_sortable(now))
        )
        cursor = self._connection.execute("DELETE FROM journal WHERE position <= ?", (position,))
        return cursor.rowcount
