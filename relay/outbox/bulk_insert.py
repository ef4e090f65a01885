"""Writes many rows with few statements: a thread that runs a statement hands the interpreter over and waits for it again."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

MAX_ROWS_PER_STATEMENT = 32
"""Rows of one statement. SQLite keeps what it has prepared for each number of rows."""


def bulk_insert(
    connection: sqlite3.Connection, into: str, rows: Sequence[tuple[object, ...]]
) -> None:
    """Insert rows in that order; ``into`` is our own text: the table, and the columns where not all are given."""
    for first in range(0, len(rows), MAX_ROWS_PER_STATEMENT):
        part = rows[first : first + MAX_ROWS_PER_STATEMENT]
        row = f"({', '.join('?' * len(part[0]))})"
        connection.execute(
            f"INSERT INTO {into} VALUES {', '.join([row] * len(part))}",
            [value for values in part for value in values],
        )  # noqa: S608  # our own text
