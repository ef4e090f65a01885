"""Records what a source found out about events.

The recorder compares it with the snapshot in the store. It journals one CloudEvent for each change
and moves the snapshot on, in one transaction. It does not know which source it was: a poll of the
metadata service gives a whole document, the agents of a fleet give news of single events.

For a poll, the recorder tells itself whether an event ended with a reboot of this VM. Each live row
of the snapshot holds the boot id of the VM. An event that can explain a reboot keeps the boot id of
its row; every other row gets the running boot id with the next poll. So if the two differ when the
event is gone, the VM has rebooted since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import orjson

from relay.events.build import (
    EndOutcome,
    FactsAboutEndedEvent,
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
from relay.store import EventKeyFormat, Grant
from relay.store.occurrences import (
    AppearedEventToStore,
    ChangedEventToStore,
    LiveRow,
    OccurrenceOutcomeRow,
)
from relay.store.transaction import Transaction

CHANGES_PER_STEP = 256
"""Changes that are built and written at once. More would need more memory."""
_REBOOT_TYPES = ("reboot", "redeploy")


@dataclass(frozen=True, slots=True)
class SuccessfulPoll:
    """One successful poll.

    ``gap``: before it, polling had paused for so long that an event may have come and gone unseen.
    """

    document: Document
    at: datetime
    gap: bool


@dataclass(frozen=True, slots=True)
class EventSighting:
    """A state of an event that was seen. ``incarnation`` is that of the document."""

    event: ScheduledEvent
    incarnation: int | None

    @property
    def lowercase_event_id(self) -> str:
        """The EventId in lower case."""
        return self.event.lowercase_event_id


@dataclass(frozen=True, slots=True)
class EventDeparture:
    """An event has left the documents of all VMs.

    ``gap`` and ``rebooted`` are as in `FactsAboutEndedEvent`.
    """

    lowercase_event_id: str
    gap: bool
    rebooted: bool


@dataclass(frozen=True, slots=True)
class EventSightingOrDeparture:
    """What became known about an event of a scope, and when it was seen."""

    scope: str
    at: datetime
    what: EventSighting | EventDeparture


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records polls in the store.

    ``boot_id`` identifies the running boot of this VM. ``resource_names`` holds every name, in
    lower case, by which an event can refer to this VM. Both are None if they are not known.
    """

    origin: Origin
    boot_id: str | None
    resource_names: frozenset[str] | None
    _events_by_data: dict[str, ScheduledEvent] = field(
        default_factory=dict, init=False, compare=False
    )
    """The events of the live rows, by the text of their data, so that each is parsed once.

    The text alone says what the event is, so an entry stays right if a transaction is rolled back.
    The next poll drops the entries that are not live any more.
    """

    def record(self, tx: Transaction, poll: SuccessfulPoll) -> int:
        """Work for the store: record every change and the new snapshot. Return the change count."""
        live = tx.occurrences.live_rows()
        events = self._parse_live_rows_with_cache(live)
        changes = diff_events_with_document(events.values(), poll.document)
        rows = {row.key: row for row in live}
        for first in range(0, len(changes), CHANGES_PER_STEP):
            found = [
                _FoundChange(change, self.origin, poll.at, poll.document.incarnation, gap=poll.gap)
                for change in changes[first : first + CHANGES_PER_STEP]
            ]
            self._record_changes(tx, found, rows, poll.at)
        for row in live:
            if row.boot_id != self.boot_id and not _may_explain_reboot(
                tx, row.key, events[row.key], poll.at
            ):
                tx.occurrences.set_occurrence_boot_id(row.id, self.boot_id)
        return len(changes)

    def record_observations(
        self, tx: Transaction, news: Sequence[EventSightingOrDeparture], now: datetime
    ) -> int:
        """Work for the store: record news of events in their order. Return the change count."""
        count = 0
        for step in _batch_distinct_events(tx.keys, news):
            rows = {row.key: row for row in tx.occurrences.live_rows_for_event_keys(list(step))}
            found = [
                change
                for key, item in step.items()
                if (change := _compare_observation_to_live_row(item, rows.get(key), self.origin))
                is not None
            ]
            if found:
                self._record_changes(tx, found, rows, now)
            count += len(found)
        self._events_by_data.clear()  # only `record` uses it
        return count

    def _parse_live_rows_with_cache(self, live: Sequence[LiveRow]) -> dict[str, ScheduledEvent]:
        """Return the events of these rows by key. Only those that are not known are parsed."""
        known = self._events_by_data.copy()
        self._events_by_data.clear()
        for row in live:
            self._events_by_data[row.data] = known.get(row.data) or _parse_stored_event(row.data)
        return {row.key: self._events_by_data[row.data] for row in live}

    def _record_changes(
        self,
        tx: Transaction,
        found: Sequence[_FoundChange],
        live: Mapping[str, LiveRow],
        now: datetime,
    ) -> None:
        """Update the snapshot, and record a CloudEvent for each change.

        ``live`` holds the rows of the events by their keys.
        """
        transitions = [transition_digest(item.change, item.origin) for item in found]
        keys = [
            tx.keys.make_key(item.origin.scope, item.change.event.lowercase_event_id)
            for item in found
        ]
        counts = tx.journal.counts_by_transition(transitions)
        grants = tx.approvals.grants_by_key([key for key in keys if key in live])
        first = tx.head().position + 1
        new: list[AppearedEventToStore] = []
        changed: list[ChangedEventToStore] = []
        ended: list[OccurrenceOutcomeRow] = []
        events: list[tuple[CloudEvent, str]] = []
        for item, key, transition in zip(found, keys, transitions, strict=True):
            change = item.change
            row = live.get(key)
            row_grants = grants.get(key, ())
            outcome: EndOutcome | None = None
            if row is not None and change.kind == "ended":
                data = orjson.loads(row.data)
                evidence = self._gather_end_evidence(item, row, row_grants)
                outcome = determine_outcome(change.event, evidence, item.at)
            else:
                data = common_event_data(change.event, item.incarnation)
            event = change_event(
                change,
                item.origin,
                item.at,
                data=data,
                transition=transition,
                previous_count=counts.get(transition, 0),
                approved_by_relay=any(grant.state == "accepted" for grant in row_grants),
                outcome=outcome,
            )
            events.append((event, transition))
            if row is not None and outcome is not None:
                ended.append(OccurrenceOutcomeRow(item.at, row.id, outcome.outcome, event.id))
                continue
            text = orjson.dumps(data).decode()
            self._events_by_data[text] = change.event
            revision = data["revision"]
            if row is not None:
                changed.append(ChangedEventToStore(item.at, row.id, text, revision, event.id))
            else:
                new.append(
                    AppearedEventToStore(
                        item.at,
                        item.origin.scope,
                        key,
                        text,
                        revision,
                        event.id,
                        position=first + len(events) - 1,
                    )
                )
        if new:
            tx.occurrences.add_appeared_events(new, self.boot_id)
        if changed:
            tx.occurrences.store_changed_occurrences(changed)
        if ended:
            tx.occurrences.store_occurrences_as_ended(ended)
        tx.record_all(events, now)

    def _gather_end_evidence(
        self, found: _FoundChange, row: LiveRow, grants: Sequence[Grant]
    ) -> FactsAboutEndedEvent:
        event = found.change.event
        start_sent = any(grant.may_have_been_accepted for grant in grants)
        rebooted = found.rebooted
        if rebooted is None:
            rebooted = (
                self.boot_id is not None
                and row.boot_id not in (None, self.boot_id)
                and (event.event_type or "").lower() in _REBOOT_TYPES
                and self.resource_names is not None
                and names_this_vm(event.resources, self.resource_names)
                and (start_sent or _has_not_before_passed(event, found.at))
            )
        return FactsAboutEndedEvent(start_sent=start_sent, gap=found.gap, rebooted=rebooted)


