"""How many machines may go at once: the settings of a limit, and who gets its slots. Pure.

A `Limit` counts machines. Each machine of an event that it counts needs one of its slots. A
`SlotAllocator` gives the slots to events, and says for which limits an event waits (`WaitingFor`).
An occurrence is an event from its appearance to its end; Azure can give an EventId again later.
`relay.approvals.limit_slots` reads from the store who takes slots and who wants them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from relay.approvals.rules import BoundedDuration, Hours, RuleConditions
from relay.events.match import matches, matches_any_pattern
from relay.events.timestamps import format_rfc3339
from relay.settings import Name, Section

LIMIT_NOTICE = (
    "a limit delays only what this relay would start: Azure proceeds at NotBefore regardless"
)
"""Part of every text about an event that waits (docs/guarantees.md#a-limit-delays-this-relay-only).
"""
MAX_NAMES = 10
"""Machines or resources that a text names; it counts the rest."""
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
        """Whether ``max`` is a share of the machines that a hub knows."""
        return isinstance(self.max, str)

    def capacity(self, machines: int) -> int:
        """Return how many slots there are. A share of ``machines`` is rounded down, to 1 or more.

        ``machines`` is how many the limit selects of all that are known. Only a share needs it.
        """
        if isinstance(self.max, int):
            return self.max
        return max(1, int(Fraction(self.max.removesuffix("%")) * machines / 100))

    def is_active(self, now: datetime) -> bool:
        """Whether the limit applies now. Otherwise it counts and delays nothing."""
        return self.match.time is None or self.match.time.are_active(now)

    def selects_machine(self, scope: str, name: str) -> bool:
        """Whether a machine of a scope is one of those of which a share is taken."""
        conditions = self.match
        return (conditions.scope is None or matches_any_pattern(conditions.scope, scope)) and (
            conditions.resources is None or matches_any_pattern(conditions.resources, name)
        )

    def machines_of(self, data: Mapping[str, Any], scope: str) -> frozenset[Machine]:
        """Return the machines for which an event (the ``data`` of its CloudEvent) needs slots.

        An event without resources needs one slot, whatever ``resources`` says: it may concern any
        machine.
        """
        conditions = self.match
        others = conditions.model_copy(update={"resources": None})  # these select machines
        if not matches(others, data, scope):
            return frozenset()
        names: Iterable[str] = data.get("resources") or ()
        if not names:
            return frozenset(
                {Machine(scope, f"event {data['eventId']}".lower(), f"event {data['eventId']}")}
            )
        return frozenset(
            Machine(scope, name.lower(), name)
            for name in names
            if conditions.resources is None or matches_any_pattern(conditions.resources, name)
        )


CountMachines = Callable[[Limit], int]
"""Returns how many known machines a limit selects. Only a hub has one: it knows its machines."""


def count_selected_machines(limit: Limit, machines: Iterable[tuple[str, Iterable[str]]]) -> int:
    """Return how many machines a limit selects. Each is given as its scope and its names."""
    return sum(
        any(limit.selects_machine(scope, name) for name in names) for scope, names in machines
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine: its scope, and its name in ``Resources`` in lower case."""

    scope: str
    key: str
    name: str = field(compare=False)
    """As Azure writes it; of an event that names no resource ``event <EventId>``."""

    def display_name_in_scope(self, scope: str) -> str:
        """Return the name for readers about an event of a scope."""
        return self.name if self.scope == scope else f"{self.scope}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingFor:
    """A limit for which an event waits, and the machines that take its slots."""

    limit: str
    slots: int
    """How many slots the limit has."""
    machines: tuple[str, ...]
    """The machines that take the slots, sorted."""
    behind: str | None
    """The event that comes first, if there would be a slot otherwise (`TrackedEvent.reference`)."""
    until: datetime | None
    """When time alone frees enough slots; None if that is not known."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that events and API answers have."""
        return {
            "limit": self.limit,
            "max": self.slots,
            "machines": list(self.machines),
            "behind": self.behind,
            "until": format_rfc3339(self.until) if self.until is not None else None,
        }


Needs = Mapping[str, frozenset[Machine]]
"""The machines for which an event needs slots, by the name of the limit. No set is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A live event that needs slots."""

    occurrence: int
    reference: str
    """What people and programs call it (`TrackedEvent.reference`)."""
    scope: str
    needs: Needs


class SlotAllocator:
    """Gives the slots of each limit to one event after the other.

    First `take_unconditionally` for those that have slots whatever the limits say, then
    `take_slots_or_wait` in turn. A machine takes one slot of a limit, however many events are about
    it. An event waits for a limit if it needs a slot for a machine that no other event has taken,
    and

    - there are not enough free slots. An event that needs more than the limit has goes alone, when
      nobody else takes one.
    - or another event waits first for the limit. So no later event passes it.
    """

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self._capacities = capacities
        self._taken: dict[str, dict[Machine, dict[int, datetime | None]]] = {
            limit: {} for limit in capacities
        }
        """By limit and machine: the occurrences, and when a rest ends."""
        self._holders: set[int] = set()
        """The occurrences that take slots."""
        self._first_waiting: dict[str, str] = {}
        """By limit: the first event that waits for it (`TrackedEvent.reference`)."""

    def take_unconditionally(
        self, occurrence: int, needs: Needs, rests: Mapping[str, datetime] | None = None
    ) -> None:
        """Take slots whatever the limits say. ``rests``: when the rest of an ended event ends."""
        for limit, machines in needs.items():
            self._holders.add(occurrence)
            until = rests[limit] if rests is not None else None
            for machine in machines:
                self._taken[limit].setdefault(machine, {})[occurrence] = until

    def take_slots_or_wait(self, claimant: Claimant, *, keeps: bool = False) -> bool:
        """Give an event its slots; return whether it has them and need not wait.

        ``keeps``: it takes its slots in any case, because Azure may have its StartRequest already.
        """
        blocked = self.blocking_limits(claimant)
        if keeps or not blocked:
            self.take_unconditionally(claimant.occurrence, claimant.needs)
            return not blocked
        if not any(limit in self._first_waiting for limit in blocked):
            # The first in line keeps what it can have, so that later events do not take turns
            # in passing it.
            rest = {limit: all_ for limit, all_ in claimant.needs.items() if limit not in blocked}
            self.take_unconditionally(claimant.occurrence, rest)
        for limit in blocked:
            self._first_waiting.setdefault(limit, claimant.reference)
        return False

    def waits_of(self, claimant: Claimant) -> tuple[WaitingFor, ...]:
        """Return for what an event waits, or would wait if it were offered slots now."""
        return tuple(
            self._build_waiting_for(limit, claimant) for limit in self.blocking_limits(claimant)
        )

    def are_all_limits_full_for(self, claimant: Claimant) -> bool:
        """Whether no later event can get a new slot in any limit that counts this one."""
        return all(len(self._taken[limit]) >= self._capacities[limit] for limit in claimant.needs)

    def next_rest_end(self) -> datetime | None:
        """Return when the first machine in rest frees its slot; None if none rests."""
        ends = [
            until
            for machines in self._taken.values()
            for takers in machines.values()
            for until in takers.values()
            if until is not None
        ]
        return min(ends, default=None)

    def blocking_limits(self, claimant: Claimant) -> list[str]:
        """Return the limits for which an event would wait if it were offered slots now."""
        return [limit for limit in claimant.needs if self._is_blocked(limit, claimant)]

    def _is_blocked(self, limit: str, claimant: Claimant) -> bool:
        machines, taken = claimant.needs[limit], self._taken[limit]
        others: Collection[Machine] = taken.keys()
        has_slots = False
        if claimant.occurrence in self._holders:
            # Its own slots are free for itself. If it has all that it needs, it is behind nobody.
            others = self._machines_taken_by_others(limit, claimant.occurrence).keys()
            has_slots = all(claimant.occurrence in taken.get(one, ()) for one in machines)
        if all(machine in others for machine in machines):
            return False  # it needs no further slot
        first = self._first_waiting.get(limit)
        is_behind = first not in (None, claimant.reference) and not has_slots
        return is_behind or not self._fits_in_limit(limit, machines, others)

    def _machines_taken_by_others(
        self, limit: str, occurrence: int
    ) -> dict[Machine, datetime | None]:
        """Return the machines that other events take, and until when if that is known."""
        others: dict[Machine, datetime | None] = {}
        for machine, takers in self._taken[limit].items():
            ends = [until for taker, until in takers.items() if taker != occurrence]
            if ends:
                known = [end for end in ends if end is not None]
                others[machine] = max(known) if len(known) == len(ends) else None
        return others

    def _build_waiting_for(self, limit: str, claimant: Claimant) -> WaitingFor:
        machines = claimant.needs[limit]
        others = self._machines_taken_by_others(limit, claimant.occurrence)
        fits = self._fits_in_limit(limit, machines, others)
        return WaitingFor(
            limit=limit,
            slots=self._capacities[limit],
            machines=tuple(
                sorted(machine.display_name_in_scope(claimant.scope) for machine in others)
            ),
            behind=self._first_waiting[limit] if fits else None,
            until=None if fits else self._first_end_freeing_slots(limit, machines, others),
        )

    def _fits_in_limit(
        self, limit: str, machines: frozenset[Machine], others: Collection[Machine]
    ) -> bool:
        capacity = self._capacities[limit]
        if len(machines) > capacity:
            return not others  # otherwise it could never go
        new = sum(machine not in others for machine in machines)
        return len(others) + new <= capacity

    def _first_end_freeing_slots(
        self,
        limit: str,
        machines: frozenset[Machine],
        others: Mapping[Machine, datetime | None],
    ) -> datetime | None:
        for end in sorted({end for end in others.values() if end is not None}):
            left = {
                machine: until for machine, until in others.items() if until is None or until > end
            }
            if machines <= left.keys() or self._fits_in_limit(limit, machines, left):
                return end
        return None


def waits_field(name: str, waits: Iterable[WaitingFor]) -> dict[str, Any]:
    """Return a field of an event or answer that says for what an event waits; empty: nothing."""
    values = [wait.to_json() for wait in waits]
    return {name: values} if values else {}


def describe_waits(waits: Iterable[WaitingFor]) -> str:
    """Return for what an event waits, for people. The notice that Azure proceeds follows it."""
    return "it waits for " + " and for ".join(map(_describe_wait, waits))


def _describe_wait(wait: WaitingFor) -> str:
    plural = "s" if wait.slots != 1 else ""
    text = f"limit {wait.limit} (at most {wait.slots} machine{plural} at once)"
    if wait.behind is not None:
        return f"{text}: event {wait.behind} comes first"
    verb = "has" if len(wait.machines) == 1 else "have"
    return f"{text}: {shorten_name_list(wait.machines)} {verb} the slots"


def shorten_name_list(names: Sequence[str]) -> str:
    """Return names of machines or resources in one line: the first, and how many more there are."""
    named = ", ".join(names[:MAX_NAMES])
    unnamed = len(names) - MAX_NAMES
    return f"{named} and {unnamed} more" if unnamed > 0 else named
