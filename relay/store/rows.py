"""Reads rows as dataclasses and in pages, and stores many with few statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter

from relay.events.timestamps import format_sortable

T = TypeVar("T")
MAX_ROWS_PER_STATEMENT = 32
"""Python caches a prepared statement for each number of rows. A small maximum keeps them cached."""


def parse_rows(adapter: TypeAdapter[T], rows: sqlite3.Cursor) -> Iterator[T]:
    """Yield each row as the dataclass of the adapter, whose fields are named like the columns."""
    rows.row_factory = sqlite3.Row
    for row in rows:
        yield adapter.validate_python(dict(row))


@dataclass(frozen=True, slots=True)
class PageLimit:
    """Where a page ends: after a number of rows, or of bytes. It has at least one row."""

    rows: int
    bytes: int = 2**19


def take_page(
    rows: Iterable[T], size: Callable[[T], int], limit: PageLimit
) -> tuple[list[T], bool]:
    """Return the first rows, and whether there are more. Rows after the page are not kept."""
    page: list[T] = []
    bytes_left = limit.bytes
    for row in rows:
        bytes_left -= size(row)
        if page and (bytes_left < 0 or len(page) == limit.rows):
            return page, True
        page.append(row)
    return page, False


def get_meta(connection: sqlite3.Connection, key: str) -> str | None:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else None


def next_autoincrement_id(connection: sqlite3.Connection, table: str) -> int:
    """Return the id of the next new row of a table whose ids are never used twice."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    return int(row[0]) + 1 if row is not None else 1


def save_rows(
    connection: sqlite3.Connection,
    table: str,
    rows: Sequence[Any],
    *,
    verb: str = "INSERT",
    upsert: str = "",
) -> None:
    if rows:
        names = [field.name for field in fields(rows[0])]
        columns = attrgetter(*names)
        values = [
            [make(value) if (make := _STORED.get(type(value))) else value for value in columns(row)]
            for row in rows
        ]
        bulk_insert(connection, f"{table} ({', '.join(names)})", values, verb=verb, upsert=upsert)


_STORED: Mapping[type, Callable[[Any], str]] = {
    datetime: format_sortable,
    dict: lambda value: orjson.dumps(value).decode(),
    tuple: lambda value: orjson.dumps(value).decode(),
}


def bulk_insert(
    connection: sqlite3.Connection,
    into: str,
    rows: Sequence[Sequence[object]],
    *,
    verb: str = "INSERT",
    upsert: str = "",
) -> None:
    """Insert the rows in their order.

    Each statement releases the interpreter lock and has to take it again, so fewer are faster.
    ``into`` is the table, with the columns in parentheses if not all are given, and ``upsert`` what
    becomes of a row that is there already. All three must be our own text.
    """
    for first in range(0, len(rows), MAX_ROWS_PER_STATEMENT):
        chunk = rows[first : first + MAX_ROWS_PER_STATEMENT]
        placeholders = f"({', '.join('?' * len(chunk[0]))})"
        connection.execute(
            f"{verb} INTO {into} VALUES {', '.join([placeholders] * len(chunk))} {upsert}",
            [value for row in chunk for value in row],
        )
