"""Records what has changed since the last document of scheduled events, for any source.

The poller of a relay (`relay.imds.poller`) gives the `Recorder` a whole document, the hub of a
fleet (`relay.fleet.hub.merger`) news of single events. The recorder compares it with the snapshot
in the store, journals one CloudEvent for each change, and moves the snapshot on, in one
transaction.

For a poll, the recorder tells itself whether an event ended with a reboot of this VM. Each live row
of the snapshot holds the boot id of the VM. An event that can explain a reboot keeps the boot id of
its row; every other row gets the running boot id with the next poll. So if the two differ when the
event is gone, the VM has rebooted since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from typing import Any, Generic, TypeVar

from relay.events import fast_dataclass
from relay.events.build import (
    EndOutcome,
    Origin,
    change_event,
    common_event_data,
    determine_outcome,
    transition_digest,
)
from relay.events.cloudevent import CloudEvent
from relay.events.model import (
    Change,
    Document,
    ScheduledEvent,
    compare_event,
    diff_events_with_document,
)
from relay.events.timestamps import format_sortable
from relay.store import EventKeyFormat, TrackedEvent
from relay.store.approvals import NOTHING, EventApprovals
from relay.store.transaction import Transaction

CHANGES_PER_STEP = 256
"""Changes that are built and written at once. More would need more memory."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SuccessfulPoll:
    """One successful poll. ``gap``: an event may have come and gone unseen before it."""

    document: Document
    at: datetime
    gap: bool


@dataclass(frozen=True, slots=True)
class DatedRead(Generic[T]):
    """What was read of IMDS: the body, or the document in it.

    ``imds_time`` is that of IMDS, without the fraction of its second; None if it gave none. It is
    after ``asked_at`` and ``asked_monotonic``, by the clocks of this VM: the moment before the
    request was sent.
    """

    content: T
    imds_time: datetime | None
    asked_at: datetime
    asked_monotonic: float


