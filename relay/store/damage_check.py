"""Verifies that the tables of a state file can be read as what they hold.

SQLite sees damage to its own structure. It does not see damage inside a value, such as the JSON of
an event. The relay would fail on that at each start. So `relay.store.file` calls
`verify_tables_are_readable` before the relay uses a file, and sets a damaged one aside.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import get_args

import orjson

from relay.events.model import ScheduledEvent
from relay.store import EventKeyFormat, SinkState, TrackedEvent
from relay.store.decisions import Decisions
from relay.store.deliveries import Deliveries
from relay.store.fleet import FleetTables
from relay.store.journal import Journal
from relay.store.occurrences import Occurrences
from relay.store.standing_holds import StandingHolds

_TABLES = (
    *("occurrence", "decision", "start_request", "standing_hold", "entry", "agent", "sighting"),
    *("message", "message_about", "invitation", "reminder", "answer"),
)
"""Tables whose indexes are compared with their rows. A value that differs shows there."""
VALUE_ERRORS = (ValueError, LookupError, TypeError, AttributeError)
"""What the readers of the tables raise for a value that is not what was written.

`relay.store.claim_audit` reads files that a relay did not open, and expects the same.
"""


class DamagedTableError(Exception):
    """A table holds something that the relay did not write. The text says what."""


def verify_tables_are_readable(connection: sqlite3.Connection, keys: EventKeyFormat) -> None:
    """Read what the relay reads after its start, and return if that is possible.

    Of the journal only its head is read, because ``imds-relay audit`` verifies it. The tables of a
    fleet are read only from the file of a hub. Raises DamagedTableError and sqlite3.Error.
    """
    for table in _TABLES:
        problem = connection.execute(f"PRAGMA integrity_check('{table}')").fetchone()[0]
        if problem != "ok":
            raise DamagedTableError(f"table {table}: {problem}")
    try:
        live = Occurrences(connection, keys).live_occurrences()
        _verify_occurrences(connection, keys, live)
        _verify_rows_readable(connection, live)
        if keys.with_scope:
            fleet = FleetTables(connection)
            fleet.agents()
            fleet.sightings([occurrence.key for occurrence in live])
    except VALUE_ERRORS as error:
        raise DamagedTableError(f"{type(error).__name__}: {error}") from error


def _verify_occurrences(
    connection: sqlite3.Connection, keys: EventKeyFormat, live: Sequence[TrackedEvent]
) -> None:
    for occurrence in live:
        event = occurrence.event
        if occurrence.key != keys.make_key(occurrence.scope, event.event_id):
            raise DamagedTableError(
                f"table occurrence: the event {occurrence.key} has the EventId {event.event_id}"
            )
    # All columns, because SQLite's own functions take text that is not UTF-8: to fetch it fails.
    ended = connection.execute("SELECT key, data, * FROM occurrence WHERE NOT live")
    for key, data, *_ in ended:
        try:
            ScheduledEvent.from_cloudevent_data(orjson.loads(data))
        except VALUE_ERRORS as error:
            raise DamagedTableError(
                f"table occurrence: the event {key} cannot be read: {error}"
            ) from error


def _verify_next_id_is_unused(connection: sqlite3.Connection, newest: str, next_id: int) -> None:
    """Return if the next row of a table is a new one: no row could be added otherwise."""
    if (connection.execute(f"SELECT {newest}").fetchone()[0] or 0) >= next_id:
        raise DamagedTableError(
            f"table sqlite_sequence: the next id is {next_id}, not after {newest}"
        )


def _verify_rows_readable(connection: sqlite3.Connection, live: Sequence[TrackedEvent]) -> None:
    for key, value in connection.execute("SELECT key, value FROM meta"):
        if not isinstance(value, str):
            raise DamagedTableError(f"table meta: the value of {key} is not text")
    journal = Journal(connection)
    if not isinstance(journal.head().hash, str):
        raise DamagedTableError("table journal: its last hash is not text")
    decisions = Decisions(connection, journal)
    for (occurrence,) in connection.execute(
        "SELECT DISTINCT occurrence FROM decision WHERE counts"
    ):
        decisions.for_occurrence(occurrence, counting=True)
    decisions.grants_by_occurrence([occurrence.id for occurrence in live])
    decisions.open_grants()
    standing_holds = StandingHolds(connection, journal)
    standing_holds.list_open()
    deliveries = Deliveries(connection)
    _verify_next_id_is_unused(
        connection, "max(id) FROM entry", deliveries.next_autoincrement_entry_id()
    )
    _verify_next_id_is_unused(
        connection, "max(number) FROM standing_hold", standing_holds.next_number()
    )
    deliveries.waiting_entries()
    for name, (state, _) in deliveries.sink_states_with_reasons().items():
        if state not in get_args(SinkState):
            raise DamagedTableError(f"table sink: the sink {name} has the state {state}")
    connection.execute("SELECT * FROM message").fetchall()
