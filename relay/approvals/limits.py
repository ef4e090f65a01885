"""How many machines may go at once: the settings of a limit, and who gets its slots.

A `Limit` counts machines. Each machine of an event that it counts needs one of its slots. `assign`,
which is pure, gives the slots to one event after the other, and says for which limits the others
wait. `LimitSlots` reads in a transaction who takes slots and who wants them. The order:

1. Events that are Started, that are over and in their rest, or whose StartRequest Azure may have
   accepted. They take slots whatever the limits say.
2. Events whose StartRequest was sent and has no final answer, in the order of their grants.
3. Granted events that can still be sent, in the order of their grants.
4. Events that could be granted: the earliest NotBefore first, those without one last.
"""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from relay.approvals.rules import BoundedDuration, Hours, RuleConditions
from relay.approvals.status import ApprovalStatus
from relay.approvals.transitions import can_unsent_grant_keep_slot
from relay.events.data_types import LimitWait
from relay.events.match import matches, matches_any_pattern
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.settings import Name, Section
from relay.store import TrackedEvent
from relay.store.transaction import Transaction

NEVER = datetime.max.replace(tzinfo=UTC)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")


def _check_max(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if share is not None and 0 < Fraction(share[1]) <= 100:
        return value
    raise ValueError("expected a number of machines such as 1, or a share such as 10%")


class LimitMatchConditions(RuleConditions):
    """What a limit counts: the conditions of a rule, where ``resources`` selects machines."""

    resources: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Patterns with * and ?: the machines that count. Other machines of an event do not."""
    time: Hours | None = None
    """Days and hours in which the limit applies."""


class Limit(Section):
    """How many machines may go at once. A limit delays only what this relay would start."""

    name: Name
    """Its name in events and in the API."""
    match: LimitMatchConditions = LimitMatchConditions()
    """Conditions; ``resources`` selects machines."""
    max: Annotated[int | str, BeforeValidator(_check_max)]
    """How many machines, or a share of those that a hub knows, such as 10%."""
    rest: BoundedDuration = 0.0
    """How long a machine takes its slot after the end of its event."""

    @property
    def is_share(self) -> bool:
        return isinstance(self.max, str)

    def capacity(self, machines: int) -> int:
        """Return how many slots there are: a share of ``machines`` rounded down, or 1."""
        if isinstance(self.max, int):
            return self.max
        return max(1, int(Fraction(self.max.removesuffix("%")) * machines / 100))

    def machines_of(self, data: Mapping[str, Any], scope: str) -> frozenset[Machine]:
        """Return the machines that need slots; an event without resources needs one slot."""
        patterns = self.match.resources
        if not matches(self.match, data, scope, every_resource=False):
            return frozenset()
        names: Sequence[str] = data.get("resources") or ()
        if not names:
            names, patterns = [f"event {data['eventId']}"], None
        return frozenset(
            Machine(scope, name.lower(), name)
            for name in names
            if patterns is None or matches_any_pattern(patterns, name)
        )


CountMachines = Callable[[Limit], int]
"""Returns how many known machines a limit selects. Only a hub has one: it knows its machines."""


def count_selected_machines(limit: Limit, machines: Iterable[tuple[str, Iterable[str]]]) -> int:
    """Return how many machines a limit selects. Each is given as its scope and its names."""
    scopes, resources = limit.match.scope, limit.match.resources
    return sum(
        (scopes is None or matches_any_pattern(scopes, scope))
        and any(resources is None or matches_any_pattern(resources, name) for name in names)
        for scope, names in machines
    )


# --- who gets the slots


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine: its scope, and its name in ``Resources`` in lower case."""

    scope: str
    key: str
    name: str = field(compare=False)
    """As Azure writes it; of an event that names no resource ``event <EventId>``."""


@dataclass(frozen=True, slots=True)
class Taking:
    """An event takes slots of a limit for its machines."""

    limit: str
    occurrence: int
    machines: frozenset[Machine]
    until: datetime = NEVER
    """When its rest is over; `NEVER`: that is not known."""


Needs = Mapping[str, frozenset[Machine]]
"""The machines for which an event needs slots, by the name of the limit."""


def assign(
    sizes: Mapping[str, int], going: Iterable[Taking], line: Sequence[tuple[TrackedEvent, Needs]]
) -> dict[int, tuple[LimitWait, ...]]:
    """Give the slots of each limit to the events in line; return for what each of them waits.

    ``sizes`` are the slots of each limit. ``going`` take theirs whatever the limits say; such an
    event can be in line too, for its next StartRequest, and then has these for itself. A machine
    takes one slot of a limit, however many events are about it. An event waits for a limit if it
    needs a slot for a machine that no other event has taken, and

    - there are not enough free slots. An event that needs more than the limit has goes alone, when
      nobody else takes one.
    - or another event waits first for the limit. So no later event passes it.
    """
    taken: dict[str, list[Taking]] = {limit: [] for limit in sizes}
    for taking in going:
        taken[taking.limit].append(taking)
    # A StartRequest that may not have been accepted is tried again from its place in line. Until
    # it has slots there, that its machines may go lets no other event go: two could do so mutually.
    certain = {taking.occurrence for taking in going} - {event.id for event, _ in line}
    first_waiting: dict[str, str] = {}
    waits: dict[int, tuple[LimitWait, ...]] = {}
    for event, needs in line:
        found = (
            _wait(event, limit, machines, sizes[limit], taken[limit], certain, first_waiting)
            for limit, machines in needs.items()
        )
        waits[event.id] = tuple(wait for wait in found if wait is not None)
        blocking = {wait["limit"] for wait in waits[event.id]}
        if not blocking:
            certain.add(event.id)
        if not blocking & first_waiting.keys():
            # Who is first in line keeps what it can have, so that later events do not take turns
            # in passing it.
            for limit in needs.keys() - blocking:
                taken[limit].append(Taking(limit, event.id, needs[limit]))
        for limit in blocking:
            first_waiting.setdefault(limit, event.reference)
    return waits


def _wait(
    event: TrackedEvent,
    limit: str,
    machines: frozenset[Machine],
    slots: int,
    taken: Iterable[Taking],
    certain: Collection[int],
    first_waiting: Mapping[str, str],
) -> LimitWait | None:
    has_slots = False
    others: dict[Machine, datetime] = {}
    going: set[Machine] = set()
    for taking in taken:
        if taking.occurrence == event.id:
            has_slots = has_slots or machines <= taking.machines
            continue
        for machine in taking.machines:
            others[machine] = max(taking.until, others.get(machine, taking.until))
        if taking.occurrence in certain:
            going |= taking.machines
    fits = _fit(machines, others, slots)
    first = first_waiting.get(limit)
    is_behind = first is not None and not has_slots
    if machines <= going or (fits and not is_behind):
        return None
    frees: list[datetime] = []
    for end in sorted(set(others.values()) - {NEVER}) if not fits else ():
        left = {machine for machine, until in others.items() if until > end}
        if machines <= left & going or _fit(machines, left, slots):
            frees.append(end)
    names = (
        machine.name if machine.scope == event.scope else f"{machine.scope}/{machine.name}"
        for machine in others
    )
    return {
        "limit": limit,
        "max": slots,
        "machines": sorted(names),
        "behind": first if fits else None,
        "until": format_rfc3339(min(frees)) if frees else None,
    }


def _fit(machines: frozenset[Machine], others: Collection[Machine], slots: int) -> bool:
    if len(machines) > slots:
        return not others  # otherwise it could never go
    return len(machines.union(others)) <= slots


# --- who takes slots and who wants them


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


@dataclass(slots=True)
class LimitSlots:
    limits: Sequence[Limit]
    status_of: Callable[[Transaction, TrackedEvent, datetime], ApprovalStatus]
    """Leaves the limits out."""
    count_machines: CountMachines
    has_automatic_rule: bool
    """Whether an event can be granted without a vote."""
    _newest: tuple[object, Line] | None = None

    def counts(self, event: TrackedEvent, now: datetime) -> bool:
        return bool(self._needs_of(event, now))

    def waits_of(self, tx: Transaction, status: ApprovalStatus) -> tuple[LimitWait, ...]:
        """Return for which limits the event waits that ``status`` is about.

        An event waits if only the limits keep it from being granted, or from being sent.
        ``status`` can be ahead of the store by a decision.
        """
        event = status.occurrence
        place = _place_in_line(status) if self.limits else None
        if place is None or not self.counts(event, status.now):
            return ()
        line = self.line(tx, status.now)
        if event.id in line.waits:
            return line.waits[event.id]
        places = line.places.copy()
        insort(places, (place, event, self._needs_of(event, status.now)), key=lambda each: each[0])
        return assign(line.sizes, line.going, [each[1:] for each in places])[event.id]

    def line(self, tx: Transaction, now: datetime) -> Line:
        """Return who has slots and who waits now. It is made anew when any row has changed."""
        key = (tx, tx.connection.total_changes, now)
        if self._newest is None or self._newest[0] != key:
            self._newest = key, self._make_line(tx, now)
        return self._newest[1]

    def _make_line(self, tx: Transaction, now: datetime) -> Line:
        sizes = {
            limit.name: limit.capacity(self.count_machines(limit) if limit.is_share else 0)
            for limit in self.limits
            if limit.match.in_hours(now)
        }
        going = self._resting(tx, now)
        places = []
        for event in tx.occurrences.live_occurrences() if sizes else ():
            if not (needs := self._needs_of(event, now)):
                continue
            approvals = tx.approvals.of_occurrence(event)
            if event.event.is_started or approvals.may_have_been_accepted:
                going += [Taking(limit, event.id, needs[limit]) for limit in needs]
            if not (self.has_automatic_rule or approvals.decisions or approvals.grants):
                continue
            if (place := _place_in_line(self.status_of(tx, event, now))) is not None:
                places.append((place, event, needs))
        places.sort(key=lambda each: each[0])
        return Line(sizes, going, places, assign(sizes, going, [each[1:] for each in places]))

    def _needs_of(self, event: TrackedEvent, now: datetime) -> Needs:
        needs = {
            limit.name: limit.machines_of(event.data, event.scope)
            for limit in self.limits
            if limit.match.in_hours(now)
        }
        return {limit: machines for limit, machines in needs.items() if machines}

    def _resting(self, tx: Transaction, now: datetime) -> list[Taking]:
        rests = {limit.name: timedelta(seconds=limit.rest) for limit in self.limits}
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
