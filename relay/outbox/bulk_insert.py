"""Inserts many rows with few statements.

Each statement releases the interpreter lock and has to take it again, so fewer are faster.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

MAX_ROWS_PER_STATEMENT = 32
"""Python caches a prepared statement for each number of rows. A small maximum keeps them cached."""


def bulk_insert(
    connection: sqlite3.Connection, into: str, rows: Sequence[tuple[object, ...]]
) -> None:
    """Insert the rows in their order.

    ``into`` is the table, with the columns in parentheses if not all are given. It is part of the
    statement and must be our own text.
    """
    for first in range(0, len(rows), MAX_ROWS_PER_STATEMENT):
        chunk = rows[first : first + MAX_ROWS_PER_STATEMENT]
        placeholders = f"({', '.join('?' * len(chunk[0]))})"
        connection.execute(
            f"INSERT INTO {into} VALUES {', '.join([placeholders] * len(chunk))}",  # noqa: S608  # our own text
            [value for row in chunk for value in row],
        )