@fast_dataclass(frozen=True, slots=True)
class EventNews:
    """What was seen of an event of a scope. ``event`` is None if it has left all documents.

    ``incarnation`` is that of the document. ``gap`` and ``rebooted`` are as in
    `determine_outcome`. ``rebooted`` is None if the recorder tells by the boot id of its own VM.
    """

    scope: str
    at: datetime
    event_id: str
    event: ScheduledEvent | None = None
    incarnation: int | None = None
    gap: bool = False
    rebooted: bool | None = False


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records polls in the store.

    ``boot_id`` identifies the running boot of this VM. ``resource_names`` holds every name, in
    lower case, by which an event can refer to this VM. Both are None if they are not known.
    """

    origin: Origin
    boot_id: str | None
    resource_names: frozenset[str] | None

    def record(self, tx: Transaction, poll: SuccessfulPoll) -> int:
        """Work for the store: record every change and the new snapshot. Return the change count."""
        live = {each.key: each for each in tx.occurrences.live_occurrences()}
        changes = diff_events_with_document((each.event for each in live.values()), poll.document)
        scope, incarnation = self.origin.scope, poll.document.incarnation
        for first in range(0, len(changes), CHANGES_PER_STEP):
            found = {}
            for change in changes[first : first + CHANGES_PER_STEP]:
                event_id = change.event.event_id
                of_poll = EventNews(scope, poll.at, event_id, None, incarnation, poll.gap, None)
                found[tx.keys.make_key(scope, event_id)] = change, of_poll
            self._record_changes(tx, found, live, poll.at)
        for each in live.values():
            # An event can be the cause of a reboot if it has started, is due, or was approved.
            if each.boot_id != self.boot_id and not (
                each.event.is_started
                or _has_not_before_passed(each.event, poll.at)
                or tx.approvals.of_occurrence(each).may_have_been_accepted
            ):
                tx.occurrences.set_boot_id(each.id, self.boot_id)
        return len(changes)

    def record_observations(self, tx: Transaction, news: Sequence[EventNews], now: datetime) -> int:
        """Work for the store: record news of events in their order. Return the change count."""
        count_of_changes = 0
        for step in _batch_distinct_events(tx.keys, news):
            live = {each.key: each for each in tx.occurrences.live_occurrences(list(step))}
            found = {
                key: (change, item)
                for key, item in step.items()
                if (change := _find_change(item, live.get(key))) is not None
            }
            self._record_changes(tx, found, live, now)
            count_of_changes += len(found)
        return count_of_changes

    def _record_changes(
        self,
        tx: Transaction,
        found: Mapping[str, tuple[Change, EventNews]],
        live: Mapping[str, TrackedEvent],
        now: datetime,
    ) -> None:
        if not found:
            return
        counts = tx.journal.transition_counts(list(found))
        numbers = tx.occurrences.newest_occurrence_numbers(list(found))
        new_ids, positions = count(tx.occurrences.next_id()), count(tx.head().position + 1)
        events: list[tuple[CloudEvent, str]] = []
        occurrences: list[TrackedEvent] = []
        for (key, (change, news)), position in zip(found.items(), positions, strict=False):
            origin, before = self.origin.copy_for_scope(news.scope), live.get(key)
            approvals = tx.approvals.of_occurrence(before) if before else NOTHING
            outcome: EndOutcome | None = None
            data = common_event_data(change.event, news.incarnation)
            if before is not None and change.kind == "ended":
                data = before.data
                outcome = self._outcome_of(before, news, approvals)
            transition = transition_digest(change, origin)
            event = change_event(
                change,
                origin,
                news.at,
                data=data,
                transition=transition,
                previous_count=counts.get(transition, 0),
                approved_by_relay=any(each.state == "accepted" for each in approvals.grants),
                outcome=outcome,
            )
            events.append((event, transition))
            at = format_sortable(news.at)
            state: dict[str, Any] = {
                "data": data,
                "revision": data["revision"],
                "live": outcome is None,
                "last_changed": at,
                "outcome": outcome and outcome.outcome,
                "last_event_id": event.id,
            }
            if before is not None:
                occurrences.append(replace(before, **state))
                continue
            new = TrackedEvent(
                id=next(new_ids),
                scope=news.scope,
                key=key,
                number=numbers.get(key, 0) + 1,
                position=position,
                boot_id=self.boot_id,
                first_seen=at,
                **state,
            )
            occurrences.append(new)
        tx.occurrences.save(occurrences)
        tx.record_all(events, now)

    def _outcome_of(
        self, before: TrackedEvent, news: EventNews, approvals: EventApprovals
    ) -> EndOutcome:
        event, rebooted = before.event, news.rebooted
        start_sent = approvals.may_have_been_accepted
        if rebooted is None:
            rebooted = (
                self.boot_id is not None
                and before.boot_id not in (None, self.boot_id)
                and (event.event_type or "").lower() in ("reboot", "redeploy")
                and self.resource_names is not None
                and names_this_vm(event.resources, self.resource_names)
                and (start_sent or _has_not_before_passed(event, news.at))
            )
        return determine_outcome(
            event, news.at, start_sent=start_sent, gap=news.gap, rebooted=rebooted
        )


def _batch_distinct_events(
    keys: EventKeyFormat, news: Sequence[EventNews]
) -> Iterator[dict[str, EventNews]]:
    """Yield the news by event key, in steps that hold each event at most once."""
    step: dict[str, EventNews] = {}
    for item in news:
        key = keys.make_key(item.scope, item.event_id)
        if key in step or len(step) == CHANGES_PER_STEP:
            yield step
            step = {}
        step[key] = item
    if step:
        yield step


def _find_change(news: EventNews, known: TrackedEvent | None) -> Change | None:
    """Return what news changes; None if the snapshot says the same already."""
    before = known.event if known is not None else None
    if news.event is not None:
        return compare_event(before, news.event)
    return Change("ended", before, {}) if before is not None else None


def names_this_vm(resources: Iterable[str], resource_names: frozenset[str] | None) -> bool:
    """Whether ``Resources`` may hold one of this VM's names, in lower case; None: any may."""
    return resource_names is None or any(
        resource.lower() in resource_names for resource in resources
    )


def _has_not_before_passed(event: ScheduledEvent, now: datetime) -> bool:
    return event.not_before_time is not None and event.not_before_time <= now
