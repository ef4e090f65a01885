"""One piece of work for the store, and what came of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from relay.outbox import Entry, RecordedEvent
from relay.outbox.transaction import Route, Transaction

T = TypeVar("T")
Work = Callable[[Transaction], T]
"""What is done in one transaction. It may be run more than once, and has no effect but through the transaction."""
_TROUBLE = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
    }
)
"""Primary result codes that are the file's fault; any other is a mistake in the work."""


@dataclass(slots=True, eq=False)
class Job:
    """``fails``: what becomes of the work while the file cannot be written, see `relay.outbox.sqlite`."""

    work: Work[Any]
    fail_mode: Literal["open", "closed", "read"]
    future: asyncio.Future[Any] | None = None
    result: Any = None
    error: Exception | None = None
    recorded: Sequence[RecordedEvent] = ()
    redelivered: Sequence[Entry] = ()

    def run(self, connection: sqlite3.Connection, route: Route) -> None:
        """Do the work in a savepoint: an error of its own undoes it alone. Trouble with the file is raised."""
        connection.execute("SAVEPOINT work")
        if not self.attempt(Transaction(connection, route)):
            connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")

    def attempt(self, transaction: Transaction) -> bool:
        """Do the work; False: it raised an error of its own, and what it did is to be undone. Trouble with the file is raised."""
        try:
            self.result = self.work(transaction)
        except Exception as error:  # it is for whoever submitted the work
            if (
                isinstance(error, sqlite3.Error)
                and getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _TROUBLE
            ):
                raise
            self.error = error
            return False
        self.error = None
        self.recorded, self.redelivered = transaction.take_results()
        return True
