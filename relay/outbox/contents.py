"""Verifies that the tables of a state file can be read as what they hold.

SQLite sees damage to its own structure. It does not see damage inside a value, such as the JSON of
an event. The relay would fail on that at each start, so it must know before it uses the file.
"""

from __future__ import annotations

import sqlite3

from relay.outbox.decisions import Decisions
from relay.outbox.deliveries import Deliveries
from relay.outbox.event_keys import EventKeyFormat
from relay.outbox.fleet import FleetTables
from relay.outbox.journal import Journal
from relay.outbox.snapshot import Snapshot
from relay.outbox.standing_holds import StandingHolds

_TABLES = ("occurrence", "decision", "start_request", "standing_hold", "entry", "agent", "sighting")
"""Tables whose indexes are compared with their rows. A value that differs shows there."""
_VALUE_ERRORS = (ValueError, LookupError, TypeError, AttributeError)
"""What the readers of the tables raise for a value that is not what was written."""


class DamagedContents(Exception):
    """A table holds something that the relay did not write. The text says what."""


def verify_contents(connection: sqlite3.Connection, keys: EventKeyFormat) -> None:
    """Read what the relay reads after its start, and return if that is possible.

    The journal is left out, because ``imds-relay audit`` verifies it. Raises DamagedContents and
    sqlite3.Error.
    """
    for table in _TABLES:
        problem = connection.execute(f"PRAGMA integrity_check('{table}')").fetchone()[0]
        if problem != "ok":
            raise DamagedContents(f"table {table}: {problem}")
    try:
        _verify_occurrences(connection, keys)
        _verify_rows_readable(connection, keys)
    except _VALUE_ERRORS as error:
        raise DamagedContents(f"{type(error).__name__}: {error}") from error


def _verify_occurrences(connection: sqlite3.Connection, keys: EventKeyFormat) -> None:
    for occurrence in Snapshot(connection, keys).live():
        event = occurrence.event
        if occurrence.key != keys.make_key(occurrence.scope, event.event_id):
            raise DamagedContents(
                f"table occurrence: the event {occurrence.key} has the EventId {event.event_id}"
            )
    over = connection.execute(
        "SELECT key FROM occurrence WHERE NOT live AND NOT json_valid(data) LIMIT 1"
    ).fetchone()
    if over is not None:
        raise DamagedContents(f"table occurrence: the event {over[0]} is not JSON")


def _verify_rows_readable(connection: sqlite3.Connection, keys: EventKeyFormat) -> None:
    journal = Journal(connection)
    decisions = Decisions(connection, journal)
    for occurrence in decisions.unsettled_occurrences(all_live=False):
        decisions.for_occurrence(occurrence, counting=True)
    decisions.open_grants()
    StandingHolds(connection, journal).open()
    deliveries = Deliveries(connection)
    deliveries.waiting()
    deliveries.sink_states()
    if keys.with_scope:
        fleet = FleetTables(connection)
        fleet.agents()
        fleet.sightings([occurrence.key for occurrence in Snapshot(connection, keys).live()])
