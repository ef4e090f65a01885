"""The table of standing holds, and what the journal says about them.

A standing hold keeps all events that meet its conditions from a grant, for a time. The journal is
the authority. The table says the same and is quick to read. Before each grant and claim,
`relay.approvals.standing_hold_engine` compares both, and corrects the table;
``imds-relay audit`` reports what differs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime

import orjson
from pydantic import TypeAdapter

from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_sortable, parse_timestamp
from relay.store import StandingHold
from relay.store.journal import Journal
from relay.store.rows import PageLimit, next_autoincrement_id, parse_page, parse_rows

_STANDING_HOLD = TypeAdapter(StandingHold)
CREATED, ENDED, EXPIRED = (f"standing-hold.{change}" for change in ("created", "ended", "expired"))
"""The names of the events about a standing hold."""


class StandingHolds:
    """Reads and writes the table of standing holds, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection, journal: Journal) -> None:
        self._connection = connection
        self._journal = journal
        self._open: tuple[StandingHold, ...] | None = None  # until the table changes
        self.compared_at: datetime | None = None
        """For which moment the table was found to say what the journal says; None: not since the
        table changed."""

    def list_open(self) -> tuple[StandingHold, ...]:
        """Return the standing holds that were not ended and did not expire, oldest first.

        While none changes, a transaction reads them once, and this returns the same object.
        """
        if self._open is None:
            self._open = tuple(
                self._select("INDEXED BY standing_hold_open WHERE ended IS NULL ORDER BY number")
            )
        return self._open

    def find(self, hold_id: str) -> StandingHold | None:
        """Return a standing hold, also one that is over."""
        return next(iter(self._select("WHERE hold_id = ?", hold_id)), None)

    def page(
        self, before: int | None, limit: PageLimit, *, only_open: bool
    ) -> tuple[list[StandingHold], bool]:
        """Return the newest standing holds with a number less than ``before``, newest first.

        The second value says whether there are more.
        """
        condition = "ended IS NULL AND " if only_open else ""
        rows = self._rows(
            f"WHERE {condition}number < coalesce(?, 9e18) ORDER BY number DESC", before
        )
        return parse_page(_STANDING_HOLD, rows, ("conditions", "within", "reason"), limit)

    def count_created(self, principal: str, since: datetime, until: datetime) -> int:
        """Return how many standing holds a principal made after ``since`` and before ``until``."""
        row = self._connection.execute(
            "SELECT count(*) FROM standing_hold WHERE principal = ? AND created > ? "
            "AND created < ?",
            (principal, format_sortable(since), format_sortable(until)),
        ).fetchone()
        return int(row[0])

    def next_number(self) -> int:
        """Return the number of the next standing hold."""
        return next_autoincrement_id(self._connection, "standing_hold")

    def add(self, hold: StandingHold) -> None:
        """Store a standing hold, in place of the row with its id if there is one."""
        times = {
            name: format_sortable(moment) if moment is not None else None
            for name, moment in (
                ("starts", hold.starts),
                ("ends", hold.ends),
                ("created", hold.created),
                ("ended", hold.ended),
            )
        }
        self._forget_what_was_read()
        self._connection.execute("DELETE FROM standing_hold WHERE hold_id = ?", (hold.hold_id,))
        self._connection.execute(
            "INSERT INTO standing_hold VALUES (:number, :hold_id, :conditions, :within, :starts, "
            ":ends, :principal, :channel, :reason, :created, :ended, :ended_by, :position)",
            {**asdict(hold), **times},
        )

    def end(self, hold_id: str, at: datetime, by: str | None) -> None:
        """A standing hold was ended by a principal, or expired (None)."""
        self._forget_what_was_read()
        self._connection.execute(
            "UPDATE standing_hold SET ended = ?, ended_by = ? WHERE hold_id = ?",
            (format_sortable(at), by, hold_id),
        )

    def list_open_in_journal(self, now: datetime) -> list[StandingHold]:
        """Return the standing holds that are not over, from the journal alone, oldest first.

        Only rows that the chain holds are read. Their numbers are 0, because the journal has none.
        """
        rows = "SELECT position, kind FROM journal INDEXED BY journal_of_standing_holds "
        rows += "WHERE kind >= 'standing-hold.' AND kind < 'standing-hold/' "
        ends = "json_extract(CAST(body AS TEXT), '$.data.ends') >= ?"
        # The texts differ in precision, so they are compared to the second.
        values = (format_sortable(now)[:19],)
        try:
            found_rows = self._connection.execute(
                f"{rows} AND {ends} ORDER BY position", values
            ).fetchall()
        except sqlite3.OperationalError:
            # A damaged row may be no JSON, on which json_extract fails. This reads every row.
            checked = f"CASE WHEN json_valid(CAST(body AS TEXT)) THEN {ends} END"
            found_rows = self._connection.execute(
                f"{rows} AND {checked} ORDER BY position", values
            ).fetchall()
        found: dict[str, StandingHold] = {}
        for position, kind in found_rows:
            event = self._journal.verified_event_at_position(position, kind, None)
            if event is None:
                continue
            hold = _hold_from_event(position, event)
            if kind == CREATED:
                found[hold.hold_id] = hold
            else:
                found.pop(hold.hold_id, None)
        return [hold for hold in found.values() if hold.ends > now]

    def is_journal_row_damaged(self, hold: StandingHold) -> bool:
        """Whether the journal has the row of a standing hold, and the chain does not hold it."""
        row = self._connection.execute(
            "SELECT 1 FROM journal WHERE position = ? AND kind = ? "
            "AND CASE WHEN json_valid(CAST(body AS TEXT)) "
            "THEN json_extract(CAST(body AS TEXT), '$.data.holdId') = ? ELSE 1 END",
            (hold.position, CREATED, hold.hold_id),
        ).fetchone()
        if row is None:
            return False
        return self._journal.verified_event_at_position(hold.position, CREATED, None) is None

    def prune(self, before: datetime) -> None:
        """Delete the standing holds that were over before a moment."""
        self._connection.execute(
            "DELETE FROM standing_hold WHERE ended IS NOT NULL AND ended < ?",
            (format_sortable(before),),
        )

    def _forget_what_was_read(self) -> None:
        self._open = self.compared_at = None

    def _select(self, rest: str, *values: object) -> list[StandingHold]:
        return list(parse_rows(_STANDING_HOLD, self._rows(rest, *values)))

    def _rows(self, rest: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(
            "SELECT number, hold_id, conditions, within, starts, ends, principal, channel, "  # noqa: S608  # our own text
            f"reason, created, ended, ended_by, position FROM standing_hold {rest}",
            values,
        )


def standing_holds_only_in_first(
    first: Iterable[StandingHold], second: Iterable[StandingHold]
) -> list[StandingHold]:
    """Return the standing holds that are not the same in the second."""
    known = set(map(_fields_to_compare, second))
    return [hold for hold in first if _fields_to_compare(hold) not in known]


def _fields_to_compare(hold: StandingHold) -> tuple[object, ...]:
    """Return what decides which events a standing hold is about, and when."""
    return (hold.hold_id, hold.conditions, hold.within, hold.created, hold.starts, hold.ends)


def _hold_from_event(position: int, event: CloudEvent) -> StandingHold:
    """Return the standing hold that one of its events tells of."""
    data = event.data
    starts, ends, created = (parse_timestamp(data[key]) for key in ("starts", "ends", "created"))
    assert starts is not None  # noqa: S101  # `relay.approvals` wrote these times
    assert ends is not None  # noqa: S101
    assert created is not None  # noqa: S101
    return StandingHold(
        number=0,
        hold_id=data["holdId"],
        conditions=orjson.dumps(data["match"]).decode(),
        within=orjson.dumps(data.get("within", [])).decode(),
        starts=starts,
        ends=ends,
        principal=data["principal"],
        channel=data["channel"],
        reason=data["reason"],
        created=created,
        position=position,
    )
