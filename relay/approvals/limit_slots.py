"""Collects who takes the slots of the limits and who wants them, inside a transaction.

`engine` asks `LimitSlots` for which limits an event waits, and which events have slots and can be
granted. The order in which events get slots:

1. Events that are Started, that are over and in their rest, or whose StartRequest Azure may have
   accepted. They take slots whatever the limits say.
2. Events whose StartRequest was sent and has no final answer, in the order of their grants.
3. Granted events that can still be sent, in the order of their grants.
4. Events that could be granted: the earliest NotBefore first, those without one last.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from relay.approvals.limits import (
    NEVER,
    Claimant,
    CountMachines,
    Limit,
    Machine,
    Taking,
    WaitingFor,
    assign,
)
from relay.approvals.status import ApprovalStatus, InFlight
from relay.approvals.transitions import can_unsent_grant_keep_slot, is_grantable
from relay.events.timestamps import parse_timestamp
from relay.store import TrackedEvent
from relay.store.transaction import Transaction

StatusOf = Callable[[Transaction, TrackedEvent, datetime], ApprovalStatus]
"""Returns the status of an event without the limits."""
Place = tuple[int, datetime, str, int]
"""What decides who is first in line."""


@dataclass(slots=True)
class _Line:
    """Who has slots and who waits, at one moment of one transaction."""

    tx: Transaction
    changes: int
    """How many rows had changed when this was made: after another change it is void."""
    now: datetime
    in_flight: InFlight
    sizes: Mapping[str, int]
    going: list[Taking]
    places: list[tuple[Place, Claimant]]
    """The events in line, first one first."""
    waits: Mapping[int, tuple[WaitingFor, ...]]
    """For what each event in line waits, by occurrence."""

    @property
    def grantable(self) -> list[int]:
        """The occurrences that have no grant, and their slots, first in line first."""
        return [
            each.occurrence
            for place, each in self.places
            if place[0] == _WITHOUT_GRANT and not self.waits[each.occurrence]
        ]

    @property
    def next_rest_end(self) -> datetime | None:
        """When a slot becomes free by time alone; None: never."""
        ends = [taking.until for taking in self.going if taking.until != NEVER]
        return min(ends, default=None)


_SENT, _GRANTED, _WITHOUT_GRANT = range(3)


class LimitSlots:
    """Who takes the slots of the limits, and for which limits an event waits."""

    def __init__(
        self,
        limits: Sequence[Limit],
        status_of: StatusOf,
        count_machines: CountMachines | None = None,
        *,
        has_automatic_rule: bool = True,
    ) -> None:
        """``has_automatic_rule``: an event can be granted about which nobody has decided."""
        self._limits = limits
        self._has_automatic_rule = has_automatic_rule
        self._status_of = status_of
        self._count_machines = count_machines
        self._newest: _Line | None = None

    def waits_of(self, tx: Transaction, status: ApprovalStatus) -> tuple[WaitingFor, ...]:
        """Return for which limits the event waits that ``status`` is about.

        An event waits if only the limits keep it from being granted, or from being sent.
        ``status`` can be ahead of the store by a decision.
        """
        place = _place_in_line(status) if self._limits else None
        if place is None:
            return ()
        line, occurrence = self.line(tx, status.now, status.in_flight), status.occurrence
        if occurrence.id in line.waits:
            return line.waits[occurrence.id]
        needs = self._needs_of(occurrence, line.sizes)
        places = line.places.copy()
        insort(places, (place, _claimant(occurrence, needs)), key=lambda each: each[0])
        return assign(line.sizes, line.going, [each for _, each in places])[occurrence.id]

    def refresh_messages(self, tx: Transaction, now: datetime, in_flight: InFlight) -> None:
        """Make messages about events that wait due for refresh: who takes the slots may change."""
        waits = self.line(tx, now, in_flight).waits
        waiting = [occurrence for occurrence in waits if waits[occurrence]]
        if waiting and (shown := tx.messages.filter_shown_occurrences(waiting)):
            tx.messages.refresh_about(shown, now)

    @contextmanager
    def keep_while_granting(self, tx: Transaction, *, only: bool = True) -> Iterator[None]:
        """Inside, an event that has its slots is granted or claimed.

        ``only``: nothing else changes. So the rows that change void no line, and it is not made
        again for each grant.
        """
        line, changes = self._newest, tx.total_row_changes
        yield
        if only and line is not None and line.tx is tx and line.changes == changes:
            line.changes = tx.total_row_changes

    def line(self, tx: Transaction, now: datetime, in_flight: InFlight) -> _Line:
        """Return who has slots and who waits now."""
        line, changes = self._newest, tx.total_row_changes
        if (
            line is None
            or line.tx is not tx
            or (line.changes, line.now, line.in_flight) != (changes, now, in_flight)
        ):
            sizes = {each.name: self._size_of(each) for each in self._limits if each.is_active(now)}
            going = self._resting(tx, sizes, now)
            places = []
            for occurrence in tx.occurrences.live_occurrences() if sizes else ():
                if not (needs := self._needs_of(occurrence, sizes)):
                    continue
                approvals = tx.approvals.of_occurrence(occurrence)
                if occurrence.event.is_started or approvals.may_have_been_accepted:
                    going += [Taking(limit, occurrence.id, needs[limit]) for limit in needs]
                if not (self._has_automatic_rule or approvals.decisions or approvals.grants):
                    continue  # this need not be known of an event about which nobody has decided
                place = _place_in_line(self._status_of(tx, occurrence, now))
                if place is not None:
                    places.append((place, _claimant(occurrence, needs)))
            places.sort(key=lambda each: each[0])
            waits = assign(sizes, going, [each for _, each in places])
            line = _Line(tx, changes, now, in_flight, sizes, going, places, waits)
            self._newest = line
        return line

    def _needs_of(
        self, occurrence: TrackedEvent, sizes: Mapping[str, int]
    ) -> dict[str, frozenset[Machine]]:
        needs = {
            limit.name: limit.machines_of(occurrence.data, occurrence.scope)
            for limit in self._limits
            if limit.name in sizes
        }
        return {limit: machines for limit, machines in needs.items() if machines}

    def _size_of(self, limit: Limit) -> int:
        count = self._count_machines if limit.is_share else None
        return limit.capacity(count(limit) if count is not None else 0)

    def _resting(self, tx: Transaction, sizes: Mapping[str, int], now: datetime) -> list[Taking]:
        """Return who takes slots because it was over a while ago."""
        rests = {limit.name: timedelta(seconds=limit.rest) for limit in self._limits}
        longest = max(rests.values(), default=timedelta())
        going: list[Taking] = []
        # A clock that was wrong for a while can have written an end in the future.
        ended = tx.occurrences.ended_between(now - longest, now + longest) if longest else ()
        for occurrence in ended:
            ended_at = parse_timestamp(occurrence.last_changed)
            if occurrence.outcome == "canceled" or ended_at is None:
                continue
            going += [
                Taking(limit, occurrence.id, machines, ended_at + rests[limit])
                for limit, machines in self._needs_of(occurrence, sizes).items()
                if abs(now - ended_at) < rests[limit]
            ]
        return going


def _claimant(occurrence: TrackedEvent, needs: Mapping[str, frozenset[Machine]]) -> Claimant:
    return Claimant(
        occurrence=occurrence.id,
        reference=occurrence.reference,
        scope=occurrence.scope,
        needs=needs,
    )


def _place_in_line(status: ApprovalStatus) -> Place | None:
    """Return the place of an event that only the limits can delay; None for another."""
    occurrence = status.occurrence
    sent = [
        grant
        for grant in status.grants
        if grant.state == "sent" and (grant.may_have_been_accepted or not status.is_held)
    ]
    granted = [each for each in status.grants if can_unsent_grant_keep_slot(each, status)]
    if sent or granted:
        grant, rank = (sent or granted)[0], _SENT if sent else _GRANTED
        return (rank, NEVER, "", grant.id)
    if is_grantable(status):
        due = status.not_before or NEVER
        return (_WITHOUT_GRANT, due, occurrence.first_seen, occurrence.id)
    return None
