"""Collects who takes the slots of the limits and who wants them, inside a transaction.

`engine` asks `LimitSlots` for which limits an event waits, and which events have slots and can be
granted. One pass over all live events gives the slots out. It is made again as soon as a row, the
time or the StartRequests in flight have changed.

The order in which events get slots:

1. Events that are Started, that are over and in their rest, or whose StartRequest Azure may have
   accepted. They take slots whatever the limits say.
2. Events whose StartRequest was sent and has no final answer, in the order of their grants.
3. Granted events that can still be sent, in the order of their grants.
4. Events that could be granted: the earliest NotBefore first, those without one last.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from relay.approvals.limits import (
    Claimant,
    CountMachines,
    Limit,
    Needs,
    SlotAllocator,
    WaitingFor,
)
from relay.approvals.status import ApprovalStatus, InFlight, is_scheduled
from relay.approvals.transitions import can_unsent_grant_keep_slot, is_grantable
from relay.events.timestamps import parse_timestamp
from relay.store import Grant, TrackedEvent
from relay.store.transaction import Transaction

StatusOf = Callable[[Transaction, TrackedEvent, datetime], ApprovalStatus]
"""Returns the status of an event without the limits."""
_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _EventWithSlotNeeds:
    """A live event, and what it needs at hours when all limits apply."""

    claimant: Claimant
    version: str
    """The id of the CloudEvent that reported its state."""
    is_started: bool
    is_scheduled: bool
    not_before: datetime | None
    first_seen: str

    @property
    def sort_key(self) -> tuple[datetime, str, int]:
        """What decides who is first in line."""
        return (self.not_before or _NEVER, self.first_seen, self.claimant.occurrence)


@dataclass(slots=True)
class _Line:
    """What one pass over all live events found, at one moment of one transaction."""

    tx: Transaction
    changes: int
    """How many rows had changed when this was made: after another change it is void."""
    now: datetime
    in_flight: InFlight
    next_rest_end: datetime | None
    """When a slot becomes free by time alone; None: never."""
    events: Mapping[int, _EventWithSlotNeeds]
    """Those that a limit counts, by occurrence."""
    slots: SlotAllocator
    """The slots with those of all events that had their turn."""
    grantable: list[int] = field(default_factory=list)
    """The occurrences that could be granted and that have slots, first in line first."""


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
        self.have_hours = any(limit.match.time is not None for limit in limits)
        """Whether the limits change with the time of day."""
        self._longest_rest = timedelta(seconds=max(limit.rest for limit in limits))
        self._known: dict[int, _EventWithSlotNeeds] = {}
        """The live events by occurrence, so that each state is parsed once."""
        self._newest: _Line | None = None

    def waits_of(self, tx: Transaction, status: ApprovalStatus) -> tuple[WaitingFor, ...]:
        """Return for which limits the event waits that ``status`` is about.

        An event waits if only the limits keep it from being granted, or from being sent.
        """
        is_wanting = is_grantable(status) or any(
            can_unsent_grant_keep_slot(grant, status) or grant.state == "sent"
            for grant in status.grants
        )
        if not is_wanting or not self._needs_of(status.occurrence):
            return ()
        line = self.line(tx, status.now, status.in_flight)
        event = line.events.get(status.occurrence.id)
        return line.slots.waits_of(event.claimant) if event is not None else ()

    def refresh_messages(
        self, tx: Transaction, now: datetime, in_flight: InFlight, event_keys: Sequence[str] | None
    ) -> None:
        """Make messages about events that wait due for refresh: who takes the slots may change.

        ``event_keys``: only those of events that share a limit with one of these; None: all.
        """
        limits = {limit.name for limit in self._limits}
        if event_keys is not None:
            changed = [tx.occurrences.find_newest_occurrence(key) for key in event_keys]
            limits = {
                limit for event in changed if event is not None for limit in self._needs_of(event)
            }
        events = self.line(tx, now, in_flight).events.items() if limits else ()
        shown = tx.messages.filter_shown_occurrences(
            [occurrence for occurrence, event in events if limits & event.claimant.needs.keys()]
        )
        waiting = [
            occurrence
            for occurrence in shown
            if self.waits_of(
                tx, self._status_of(tx, tx.occurrences.require_occurrence(occurrence), now)
            )
        ]
        if waiting:
            tx.messages.refresh_about(waiting, now)

    @contextmanager
    def keep_while_granting(self, tx: Transaction) -> Iterator[None]:
        """Inside, an event that has its slots is granted or claimed: nothing else changes.

        So the rows that change void no line, and it is not made again for each grant.
        """
        line, changes = self._newest, tx.total_row_changes
        yield
        if line is not None and line.tx is tx and line.changes == changes:
            line.changes = tx.total_row_changes

    def _needs_of(self, occurrence: TrackedEvent) -> Needs:
        """Return the machines for which an event needs slots, at any hour."""
        needs = {
            limit.name: limit.machines_of(occurrence.data, occurrence.scope)
            for limit in self._limits
        }
        return {limit: machines for limit, machines in needs.items() if machines}

    def line(self, tx: Transaction, now: datetime, in_flight: InFlight) -> _Line:
        """Return who has slots and who waits now."""
        line = self._newest
        if (
            line is None
            or line.tx is not tx
            or (line.changes, line.now, line.in_flight) != (tx.total_row_changes, now, in_flight)
        ):
            line = self._newest = self._make_line(tx, now, in_flight)
        return line

    def _make_line(self, tx: Transaction, now: datetime, in_flight: InFlight) -> _Line:
        active = [limit for limit in self._limits if limit.is_active(now)]
        slots = SlotAllocator({limit.name: self._size_of(limit) for limit in active})
        rests = {limit.name: timedelta(seconds=limit.rest) for limit in active}
        self._take_for_ended_events(tx, slots, rests, now)
        events = {
            event.claimant.occurrence: event
            for known in self._read_live_limited_events(tx)
            if (event := _event_with_active_limits(known, rests)) is not None
        }

        def status_of(occurrence: int) -> ApprovalStatus:
            return self._status_of(tx, tx.occurrences.require_occurrence(occurrence), now)

        line = _Line(tx, tx.total_row_changes, now, in_flight, slots.next_rest_end(), events, slots)
        waiting = self._take_for_grants(line)
        for event in sorted(waiting, key=lambda event: event.sort_key):
            claimant = event.claimant
            blocked = slots.blocking_limits(claimant)
            if blocked and slots.are_all_limits_full_for(claimant):
                continue  # it takes none from later events, whether it wants some or not
            if is_grantable(self._status(line, claimant.occurrence)):
                slots.take_slots_or_wait(claimant)
                line.grantable += [] if blocked else [claimant.occurrence]
        return line

    def _take_for_grants(self, line: _Line) -> list[_EventWithSlotNeeds]:
        """Take slots for what was started or granted; return what can want some besides."""
        others: list[_EventWithSlotNeeds] = []
        open_grants: list[Grant] = []
        for occurrence, event in line.events.items():
            tracked = line.tx.occurrences.require_occurrence(occurrence)
            approvals = line.tx.approvals.of_occurrence(tracked)
            open_grants += [grant for grant in approvals.grants if grant.is_open]
            is_over = event.not_before is not None and line.now >= event.not_before
            if event.is_started or any(map(_may_still_start, approvals.grants)):
                line.slots.take_unconditionally(occurrence, event.claimant.needs)
            if (self._has_automatic_rule or approvals.decisions) and event.is_scheduled:
                others += [] if is_over else [event]
        for grant in sorted(open_grants, key=lambda grant: (grant.state != "sent", grant.id)):
            is_sent = grant.state == "sent"
            if is_sent or can_unsent_grant_keep_slot(grant, self._status(line, grant.occurrence)):
                event = line.events[grant.occurrence]
                line.slots.take_slots_or_wait(event.claimant, keeps=is_sent)
                others = [each for each in others if each is not event]
        return others

    def _status(self, line: _Line, occurrence: int) -> ApprovalStatus:
        tracked = line.tx.occurrences.require_occurrence(occurrence)
        return self._status_of(line.tx, tracked, line.now)

    def _size_of(self, limit: Limit) -> int:
        if not limit.is_share or self._count_machines is None:
            return limit.capacity(0)
        return limit.capacity(self._count_machines(limit))

    def _take_for_ended_events(
        self, tx: Transaction, slots: SlotAllocator, rests: Mapping[str, timedelta], now: datetime
    ) -> None:
        """Take slots for the events that were over a while ago."""
        if not self._longest_rest:
            return
        # A clock that was wrong for a while can have written an end in the future.
        for occurrence in tx.occurrences.ended_between(
            now - self._longest_rest, now + self._longest_rest
        ):
            if occurrence.outcome == "canceled":
                continue
            ended_at = parse_timestamp(occurrence.last_changed)
            if ended_at is None:
                continue
            ends = {limit: ended_at + rest for limit, rest in rests.items()}
            needs = {
                limit: machines
                for limit, machines in self._needs_of(occurrence).items()
                if limit in rests and now < ends[limit] and ended_at < now + rests[limit]
            }
            slots.take_unconditionally(occurrence.id, needs, ends)

    def _read_live_limited_events(self, tx: Transaction) -> Iterator[_EventWithSlotNeeds]:
        """Yield the live events that a limit counts. Only states that are new are parsed."""
        before, self._known = self._known, {}
        for occurrence, version in tx.occurrences.live_last_event_ids():
            known = before.get(occurrence)
            if known is None or known.version != version:
                known = self._make_event_with_slot_needs(
                    tx.occurrences.require_occurrence(occurrence)
                )
            self._known[occurrence] = known
            if known.claimant.needs:
                yield known

    def _make_event_with_slot_needs(self, occurrence: TrackedEvent) -> _EventWithSlotNeeds:
        event = occurrence.event
        return _EventWithSlotNeeds(
            claimant=Claimant(
                occurrence=occurrence.id,
                reference=occurrence.reference,
                scope=occurrence.scope,
                needs=self._needs_of(occurrence),
            ),
            version=occurrence.last_event_id,
            is_started=event.is_started,
            is_scheduled=is_scheduled(event),
            not_before=event.not_before_time,
            first_seen=occurrence.first_seen,
        )


def _may_still_start(grant: Grant) -> bool:
    """Whether Azure may start the event because of a StartRequest with a final answer."""
    return not grant.is_open and not grant.dry_run and grant.may_have_been_accepted


def _event_with_active_limits(
    event: _EventWithSlotNeeds, active: Container[str]
) -> _EventWithSlotNeeds | None:
    """Return the event with the limits that apply now; None if there is none."""
    before = event.claimant.needs
    needs = {limit: machines for limit, machines in before.items() if limit in active}
    if len(needs) == len(before):
        return event
    if not needs:
        return None
    return replace(event, claimant=replace(event.claimant, needs=needs))
