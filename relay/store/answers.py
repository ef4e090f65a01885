"""The table of first answers: an accepted request that comes again gets the same answer."""

from __future__ import annotations

import sqlite3
from datetime import datetime
from typing import Any

import orjson
from pydantic import TypeAdapter

from relay.events.timestamps import format_sortable
from relay.store import FirstAnswer
from relay.store.rows import parse_rows

_FIRST_ANSWER = TypeAdapter(FirstAnswer)


class Answers:
    """Reads and writes the table of first answers, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def find(self, principal: str, request_id: str) -> FirstAnswer | None:
        """Return the first answer to a request with this id."""
        rows = self._connection.execute(
            "SELECT digest, status, body FROM answer WHERE principal = ? AND request_id = ?",
            (principal, request_id),
        )
        return next(parse_rows(_FIRST_ANSWER, rows), None)

    def add(
        self,
        principal: str,
        request_id: str,
        digest: str,
        status: int,
        body: dict[str, Any],
        at: datetime,
    ) -> None:
        """Store a first answer."""
        text, time = orjson.dumps(body).decode(), format_sortable(at)
        self._connection.execute(
            "INSERT INTO answer VALUES (?, ?, ?, ?, ?, ?)",
            (principal, request_id, digest, status, text, time),
        )

    def prune(self, before: datetime) -> None:
        """Delete the first answers from before that moment."""
        self._connection.execute("DELETE FROM answer WHERE at < ?", (format_sortable(before),))
