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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from relay.approvals.limits import NEVER, CountMachines, Limit, Needs, Taking, assign
from relay.approvals.status import ApprovalStatus, InFlight
from relay.approvals.transitions import can_unsent_grant_keep_slot
from relay.events.data_types import LimitWait
from relay.events.timestamps import parse_timestamp
from relay.store import TrackedEvent
from relay.store.transaction import Transaction

_SENT, _GRANTED, _WITHOUT_GRANT = range(3)
Place = tuple[int, datetime, str, int]
"""What decides who is first in line; one of the three ranks is its beginning."""


@dataclass(frozen=True, slots=True)
class Line:
    """Who has slots and who waits, at one moment of one transaction."""

    sizes: Mapping[str, int]
    going: list[Taking]
    places: list[tuple[Place, TrackedEvent, Needs]]
    """The events in line, first one first."""
    waits: Mapping[int, tuple[LimitWait, ...]]
    """For what each event in line waits, by occurrence."""

    @property
    def grantable(self) -> list[TrackedEvent]:
        return [
            event
            for place, event, _ in self.places
            if place[0] == _WITHOUT_GRANT and not self.waits[event.id]
        ]

    @property
    def waiting(self) -> list[int]:
        return [occurrence for occurrence, waits in self.waits.items() if waits]

    @property
    def next_rest_end(self) -> datetime | None:
        return min((each.until for each in self.going if each.until != NEVER), default=None)


class LimitSlots:
    def __init__(
        self,
        limits: Sequence[Limit],
        status_of: Callable[[Transaction, TrackedEvent, datetime], ApprovalStatus],
        count_machines: CountMachines | None = None,
        *,
        has_automatic_rule: bool,
    ) -> None:
        """``status_of`` leaves the limits out. ``has_automatic_rule``: a grant needs no vote."""
        self._limits = limits
        self._has_automatic_rule = has_automatic_rule
        self._status_of = status_of
        self._count_machines = count_machines
        self._newest: tuple[object, Line] | None = None

    def counts(self, event: TrackedEvent, now: datetime) -> bool:
        """Whether an event needs slots of a limit."""
        return bool(self._needs_of(event, now))

    def waits_of(self, tx: Transaction, status: ApprovalStatus) -> tuple[LimitWait, ...]:
        """Return for which limits the event waits that ``status`` is about.

        An event waits if only the limits keep it from being granted, or from being sent.
        ``status`` can be ahead of the store by a decision.
        """
        event = status.occurrence
        place = _place_in_line(status) if self._limits else None
        if place is None or not self.counts(event, status.now):
            return ()
        line = self.line(tx, status.now, status.in_flight)
        if event.id in line.waits:
            return line.waits[event.id]
        places = line.places.copy()
        insort(places, (place, event, self._needs_of(event, status.now)), key=lambda each: each[0])
        return assign(line.sizes, line.going, [each[1:] for each in places])[event.id]

    def line(self, tx: Transaction, now: datetime, in_flight: InFlight) -> Line:
        """Return who has slots and who waits now. It is made anew when any row has changed."""
        key = (tx, tx.total_row_changes, now, in_flight)
        if self._newest is None or self._newest[0] != key:
            self._newest = key, self._make_line(tx, now)
        return self._newest[1]

    def _make_line(self, tx: Transaction, now: datetime) -> Line:
        sizes = {each.name: self._size_of(each) for each in self._limits if each.is_active(now)}
        going = self._resting(tx, now)
        places = []
        for event in tx.occurrences.live_occurrences() if sizes else ():
            if not (needs := self._needs_of(event, now)):
                continue
            approvals = tx.approvals.of_occurrence(event)
            if event.event.is_started or approvals.may_have_been_accepted:
                going += [Taking(limit, event.id, needs[limit]) for limit in needs]
            if not (self._has_automatic_rule or approvals.decisions or approvals.grants):
                continue
            if (place := _place_in_line(self._status_of(tx, event, now))) is not None:
                places.append((place, event, needs))
        places.sort(key=lambda each: each[0])
        return Line(sizes, going, places, assign(sizes, going, [each[1:] for each in places]))

    def _needs_of(self, event: TrackedEvent, now: datetime) -> Needs:
        needs = {
            limit.name: limit.machines_of(event.data, event.scope)
            for limit in self._limits
            if limit.is_active(now)
        }
        return {limit: machines for limit, machines in needs.items() if machines}

    def _size_of(self, limit: Limit) -> int:
        count = self._count_machines if limit.is_share else None
        return limit.capacity(count(limit) if count is not None else 0)

    def _resting(self, tx: Transaction, now: datetime) -> list[Taking]:
        rests = {limit.name: timedelta(seconds=limit.rest) for limit in self._limits}
        longest = max(rests.values(), default=timedelta())
        going: list[Taking] = []
        # A clock that was wrong for a while can have written an end in the future.
        ended = tx.occurrences.ended_between(now - longest, now + longest) if longest else ()
        for event in ended:
            ended_at = parse_timestamp(event.last_changed)
            if event.outcome == "canceled" or ended_at is None:
                continue
            going += [
                Taking(limit, event.id, machines, ended_at + rests[limit])
                for limit, machines in self._needs_of(event, now).items()
                if abs(now - ended_at) < rests[limit]
            ]
        return going


def _place_in_line(status: ApprovalStatus) -> Place | None:
    """Return the place of an event that only the limits can delay; None for another."""
    occurrence = status.occurrence
    sent = [each for each in status.grants if each.state == "sent"]
    granted = [each for each in status.grants if can_unsent_grant_keep_slot(each, status)]
    if sent or granted:
        grant, rank = (sent or granted)[0], _SENT if sent else _GRANTED
        return (rank, NEVER, "", grant.id)
    if status.is_grantable:
        due = status.not_before or NEVER
        return (_WITHOUT_GRANT, due, occurrence.first_seen, occurrence.id)
    return None
