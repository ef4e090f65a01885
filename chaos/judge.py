"""Counts what a trial offered, and what came of it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import orjson

from relay.errors import StoreError
from relay.simulator.azure import RecordedCall
from relay.store.audit import audit_claims, verify_journal
from relay.store.file import open_for_reading
from relay.store.journal import JournalRow, read_all_rows

T = TypeVar("T")
MOST_DESCRIBED = 5
"""Events that did not arrive of which the problems tell more."""
FAMILIES = ("event.", "approval.", "startrequest.")
"""What must reach each sink. Of the ``relay.*`` that wait, a newer takes the place of an older."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What came of some rounds of a fault."""

    rounds: int = 0
    offered: int = 0
    """Changes that Azure made, each of which stayed until it was recorded."""
    recorded: int = 0
    """Of these, those in the journal."""
    delivered: int = 0
    """Events that reached a sink, without repeats: each sink counts."""
    lost: int = 0
    """Changes that are not in the journal, and events of the journal that a sink did not get."""
    dead_letters: int = 0
    """Deliveries that were given up, and sent again by an operator after the fault."""
    repeated: int = 0
    """Deliveries of an event to a sink that had it."""
    unexpected: int = 0
    """Changes in the journal that Azure did not make, and events that are not in the journal."""
    start_requests: int = 0
    """POSTs that Azure got."""
    most_start_requests: int = 0
    """The most POSTs for one event, whatever its revision was."""
    most_in_flight: int = 0
    """The most POSTs for one event that Azure had not answered at the same time."""
    without_grant: int = 0
    """POSTs for events without a quorum, and claims that follow from no votes in the journal."""
    without_claim: int = 0
    """POSTs beyond the claims in the journal."""
    invalid_journals: int = 0
    """Journals whose chain of hashes does not hold."""
    problems: list[str] = field(default_factory=list)
    """What failed, for people. Each begins with how to run the round again."""

    @property
    def has_failed(self) -> bool:
        return bool(
            self.lost
            or self.unexpected
            or self.without_grant
            or self.without_claim
            or self.most_in_flight > 1
            or self.invalid_journals
            or self.problems
        )

    def add(self, other: Counts) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name in ("most_start_requests", "most_in_flight"):
                setattr(self, each.name, max(mine, theirs))
            else:
                setattr(self, each.name, mine + theirs)


@dataclass(slots=True)
class Offer:
    """What Azure did, and what people decided, in one trial."""

    changes: dict[str, list[str]] = field(default_factory=dict)
    """By EventId: the names of the changes, in order."""
    granted: set[str] = field(default_factory=set)
    """The EventIds for which enough people voted, with no hold."""

    def add(self, event_id: str, change: str) -> None:
        self.changes.setdefault(event_id, []).append(change)


