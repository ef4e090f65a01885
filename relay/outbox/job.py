"""One piece of work for the store, and its result."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from relay.outbox import Entry, RecordedEvent
from relay.outbox.file import result_code
from relay.outbox.transaction import Route, Transaction

T = TypeVar("T")
Work = Callable[[Transaction], T]
"""What is done in one transaction. It may run more than once, and must have no other effect."""
_FILE_ERRORS = frozenset(
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
"""Primary result codes that are the fault of the file. Any other is a mistake in the work."""


@dataclass(slots=True, eq=False)
class StoreJob:
    """One piece of work.

    ``fail_mode`` says what happens to it while the file cannot be written: see
    `relay.outbox.sqlite`. After it ran, either ``error`` or ``result`` is set, and ``recorded`` and
    ``redelivered`` hold what the listeners of the store must get.
    """

    work: Work[Any]
    fail_mode: Literal["open", "closed", "read"]
    future: asyncio.Future[Any] | None = None
    result: Any = None
    error: Exception | None = None
    recorded: Sequence[RecordedEvent] = ()
    redelivered: Sequence[Entry] = ()

    def run(self, connection: sqlite3.Connection, route: Route) -> None:
        """Do the work in a savepoint, so that its own error undoes only this work.

        Raises sqlite3.Error if the file is at fault.
        """
        connection.execute("SAVEPOINT work")
        if not self.attempt(Transaction(connection, route)):
            connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")

    def attempt(self, transaction: Transaction) -> bool:
        """Do the work. Return False if it raised its own error; the caller must undo the work.

        Raises sqlite3.Error if the file is at fault.
        """
        try:
            self.result = self.work(transaction)
        except Exception as error:  # whoever submitted the work gets it
            if isinstance(error, sqlite3.Error) and result_code(error) in _FILE_ERRORS:
                raise
            self.error = error
            return False
        self.error = None
        self.recorded, self.redelivered = transaction.take_results()
        return True
