"""Votes, holds, grants and reminders of each event: a fold of its rows of the journal.

No table holds them, so nothing can differ from the journal. `fold` is pure. `Approvals` reads the
rows in a transaction, verifies that the hash chain holds them, and keeps what it folded until the
next row of the event. What follows from the rows is decided in `relay.approvals`.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import orjson

from relay.errors import StoreError
from relay.events.cloudevent import CloudEvent
from relay.events.remarks import remarks_in
from relay.events.timestamps import parse_timestamp
from relay.store import Decision, Grant, TrackedEvent
from relay.store.journal import APPROVAL_ROWS, Journal
from relay.store.occurrences import Occurrences
from relay.store.standing_holds import NO_HOLDS, VALUE_ERRORS, HoldCache

MAX_ENDED_AT_START = 1000
"""Ended events that are looked at after a start: what follows from an end can be missing."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventApprovals:
    """What the rows of one event key say, up to the row with this position and hash."""

    position: int = 0
    hash: str = ""
    decisions: tuple[Decision, ...] = ()
    """The votes and holds that were not replaced, released or voided, oldest first."""
    grants: tuple[Grant, ...] = ()
    """Every grant, oldest first."""
    reminded: tuple[tuple[int, str], ...] = ()
    """Position and revision of each reminder."""
    damage: str | None = None
    """Why the rows cannot be trusted. Then nothing else is known."""

    @property
    def is_open(self) -> bool:
        """Whether a vote or hold is in force, or a StartRequest has no final answer."""
        return bool(self.unused_decisions) or any(grant.is_open for grant in self.grants)

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


def fold(before: EventApprovals, position: int, kind: str, body: bytes) -> EventApprovals:
    """Return what is known after one more row of `APPROVAL_ROWS`. Pure.

    Raises one of `VALUE_ERRORS` for a row that the relay did not write.
    """
    if kind in ("claim", "answer"):
        note = orjson.loads(body)
        index = _index_of(before.grants, lambda grant: grant.id == note["granted"])
        if index is None:
            return before
        grant = before.grants[index]
        if kind == "claim":
            grant = replace(grant, state="sent", attempts=note["attempt"], status=None)
        else:
            status = note["status"]
            grant = replace(
                grant, state=note["state"], status=grant.status if status is None else status
            )
        return replace(before, grants=_with(before.grants, index, grant))
    event = CloudEvent.parse(body)
    data = event.data
    ended = data.get("ended", ())
    decisions = tuple(each for each in before.decisions if each.approval_id not in ended)
    match kind:
        case "approval.recorded" if data["decision"] != "release":
            return replace(before, decisions=(*decisions, decision_of(position, event)))
        case "approval.granted":
            return replace(before, grants=(*before.grants, _grant_of(position, event, decisions)))
        case "approval.reminder":
            reminded = (*before.reminded, (position, data["revision"]))
            return replace(before, reminded=reminded)
        case "startrequest.accepted" | "startrequest.failed":
            return replace(before, grants=_with_final_answer(before.grants, kind, data))
    return replace(before, decisions=decisions)


def decision_of(position: int, event: CloudEvent) -> Decision:
    """Return the decision that the ``approval.recorded`` at a position tells of."""
    data = event.data
    return Decision(
        approval_id=data["approvalId"],
        decision=data["decision"],
        principal=data["principal"],
        channel=data["channel"],
        revision=data["revision"],
        remarks=remarks_in(data),
        at=_time_of(event),
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
        granted_at=_time_of(event),
        state="granted",
        attempts=0,
        status=None,
        dry_run="dryRun" in event.data,
        cause=cause if is_by_message and cause else event.id,
    )


def _with_final_answer(
    grants: tuple[Grant, ...], kind: str, data: Mapping[str, Any]
) -> tuple[Grant, ...]:
    """Return the grants with the end of the one that a ``startrequest.*`` names."""
    index = _index_of(
        grants,
        lambda grant: (
            grant.is_open and not grant.dry_run and grant.approval_id == data["approvalId"]
        ),
    )
    if index is None:
        return grants
    grant, status = grants[index], data["status"]
    if kind == "startrequest.accepted":
        grant = replace(grant, state="accepted", status=status)
    elif status == 400 and grant.state == "sent" and grant.status is None:  # HTTP
        grant = replace(grant, state="refused", status=status)
    else:  # a 400 that an `answer` told before was not final
        grant = replace(grant, state="failed")
    return _with(grants, index, grant)


def _index_of(grants: Sequence[Grant], is_meant: Callable[[Grant], bool]) -> int | None:
    """Return where the newest such grant is; None if it was pruned, with an event long ended."""
    return next((i for i in reversed(range(len(grants))) if is_meant(grants[i])), None)