def _read(file: Path, read: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
    """Return what is read from a state file, or ``otherwise`` while it cannot be read."""
    try:
        with contextlib.closing(open_for_reading(file)) as connection:
            return read(connection)
    except (StoreError, sqlite3.Error):
        return otherwise


def read_journal(file: Path) -> list[JournalRow]:
    """Return the rows of a journal; none while it cannot be read."""
    return _read(file, lambda connection: list(read_all_rows(connection)), [])


def read_changes(file: Path, after: int) -> list[tuple[int, str, str]]:
    """Return position, EventId and name of each ``event.*`` after a position.

    The EventId is in lower case and has no scope. None while the journal cannot be read.
    """

    def read(connection: sqlite3.Connection) -> list[tuple[int, str, str]]:
        rows = connection.execute(
            "SELECT position, event_key, kind FROM journal "
            "WHERE position > ? AND kind GLOB 'event.*' ORDER BY position",
            (after,),
        )
        return [(position, _event_id(key), kind) for position, key, kind in rows]

    return _read(file, read, [])


def audit(file: Path) -> tuple[bool, Sequence[str]]:
    """Return whether the chain of hashes of a journal holds, and its claims without a root."""

    def read(connection: sqlite3.Connection) -> tuple[bool, Sequence[str]]:
        verify_journal(connection)
        return True, audit_claims(connection).problems

    unreadable: tuple[bool, Sequence[str]] = (False, ())
    return _read(file, read, unreadable)


def describe_undelivered(file: Path, sink: str, ids: Iterable[str]) -> list[str]:
    """Return what the relay says of the deliveries of these events to a sink, for people."""
    found = []
    with contextlib.closing(open_for_reading(file)) as connection:
        for event_id in ids:
            row = connection.execute(
                "SELECT entry.id, type, state, attempts, reason FROM entry "
                "JOIN journal USING (position) WHERE sink = ? "
                "AND json_extract(CAST(body AS TEXT), '$.id') = ?",
                (sink, event_id),
            ).fetchone()
            found.append(f"{event_id}: {row}")
    return found


def events_to_deliver(rows: Iterable[JournalRow]) -> set[str]:
    return {orjson.loads(row.body)["id"] for row in rows if row.kind.startswith(FAMILIES)}


def judge(
    offer: Offer,
    journal: Path,
    received: Mapping[str, Sequence[Mapping[str, Any]]],
    posts: Sequence[RecordedCall],
) -> Counts:
    """Compare what was offered with the journal, with what sinks got, and with the StartRequests.

    ``received`` holds the CloudEvents that each sink got, with repeats.
    """
    rows = read_journal(journal)
    valid, without_root = audit(journal)
    counts = Counts(
        invalid_journals=0 if valid else 1,
        without_grant=len(without_root),
        problems=[*without_root] if valid else ["the chain of the journal does not hold"],
    )
    _judge_changes(counts, offer, rows)
    wanted = events_to_deliver(rows)
    for sink, events in received.items():
        missing = _judge_sink(counts, sink, wanted, events)
        counts.problems += describe_undelivered(journal, sink, sorted(missing)[:MOST_DESCRIBED])
    _judge_posts(counts, offer, rows, posts)
    return counts


def _judge_changes(counts: Counts, offer: Offer, rows: Sequence[JournalRow]) -> None:
    recorded: dict[str, list[str]] = {}
    for row in rows:
        if row.kind.startswith("event."):
            recorded.setdefault(_event_id(row.event_key), []).append(row.kind)
    for event_id in offer.changes.keys() | recorded.keys():
        made = offer.changes.get(event_id, [])
        known = recorded.get(event_id, [])
        missing, surplus = Counter(made) - Counter(known), Counter(known) - Counter(made)
        counts.offered += len(made)
        counts.recorded += len(made) - missing.total()
        counts.lost += missing.total()
        counts.unexpected += surplus.total()
        if known != made:
            counts.problems.append(f"{event_id}: Azure made {made}, the journal has {known}")


def _judge_sink(
    counts: Counts, sink: str, wanted: set[str], events: Iterable[Mapping[str, Any]]
) -> set[str]:
    """Count what arrived, and return the ids of the events that did not."""
    types = ((str(each["id"]), each["type"].removeprefix("io.imdsrelay.")) for each in events)
    got = [event_id for event_id, kind in types if kind.startswith(FAMILIES)]
    counts.delivered += len(set(got) & wanted)
    counts.repeated += len(got) - len(set(got))
    counts.lost += len(wanted - set(got))
    counts.unexpected += len(set(got) - wanted)
    if wanted != set(got):
        counts.problems.append(
            f"sink {sink}: {len(wanted - set(got))} events did not arrive, and "
            f"{len(set(got) - wanted)} are not in the journal"
        )
    return wanted - set(got)


def _judge_posts(
    counts: Counts, offer: Offer, rows: Sequence[JournalRow], posts: Sequence[RecordedCall]
) -> None:
    sent = Counter(event_id.lower() for post in posts for event_id in post.event_ids)
    claims = Counter(_event_id(row.event_key) for row in rows if row.kind == "claim")
    counts.start_requests = sent.total()
    counts.most_start_requests = max(sent.values(), default=0)
    for event_id in sent:
        in_flight = _most_in_flight(event_id, posts)
        counts.most_in_flight = max(counts.most_in_flight, in_flight)
        if in_flight > 1:
            counts.problems.append(f"{event_id}: {in_flight} StartRequests at the same time")
    for event_id, number in sent.items():
        if event_id not in offer.granted:
            counts.without_grant += number
            counts.problems.append(f"{event_id}: {number} StartRequests without a quorum")
        if number > claims[event_id]:
            counts.without_claim += number - claims[event_id]
            counts.problems.append(
                f"{event_id}: {number} StartRequests, and {claims[event_id]} claims in the journal"
            )


def _most_in_flight(event_id: str, posts: Sequence[RecordedCall]) -> int:
    changes: list[tuple[datetime, int]] = []
    for post in posts:
        if event_id in map(str.lower, post.event_ids):
            changes.append((post.at, 1))
            if post.ended_at is not None:
                changes.append((post.ended_at, -1))  # sorts before a POST of the same moment
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _event_id(event_key: str | None) -> str:
    return (event_key or "").partition("@")[0]