@dataclass(frozen=True, slots=True)
class _FoundChange:
    """A change that a source found at a time."""

    change: Change
    origin: Origin
    at: datetime
    incarnation: int | None = None
    gap: bool = False
    """As in `FactsAboutEndedEvent`."""
    rebooted: bool | None = None
    """As in `FactsAboutEndedEvent`; None: the recorder tells by the boot id of its own VM."""


def _batch_distinct_events(
    keys: EventKeyFormat, news: Sequence[EventSightingOrDeparture]
) -> Iterator[dict[str, EventSightingOrDeparture]]:
    """Yield the news by event key, in steps that hold each event at most once."""
    step: dict[str, EventSightingOrDeparture] = {}
    for item in news:
        key = keys.make_key(item.scope, item.what.lowercase_event_id)
        if key in step or len(step) == CHANGES_PER_STEP:
            yield step
            step = {}
        step[key] = item
    if step:
        yield step


def _compare_observation_to_live_row(
    news: EventSightingOrDeparture, row: LiveRow | None, origin: Origin
) -> _FoundChange | None:
    """Return what news changes; None if the snapshot says the same already."""
    origin, at = origin.copy_for_scope(news.scope), news.at
    before = _parse_stored_event(row.data) if row is not None else None
    if isinstance(news.what, EventSighting):
        change = compare_event(before, news.what.event)
        return None if change is None else _FoundChange(change, origin, at, news.what.incarnation)
    if before is None:
        return None
    return _FoundChange(
        Change("ended", before, {}), origin, at, gap=news.what.gap, rebooted=news.what.rebooted
    )


def names_this_vm(resources: Iterable[str], resource_names: frozenset[str] | None) -> bool:
    """Whether ``Resources`` may include this VM: whether it holds one of the VM's names.

    The names are in lower case. If they are unknown (None), any resources may.
    """
    return resource_names is None or any(
        resource.lower() in resource_names for resource in resources
    )


def _may_explain_reboot(tx: Transaction, key: str, event: ScheduledEvent, now: datetime) -> bool:
    """Whether this event can be the cause of a reboot: it has started, is due, or was approved."""
    return (
        event.is_started
        or _has_not_before_passed(event, now)
        or any(
            grant.may_have_been_accepted for grant in tx.approvals.grants_by_key([key]).get(key, ())
        )
    )


def _parse_stored_event(data: str) -> ScheduledEvent:
    return ScheduledEvent.from_cloudevent_data(orjson.loads(data))


def _has_not_before_passed(event: ScheduledEvent, now: datetime) -> bool:
    return event.not_before_time is not None and event.not_before_time <= now