def _with(grants: tuple[Grant, ...], index: int, grant: Grant) -> tuple[Grant, ...]:
    return (*grants[:index], grant, *grants[index + 1 :])


def _time_of(event: CloudEvent) -> datetime:
    at = parse_timestamp(event.attributes["time"])
    assert at is not None  # noqa: S101  # every event has a time
    return at


@dataclass(slots=True)
class FoldCache:
    """What was folded, by event key, for all transactions of a store.

    An entry counts while the newest row of its event has the same position and hash, so it stays
    right when a transaction is rolled back.
    """

    folded: dict[str, EventApprovals] = field(default_factory=dict)
    watched: set[str] | None = None
    """The keys of events from whose end something may have to follow; None: not known yet."""
    whole: range = range(0)
    """Positions between which no row of the journal is missing."""
    told: set[str] = field(default_factory=set)
    """The keys whose damage was logged."""
    holds: HoldCache = field(default_factory=HoldCache)
    """Standing holds."""

    def clear(self) -> None:
        """Forget everything but what was told."""
        self.folded.clear()
        self.watched, self.whole = None, range(0)
        self.holds.folded = NO_HOLDS


class Approvals:
    """Reads what the journal says about approvals, inside a transaction."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        journal: Journal,
        occurrences: Occurrences,
        cache: FoldCache,
    ) -> None:
        self._connection = connection
        self._journal = journal
        self._occurrences = occurrences
        self._cache = cache
        self._checked: dict[str, int] = {}
        """Where the journal ended when the newest row of an event was looked at."""

    def of_key(self, event_key: str, *, afresh: bool = False) -> EventApprovals:
        """Return what the journal says about an event key.

        ``afresh``: read and verify all of its rows again, as before a StartRequest, and compare
        them with what was known.
        """
        end = self._journal.head().position
        if not afresh and self._checked.get(event_key) == end:
            return self._cache.folded.get(event_key, NOTHING)
        self._checked[event_key] = end
        newest = self._journal.newest_of(APPROVAL_ROWS, event_key)
        if newest is None:
            self._cache.folded.pop(event_key, None)
            return NOTHING
        known = self._cache.folded.get(event_key)
        if not afresh and known is not None and (known.position, known.hash) == newest:
            return known
        if known is not None and not self._journal.holds(known.position, known.hash):
            self._cache.whole = range(0)  # the row is gone: by a rollback, or somebody removed it
            known = None
        if known is None or known.damage is not None:
            known = NOTHING
        folded = self._fold(event_key, known, newest)
        if afresh and known is not NOTHING and self._fold(event_key, NOTHING, newest) != folded:
            damage = f"journal: rows before position {newest[0]} were changed or removed"
            folded = EventApprovals(*newest, damage=damage)
            self._tell(event_key, damage)
        self._cache.folded[event_key] = folded
        if folded.is_open and self._cache.watched is not None:
            self._cache.watched.add(event_key)
        return folded

    def _fold(
        self, event_key: str, known: EventApprovals, newest: tuple[int, str]
    ) -> EventApprovals:
        position, digest = known.position, known.hash
        damage: str | None = None
        try:
            if known is NOTHING:
                self._require_no_gap_since(self._journal.first_position_about(event_key))
            for row in self._journal.verified_rows(APPROVAL_ROWS, event_key, after=known.position):
                position, digest = row.position, row.hash
                known = fold(known, row.position, row.kind, row.body)
        except StoreError as error:
            damage = str(error)
        except VALUE_ERRORS as error:
            text = f"{type(error).__name__}: {error}"
            damage = f"journal: the row at position {position} cannot be read ({text})"
        if damage is None:
            return replace(known, position=position, hash=digest)
        self._tell(event_key, damage)
        return EventApprovals(*newest, damage=damage)

    def _require_no_gap_since(self, first: int) -> None:
        """Raise StoreError if a row is missing from a position on. Each is looked for once."""
        whole, end = self._cache.whole, self._journal.head().position
        whole = range(whole.start, min(whole.stop, end + 1))  # a rollback can have taken rows
        if whole and first >= whole.start:
            first = whole.stop
        elif whole:
            self._journal.require_no_gap(first, whole.start)
            whole, first = range(first, whole.stop), whole.stop
        else:
            whole = range(first, first)
        self._journal.require_no_gap(first, end)
        self._cache.whole = range(whole.start, end + 1)

    def _tell(self, event_key: str, damage: str) -> None:
        if event_key not in self._cache.told:
            self._cache.told.add(event_key)
            _log.error("approvals of event %s are off: %s", event_key, damage)

    def of_occurrence(self, occurrence: TrackedEvent, *, afresh: bool = False) -> EventApprovals:
        """Return what the journal says about one occurrence, and the holds of earlier ones.

        A hold belongs to the EventId: it is in force again when the event comes back.
        """
        folded = self.of_key(occurrence.key, afresh=afresh)
        if folded.position < occurrence.position and not folded.decisions:
            return NOTHING if folded.damage is None else folded
        later = None
        if not occurrence.live:  # a live one is the newest
            later = self._occurrences.find_following_occurrence(occurrence)
        end = later.position if later is not None else folded.position + 1

        def is_about(position: int) -> bool:
            return occurrence.position <= position < end

        return replace(
            folded,
            decisions=tuple(
                decision
                for decision in folded.decisions
                if is_about(decision.position)
                or (decision.decision == "hold" and decision.position < end)
            ),
            grants=tuple(
                replace(grant, occurrence=occurrence.id)
                for grant in folded.grants
                if is_about(grant.id)
            ),
            reminded=tuple(each for each in folded.reminded if is_about(each[0])),
        )

    def grants_by_key(self, event_keys: Sequence[str]) -> dict[str, tuple[Grant, ...]]:
        """Return every grant of the newest occurrence of each event that has any rows."""
        if not event_keys:
            return {}
        found = {}
        rows = self._connection.execute(
            "SELECT DISTINCT event_key FROM journal "  # noqa: S608  # our own text
            f"WHERE event_key IN ({', '.join('?' * len(event_keys))}) AND {APPROVAL_ROWS}",
            event_keys,
        ).fetchall()
        for (key,) in rows:
            newest = self._occurrences.find_newest_occurrence(key)
            if newest is not None:
                found[key] = self.of_occurrence(newest).grants
        return found

    def decisions_about(self, occurrence: TrackedEvent, limit: int) -> list[Decision]:
        """Return the newest decisions about an occurrence, oldest first, in force or not."""
        later = self._occurrences.find_following_occurrence(occurrence)
        rows = self._connection.execute(
            f"SELECT position, body FROM journal WHERE event_key = ? AND {APPROVAL_ROWS} "  # noqa: S608  # our own text
            "AND kind = 'approval.recorded' AND position >= ? AND position < ? "
            "ORDER BY position DESC LIMIT ?",
            (occurrence.key, occurrence.position, later.position if later else 2**62, limit),
        ).fetchall()
        return [decision_of(position, CloudEvent.parse(body)) for position, body in reversed(rows)]

    # --- where something may have to follow

    def exist(self) -> bool:
        """Whether anything was ever decided about any event that the journal still holds."""
        row = self._connection.execute(
            f"SELECT EXISTS (SELECT 1 FROM journal INDEXED BY journal_of_approvals "  # noqa: S608  # our own text
            f"WHERE {APPROVAL_ROWS})"
        ).fetchone()
        return bool(row[0])

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
            for occurrence in self._occurrences.live_with_keys(event_keys)
            if all_live or self.of_key(occurrence.key) is not NOTHING
        ]
        ended = [
            occurrence
            for occurrence in self._watched_ended_occurrences(event_keys)
            if not occurrence.live and self._needs_check_after_end(occurrence)
        ]
        return live + ended

    def _needs_check_after_end(self, occurrence: TrackedEvent) -> bool:
        approvals = self.of_occurrence(occurrence)
        return any(grant.is_open for grant in approvals.grants) or any(
            decision.decision == "approve" for decision in approvals.unused_decisions
        )

    def _watched_ended_occurrences(
        self, event_keys: Sequence[str] | None
    ) -> Iterator[TrackedEvent]:
        watched = self._watched_keys()
        for key in sorted(watched if event_keys is None else watched.intersection(event_keys)):
            yield from self._occurrences.all_of_key(key)

    def _watched_keys(self) -> set[str]:
        if self._cache.watched is None:
            rows = self._connection.execute(
                "SELECT key FROM occurrence INDEXED BY occurrence_live WHERE live UNION "
                "SELECT key FROM (SELECT key FROM occurrence INDEXED BY occurrence_ended "
                "WHERE NOT live ORDER BY last_changed DESC LIMIT ?)",
                (MAX_ENDED_AT_START,),
            ).fetchall()
            self._cache.watched = {key for (key,) in rows if self.of_key(key).is_open}
        return self._cache.watched

    def open_grants(self, scope: str | None = None) -> list[tuple[Grant, TrackedEvent]]:
        """Return the grants whose StartRequest has no final answer, with their occurrences.

        Grants of dry runs are left out. ``scope``: only consider its events.
        """
        return sorted(
            (
                (grant, occurrence)
                for occurrence in self.occurrences_to_check(all_live=False)
                if scope in (None, occurrence.scope)
                for grant in self.of_occurrence(occurrence).grants
                if grant.is_open and not grant.dry_run
            ),
            key=lambda found: found[0].id,
        )
