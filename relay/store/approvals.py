"""Votes, holds, grants and reminders of each event: a fold of its rows of the journal.

No table holds them, so nothing can differ from the journal. `fold` is pure. `Approvals` reads the
rows in a transaction, verifies that the hash chain holds them, and remembers what it folded: later
only newer rows are read. What follows is decided in `relay.approvals`.
"""

from __future__ import annotations

import logging
import sqlite3
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from relay.errors import StoreError
from relay.events.cloudevent import CloudEvent
from relay.events.data_types import remarks_in
from relay.events.timestamps import parse_timestamp
from relay.store import Decision, Grant, TrackedEvent
from relay.store.journal import APPROVAL_ROWS, Journal, JournalRow
from relay.store.occurrences import Occurrences
from relay.store.standing_holds import HoldMemory

MAX_ENDED_AT_START = 1000
"""Ended events that are looked at after a start: what follows from an end can be missing."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventApprovals:
    """What the rows of one event key say."""

    damage: str | None = None
    """Why the rows cannot be trusted. Then nothing else is known."""
    decisions: tuple[Decision, ...] = ()
    """The votes and holds that were not replaced, released or voided, oldest first."""
    grants: tuple[Grant, ...] = ()
    reminded: tuple[tuple[int, str], ...] = ()
    """Position and revision of each reminder."""

    @property
    def is_open(self) -> bool:
        """Whether a vote or hold is in force, or a StartRequest has no final answer."""
        return bool(self.unused_decisions) or any(grant.is_open for grant in self.grants)

    @property
    def may_have_been_accepted(self) -> bool:
        """Whether IMDS may have accepted a StartRequest: with damage, nobody knows."""
        return self.damage is not None or any(each.may_have_been_accepted for each in self.grants)

    @property
    def unused_decisions(self) -> tuple[Decision, ...]:
        """The decisions but for the votes on what IMDS has accepted: nothing follows from these."""
        accepted = {grant.revision for grant in self.grants if grant.state == "accepted"}
        return tuple(
            decision
            for decision in self.decisions
            if decision.decision == "hold" or decision.revision not in accepted
        )


NOTHING = EventApprovals()


def fold(before: EventApprovals, row: JournalRow) -> EventApprovals:
    """Return what is known after one more row. Raises one of `VALUE_ERRORS` if it is not ours."""
    if row.kind in ("claim", "answer"):
        note = orjson.loads(row.body)
        if row.kind == "claim":
            changes = {"state": "sent", "attempts": note["attempt"], "status": None}
        else:
            changes = {"state": note["state"], "status": note["status"]}
        changes["is_answered"] = row.kind == "answer"
        return _with_grant(before, lambda grant: grant.id == note["granted"], changes)
    event = CloudEvent.parse(row.body)
    data = event.data
    ended = data.get("ended", ())
    decisions = tuple(each for each in before.decisions if each.approval_id not in ended)
    match row.kind:
        case "approval.recorded" if data["decision"] != "release":
            return replace(before, decisions=(*decisions, decision_of(row.position, event)))
        case "approval.granted":
            grant = _grant_of(row.position, event, decisions)
            return replace(before, grants=(*before.grants, grant))
        case "approval.reminder":
            reminded = (*before.reminded, (row.position, data["revision"]))
            return replace(before, reminded=reminded)
        case "startrequest.accepted" | "startrequest.failed":
            state = "refused" if data["status"] == 400 else "failed"  # HTTP
            if row.kind == "startrequest.accepted":
                state = "accepted"
            return _with_grant(
                before,
                lambda grant: grant.is_open and grant.approval_id == data["approvalId"],
                {"state": state, "status": data["status"], "is_answered": True},
            )
    return replace(before, decisions=decisions)


def _with_grant(
    before: EventApprovals, is_meant: Callable[[Grant], bool], changes: Mapping[str, Any]
) -> EventApprovals:
    """Change the newest such grant; none is there if it was pruned, with an event long ended."""
    grants = list(before.grants)
    for index in reversed(range(len(grants))):
        if is_meant(grants[index]):
            grants[index] = replace(grants[index], **changes)
            return replace(before, grants=tuple(grants))
    return before


def decision_of(position: int, event: CloudEvent) -> Decision:
    data, at = event.data, parse_timestamp(event.attributes["time"])
    assert at is not None  # noqa: S101  # every event has a time
    return Decision(
        approval_id=data["approvalId"],
        decision=data["decision"],
        principal=data["principal"],
        channel=data["channel"],
        revision=data["revision"],
        remarks=remarks_in(data),
        at=at,
        expires=parse_timestamp(data["expires"]),
        dry_run="dryRun" in data,
        recorded_event_id=event.id,
        message_id=event.attributes["causationid"] if data["channel"] == "amqp" else None,
        position=position,
    )


def _grant_of(position: int, event: CloudEvent, decisions: Iterable[Decision]) -> Grant:
    cause = event.attributes.get("causationid")
    is_by_message = any(decision.message_id == cause for decision in decisions if cause)
    return Grant(
        id=position,
        occurrence=0,
        revision=event.data["revision"],
        rule=event.data["rule"],
        approval_id=event.data["approvalId"],
        state="granted",
        attempts=0,
        status=None,
        cause=cause if is_by_message and cause else event.id,
    )


@dataclass(slots=True)
class Memory(HoldMemory):
    """What transactions have folded. Each has a copy, which takes its place if it is committed."""

    folded: dict[str, tuple[int, EventApprovals]] = field(default_factory=dict)
    """What the rows of an event up to a position say."""
    is_loaded: bool = False
    """Whether all events are there from whose end something may have to follow."""

    def copy(self) -> Memory:
        folded = {key: each for key, each in self.folded.items() if each[1] is not NOTHING}
        return replace(self, folded=folded)


@dataclass(eq=False, slots=True)
class Approvals:
    connection: sqlite3.Connection
    journal: Journal
    occurrences: Occurrences
    memory: Memory

    def forget_pruned(self, *, any_row: bool) -> None:
        """Forget events that are over, but those in force if no row of the journal was pruned.

        What is live stays: its rows are not pruned, and they are compared with it.
        """
        rows = self.connection.execute("SELECT key FROM occurrence WHERE live").fetchall()
        live = {key for (key,) in rows}
        self.memory.folded = {
            key: (upto, each)
            for key, (upto, each) in self.memory.folded.items()
            if key in live or (each.is_open and not any_row)
        }
        self.memory.is_loaded = False

    def of_key(self, event_key: str) -> EventApprovals:
        if event_key in self.memory.damaged:
            return EventApprovals(self.memory.damaged[event_key])
        end = self.journal.head().position
        upto, known = self.memory.folded.get(event_key, (0, NOTHING))
        if upto != end:
            try:
                known = self.journal.fold(known, fold, APPROVAL_ROWS, event_key, after=upto)
            except StoreError as error:
                return self._set_damage(event_key, str(error))
            self.memory.folded[event_key] = end, known
        return known

    def _set_damage(self, event_key: str, damage: str) -> EventApprovals:
        _log.error("approvals of event %s are off: %s", event_key, damage)
        self.memory.damaged[event_key] = damage
        return EventApprovals(damage)

    def verify(self, event_key: str) -> None:
        """Read and verify all rows of an event again, as before a StartRequest, and compare.

        What differs is damage, which turns its approvals off.
        """
        known = self.of_key(event_key)
        if event_key in self.memory.damaged:
            return
        try:
            if self.journal.fold(NOTHING, fold, APPROVAL_ROWS, event_key) != known:
                self._set_damage(event_key, "journal: rows about it were changed or removed")
        except StoreError as error:
            self._set_damage(event_key, str(error))

    def of_occurrence(self, occurrence: TrackedEvent) -> EventApprovals:
        """Return what the journal says about one occurrence, and the holds of earlier ones.

        A hold belongs to the EventId: it is in force again when the event comes back.
        """
        folded = self.of_key(occurrence.key)
        if folded is NOTHING:
            return NOTHING
        about = self._positions_about(occurrence)
        return replace(
            folded,
            decisions=tuple(
                each
                for each in folded.decisions
                if each.position in about
                or (each.decision == "hold" and each.position < about.stop)
            ),
            grants=tuple(
                replace(each, occurrence=occurrence.id)
                for each in folded.grants
                if each.id in about
            ),
            reminded=tuple(each for each in folded.reminded if each[0] in about),
        )

    def decisions_about(self, occurrence: TrackedEvent, limit: int) -> list[Decision]:
        """Return the newest decisions about an occurrence, oldest first, in force or not."""
        about = self._positions_about(occurrence)
        rows = self.connection.execute(
            f"SELECT position, body FROM journal WHERE event_key = ? AND {APPROVAL_ROWS} "  # noqa: S608  # our own text
            "AND kind = 'approval.recorded' AND position >= ? AND position < ? "
            "ORDER BY position DESC LIMIT ?",
            (occurrence.key, about.start, about.stop, limit),
        ).fetchall()
        return [decision_of(position, CloudEvent.parse(body)) for position, body in reversed(rows)]

    def _positions_about(self, occurrence: TrackedEvent) -> range:
        later = None
        if not occurrence.live:  # a live one is the newest
            later = self.occurrences.find_following_occurrence(occurrence)
        return range(occurrence.position, later.position if later is not None else sys.maxsize)

    # --- where something may have to follow

    def exist(self) -> bool:
        """Whether anything was ever decided about any event that the journal still holds."""
        rows = self.connection.execute(
            f"SELECT 1 FROM journal INDEXED BY journal_of_approvals WHERE {APPROVAL_ROWS} LIMIT 1"  # noqa: S608  # our own text
        )
        return rows.fetchone() is not None

    def occurrences_to_check(
        self, *, all_live: bool, event_keys: Sequence[str] | None = None
    ) -> list[TrackedEvent]:
        """Return the occurrences for which a transition can be due, live ones first.

        ``all_live``: all live ones; otherwise those with rows about approvals. Ended ones are among
        them while a vote counts or a StartRequest has no final answer. ``event_keys``: only
        consider the events with these keys.
        """
        live = [
            occurrence
            for occurrence in self.occurrences.live_occurrences(event_keys)
            if all_live or self.of_key(occurrence.key) is not NOTHING
        ]
        keys = self._keys_to_check() if event_keys is None else sorted(event_keys)
        ended = [
            occurrence
            for key in keys
            if self.of_key(key).is_open
            for occurrence in self.occurrences.all_of_key(key)
            if not occurrence.live and self._needs_check_after_end(occurrence)
        ]
        return live + ended

    def _needs_check_after_end(self, occurrence: TrackedEvent) -> bool:
        approvals = self.of_occurrence(occurrence)
        return any(grant.is_open for grant in approvals.grants) or any(
            decision.decision == "approve" for decision in approvals.unused_decisions
        )

    def _keys_to_check(self) -> list[str]:
        if not self.memory.is_loaded:
            rows = self.connection.execute(
                "SELECT key FROM occurrence INDEXED BY occurrence_live WHERE live UNION "
                "SELECT key FROM (SELECT key FROM occurrence INDEXED BY occurrence_ended "
                "WHERE NOT live ORDER BY last_changed DESC LIMIT ?)",
                (MAX_ENDED_AT_START,),
            ).fetchall()
            for (key,) in rows:
                self.of_key(key)
            self.memory.is_loaded = True
        return sorted(key for key, (_, each) in self.memory.folded.items() if each.is_open)

    def open_grants(self, scope: str | None = None) -> list[tuple[Grant, TrackedEvent]]:
        """Return the grants without a final answer, oldest first, and their occurrences."""
        return sorted(
            (
                (grant, occurrence)
                for occurrence in self.occurrences_to_check(all_live=False)
                if scope in (None, occurrence.scope)
                for grant in self.of_occurrence(occurrence).grants
                if grant.is_open
            ),
            key=lambda found: found[0].id,
        )
