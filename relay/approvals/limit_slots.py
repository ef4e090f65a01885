"""Collects who takes the slots of the limits and who wants them, inside a transaction.

`engine` asks `LimitSlots` for which limits an event waits, and which events have slots and can be
granted. Who has which slots is computed from all live events, and again as soon as a row, the time
or the StartRequests in flight have changed.

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
from dataclasses import dataclass, replace
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
from relay.approvals.transitions import can_unsent_grant_keep_slot, is_grantable_apart_from_limits
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


class LimitSlots:
    """Who takes the slots of the limits, and for which limits an event waits."""

    def __init__(
        self,
        limits: Sequence[Limit],
        status_of: StatusOf,
        count_machines: CountMachines | None = None,
    ) -> None:
        self._limits = limits
        self._status_of = status_of
        self._count_machines = count_machines
        self.have_hours = any(limit.match.time is not None for limit in limits)
        """Whether the limits change with the time of day."""
        self._longest_rest = timedelta(seconds=max(limit.rest for limit in limits))
        self._known: dict[int, _EventWithSlotNeeds] = {}
        """The live events by occurrence, so that each state is parsed once."""
        self._newest_allocation: _SlotAllocationOfAllEvents | None = None

    def limit_waits_of_event(
        self, tx: Transaction, status: ApprovalStatus
    ) -> tuple[WaitingFor, ...]:
        """Return for which limits the event waits that ``status`` is about.

        An event waits if only the limits keep it from being granted, or from being sent.
        """
        is_wanting = is_grantable_apart_from_limits(status) or any(
            can_unsent_grant_keep_slot(grant, status) or grant.state == "sent"
            for grant in status.grants
        )
        if not is_wanting or not self.machines_needing_slots_by_limit(status.occurrence):
            return ()
        return self._current_allocation(tx, status.now, status.in_flight).waits_of(
            status.occurrence.id
        )

    def grantable_occurrences(
        self, tx: Transaction, now: datetime, in_flight: InFlight
    ) -> list[int]:
        """Return the occurrences that could be granted and that have slots, first in line first."""
        return self._current_allocation(tx, now, in_flight).grantable_occurrences()

    def next_slot_free_at(
        self, tx: Transaction, now: datetime, in_flight: InFlight
    ) -> datetime | None:
        """Return when a slot becomes free by time alone; None: never."""
        return self._current_allocation(tx, now, in_flight).next_rest_end

    def refresh_messages(
        self, tx: Transaction, now: datetime, in_flight: InFlight, event_keys: Sequence[str] | None
    ) -> None:
        """Make messages about events that wait due for refresh: who takes the slots may change.

        ``event_keys``: only those of events that share a limit with one of these; None: all.
        """
        limits: set[str] | None = None
        if event_keys is not None:
            changed = [tx.occurrences.find_newest_occurrence(key) for key in event_keys]
            limits = {
                limit
                for event in changed
                if event is not None
                for limit in self.machines_needing_slots_by_limit(event)
            }
            if not limits:
                return
        allocation = self._current_allocation(tx, now, in_flight)
        shown = tx.messages.filter_shown_occurrences(
            allocation.occurrences_subject_to_limits(limits)
        )
        waiting = [
            occurrence
            for occurrence in shown
            if self.limit_waits_of_event(
                tx, self._status_of(tx, tx.occurrences.require_occurrence(occurrence), now)
            )
        ]
        if waiting:
            tx.messages.refresh_about(waiting, now)

    @contextmanager
    def keep_cached_allocation_while_granting(self, tx: Transaction) -> Iterator[None]:
        """Inside, an event that has its slots is granted or claimed: nothing else changes.

        So the rows that change void no allocation, and it is not made again for each grant.
        """
        allocation, changes = self._newest_allocation, tx.total_row_changes
        yield
        if allocation is not None and allocation.tx is tx and allocation.changes == changes:
            allocation.changes = tx.total_row_changes

    def machines_needing_slots_by_limit(self, occurrence: TrackedEvent) -> Needs:
        """Return the machines for which an event needs slots, at any hour."""
        needs = {
            limit.name: limit.machines_of(occurrence.data, occurrence.scope)
            for limit in self._limits
        }
        return {limit: machines for limit, machines in needs.items() if machines}

    def _current_allocation(
        self, tx: Transaction, now: datetime, in_flight: InFlight
    ) -> _SlotAllocationOfAllEvents:
        allocation = self._newest_allocation
        if allocation is None or not allocation.is_current(tx, now, in_flight):
            allocation = self._newest_allocation = self._allocate_slots_to_events(
                tx, now, in_flight
            )
        return allocation

    def _allocate_slots_to_events(
        self, tx: Transaction, now: datetime, in_flight: InFlight
    ) -> _SlotAllocationOfAllEvents:
        active = [limit for limit in self._limits if limit.is_active(now)]
        queue = SlotAllocator({limit.name: self._slot_count_of_limit(limit) for limit in active})
        rests = {limit.name: timedelta(seconds=limit.rest) for limit in active}
        self._occupy_slots_of_ended_events(tx, queue, rests, now)
        events = {
            event.claimant.occurrence: event
            for known in self._read_live_limited_events(tx)
            if (event := _event_with_active_limits(known, rests)) is not None
        }
        grants = {
            occurrence: tx.approvals.of_occurrence(
                tx.occurrences.require_occurrence(occurrence)
            ).grants
            for occurrence in events
        }
        for occurrence, event in events.items():
            if event.is_started or any(
                map(_may_closed_grant_still_start_event, grants.get(occurrence, ()))
            ):
                queue.take_unconditionally(occurrence, event.claimant.needs)
        return _SlotAllocationOfAllEvents(
            tx=tx,
            now=now,
            in_flight=in_flight,
            queue=queue,
            events=events,
            open_grants=sorted(
                (grant for of_event in grants.values() for grant in of_event if grant.is_open),
                key=lambda grant: (grant.state != "sent", grant.id),
            ),
            status_of=lambda occurrence: self._status_of(
                tx, tx.occurrences.require_occurrence(occurrence), now
            ),
        )

    def _slot_count_of_limit(self, limit: Limit) -> int:
        if not limit.is_share or self._count_machines is None:
            return limit.capacity(0)
        return limit.capacity(self._count_machines(limit))

    def _occupy_slots_of_ended_events(
        self, tx: Transaction, queue: SlotAllocator, rests: Mapping[str, timedelta], now: datetime
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
                for limit, machines in self.machines_needing_slots_by_limit(occurrence).items()
                if limit in rests and now < ends[limit] and ended_at < now + rests[limit]
            }
            queue.take_unconditionally(occurrence.id, needs, ends)

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
                needs=self.machines_needing_slots_by_limit(occurrence),
            ),
            version=occurrence.last_event_id,
            is_started=event.is_started,
            is_scheduled=is_scheduled(event),
            not_before=event.not_before_time,
            first_seen=occurrence.first_seen,
        )


class _SlotAllocationOfAllEvents:
    """Who has slots, and the line of those that want some, at one moment of one transaction."""

    def __init__(
        self,
        *,
        tx: Transaction,
        now: datetime,
        in_flight: InFlight,
        queue: SlotAllocator,
        events: Mapping[int, _EventWithSlotNeeds],
        open_grants: Sequence[Grant],
        status_of: Callable[[int], ApprovalStatus],
    ) -> None:
        """``queue`` holds the slots of those that have them whatever the limits say."""
        self.tx = tx
        self.changes = tx.total_row_changes
        """How many rows had changed when this was made: after another change it is void."""
        self.next_rest_end = queue.next_rest_end()
        self._now = now
        self._in_flight = in_flight
        self._events = events
        self._status_of = status_of
        self._granted: dict[int, tuple[WaitingFor, ...]] = {}
        """For what each event of an open grant waits; empty: it has its slots."""
        for grant in open_grants:
            is_sent = grant.state == "sent"
            if is_sent or can_unsent_grant_keep_slot(grant, status_of(grant.occurrence)):
                claimant = events[grant.occurrence].claimant
                self._granted[grant.occurrence] = queue.waits_of(claimant)
                queue.take_slots_or_wait(claimant, keeps=is_sent)
        self._queue_after_grants = queue
        """The slots without those of events that could be granted."""
        self._queue = queue.copy()
        """The slots with those of the events that had their turn."""
        self._has_slots: dict[int, bool] = {}
        """Of each event that had its turn, whether it has slots or does not want them."""
        self._turns = self._allocate_slots_in_order()
        self._grantable: list[int] = []
        """Those that had their turn, could be granted and have slots, first in line first."""

    def is_current(self, tx: Transaction, now: datetime, in_flight: InFlight) -> bool:
        """Whether nothing has changed since it was made."""
        return self.tx is tx and (self.changes, self._now, self._in_flight) == (
            tx.total_row_changes,
            now,
            in_flight,
        )

    def waits_of(self, occurrence: int) -> tuple[WaitingFor, ...]:
        """Return for which limits an event waits that wants slots."""
        if occurrence not in self._events:
            return ()
        if occurrence in self._granted:
            return self._granted[occurrence]
        claimant = self._events[occurrence].claimant
        if waits := self._queue_after_grants.waits_of(claimant):
            return waits  # whoever is before it in the line
        while occurrence not in self._has_slots and (turn := next(self._turns, None)) is not None:
            if turn[1]:
                self._grantable.append(turn[0])
        if self._has_slots.get(occurrence, True):
            return ()
        # After its turn, nobody has taken slots of the limits for which it waits.
        return self._queue.waits_of(claimant)

    def occurrences_subject_to_limits(self, limits: Container[str] | None) -> list[int]:
        """Return the occurrences that one of these limits counts; None: of all limits."""
        return [
            occurrence
            for occurrence, event in self._events.items()
            if limits is None or any(limit in limits for limit in event.claimant.needs)
        ]

    def grantable_occurrences(self) -> list[int]:
        """Return the occurrences that could be granted and that have slots, first in line first."""
        self._grantable += [occurrence for occurrence, is_ready in self._turns if is_ready]
        return list(self._grantable)

    def _allocate_slots_in_order(self) -> Iterator[tuple[int, bool]]:
        """Give each event its turn; yield it, and whether it can be granted and has slots."""
        for event in sorted(self._events.values(), key=lambda event: event.sort_key):
            occurrence, claimant = event.claimant.occurrence, event.claimant
            is_over = event.not_before is not None and self._now >= event.not_before
            if occurrence in self._granted or not event.is_scheduled or is_over:
                continue
            if self._queue.are_all_limits_full_for(claimant) and self._queue.would_wait(claimant):
                # It waits if it wants slots at all, and takes none from later events.
                self._has_slots[occurrence] = False
                yield occurrence, False
                continue
            is_ready = is_grantable_apart_from_limits(self._status_of(occurrence))
            has_slots = not is_ready or self._queue.take_slots_or_wait(claimant)
            self._has_slots[occurrence] = has_slots
            yield occurrence, is_ready and has_slots


def _may_closed_grant_still_start_event(grant: Grant) -> bool:
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
