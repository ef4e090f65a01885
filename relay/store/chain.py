"""The hash chain of the journal: each row's hash covers the row and the hash before it.

``imds-relay audit`` and each start of the relay verify it. Old rows are pruned; a checkpoint with
the last hash of them remains.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

import orjson

from relay.errors import StoreError
from relay.store import JournalHead

GENESIS = JournalHead(0, "0" * 64)


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


def verify_journal(
    connection: sqlite3.Connection, expected: JournalHead | None = None
) -> tuple[JournalHead, int]:
    """Verify the whole chain; return the head and the number of rows.

    ``expected`` is an earlier head, such as a ``journalhead`` that a consumer received. It reveals
    a journal whose end was cut off. Raises StoreError that names the first wrong position.
    """
    count = -1  # the checkpoint is no row
    try:
        # The savepoint gives one view of the file, even while a relay prunes it.
        connection.execute("SAVEPOINT verify")
        try:
            for head in _verified_heads(connection):
                count += 1
                if expected is not None and head.position == expected.position and head != expected:
                    raise StoreError(
                        f"journal: the row at position {head.position} is not the one that was "
                        "seen before"
                    )
        finally:
            connection.execute("RELEASE verify")  # fails, too, if the file is damaged
    except sqlite3.Error as error:
        raise StoreError(f"journal: it cannot be read: {error}") from error
    if expected is not None and expected.position > head.position:
        raise StoreError(
            f"journal: it ends at position {head.position}, {expected.position} was seen before: "
            "its tail was cut"
        )
    return head, count


def _verified_heads(connection: sqlite3.Connection) -> Iterator[JournalHead]:
    """Yield the head before the first row, and the head that each row became."""
    head = read_pruning_checkpoint(connection)
    yield head
    for (position,) in connection.execute("SELECT position FROM occurrence WHERE live"):
        if position <= head.position:  # the relay prunes no row of a live event
            raise StoreError(f"journal: the row of a live event at position {position} was removed")
    for row in read_all_rows(connection):
        if row.position != head.position + 1:
            raise StoreError(
                f"journal: expected position {head.position + 1}, found {row.position}: "
                "rows were removed or inserted"
            )
        check_row(head.hash, row)
        head = JournalHead(row.position, row.hash)
        yield head
