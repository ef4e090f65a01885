"""Records what a source found out about events.

The recorder compares it with the snapshot in the store. It journals one CloudEvent for each change
and moves the snapshot on, in one transaction. It does not know which source it was: a poll of the
metadata service gives a whole document, the agents of a fleet give news of single events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import orjson

from relay.events.build import (
    EndEvidence,
    EndOutcome,
    Origin,
    change_event,
    determine_outcome,
    event_data,
    transition_id,
)
from relay.events.cloudevent import CloudEvent
from relay.events.delta import Change, compare_event, diff
from relay.events.model import Document, ScheduledEvent
from relay.outbox import Grant
from relay.outbox.snapshot import ChangedRow, EndedRow, LiveRow, NewRow
from relay.outbox.transaction import Transaction

CHANGES_PER_STEP = 256
"""Changes that are built and written at once. More would need more memory."""
_REBOOT_TYPES = ("reboot", "redeploy")


@dataclass(frozen=True, slots=True)
class PollResult:
    """One successful poll.

    ``gap``: before it, polling had paused for so long that an event may have come and gone unseen.
    """

    document: Document
    at: datetime
    gap: bool


@dataclass(frozen=True, slots=True)
class EventSighting:
    """The state of an event in the document of one VM. ``incarnation`` is that of the document."""

    event: ScheduledEvent
    incarnation: int | None


@dataclass(frozen=True, slots=True)
class EventDeparture:
    """An event has left the documents of all VMs.

    ``key`` is the EventId in lower case. ``gap`` and ``rebooted`` are as in `EndEvidence`.
    """

    key: str
    gap: bool
    rebooted: bool


EventNews = EventSighting | EventDeparture


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
    """What the live rows say, by their data. Whatever happens to a transaction, a text says the
    same, so an entry is never wrong; those that are not live any more go with the next poll."""

    def record(self, tx: Transaction, poll: PollResult) -> int:
        """Work for the store: record every change and the new snapshot. Return the change count."""
        live = tx.snapshot.live_rows()
        events = self._take_events(live)
        changes = diff(events.values(), poll.document)
        rows = {row.key: row for row in live}

        def outcome(row: LiveRow, event: ScheduledEvent, grants: Sequence[Grant]) -> EndOutcome:
            return determine_outcome(event, self._end_evidence(row, event, grants, poll), poll.at)

        for first in range(0, len(changes), CHANGES_PER_STEP):
            step = changes[first : first + CHANGES_PER_STEP]
            found = [_Found(change, poll.document.incarnation, outcome) for change in step]
            self._record_changes(tx, self.origin, found, rows, poll.at)
        for row in live:
            if row.boot_id != self.boot_id and not _may_explain_reboot(
                tx, row.id, events[row.key], poll.at
            ):
                tx.snapshot.set_boot_id(row.id, self.boot_id)
        return len(changes)

    def record_news(
        self, tx: Transaction, scope: str, news: Sequence[EventNews], at: datetime
    ) -> int:
        """Work for the store: record news of events of a scope, in their order.

        Return how many changes there were. ``at`` is when they were observed.
        """
        count = 0
        for step in _split_by_event(news):
            keys = [tx.keys.key(scope, _event_key(item)) for item in step]
            rows = {tx.keys.event_id(row.key): row for row in tx.snapshot.live_rows_of(keys)}
            found = [change for item in step if (change := _find_change(item, rows, at))]
            if found:
                self._record_changes(tx, self.origin.in_scope(scope), found, rows, at)
            count += len(found)
        self._events_by_data.clear()  # only `record` uses it
        return count

    def _take_events(self, live: Sequence[LiveRow]) -> dict[str, ScheduledEvent]:
        """Return the events of these rows by key. Only those that are not known are parsed."""
        known = self._events_by_data.copy()
        self._events_by_data.clear()
        for row in live:
            self._events_by_data[row.data] = known.get(row.data) or _parse(row.data)
        return {row.key: self._events_by_data[row.data] for row in live}

    def _record_changes(
        self,
        tx: Transaction,
        origin: Origin,
        found: Sequence[_Found],
        live: Mapping[str, LiveRow],
        at: datetime,
    ) -> None:
        """Update the snapshot, and record a CloudEvent for each change.

        ``live`` holds the rows of the events by their EventIds in lower case.
        """
        transitions = [transition_id(item.change, origin) for item in found]
        counts = tx.journal.count_transitions(transitions)
        known = [row.id for item in found if (row := live.get(item.change.event.key)) is not None]
        grants = tx.decisions.grants_of(known) if known else {}
        new: list[NewRow] = []
        changed: list[ChangedRow] = []
        ended: list[EndedRow] = []
        events: list[tuple[CloudEvent, str]] = []
        for item, transition in zip(found, transitions, strict=True):
            change = item.change
            row = live.get(change.event.key)
            row_grants = grants.get(row.id, []) if row is not None else []
            outcome: EndOutcome | None = None
            if row is not None and item.outcome is not None and change.kind == "ended":
                data = orjson.loads(row.data)
                outcome = item.outcome(row, change.event, row_grants)
            else:
                data = event_data(change.event, item.incarnation)
            event = change_event(
                change,
                origin,
                at,
                data=data,
                transition=transition,
                previous_count=counts.get(transition, 0),
                approved_by_relay=any(grant.state == "accepted" for grant in row_grants),
                outcome=outcome,
            )
            events.append((event, transition))
            if row is not None and outcome is not None:
                ended.append(EndedRow(row.id, outcome.outcome, event.id))
                continue
            text = orjson.dumps(data).decode()
            self._events_by_data[text] = change.event
            if row is not None:
                changed.append(ChangedRow(row.id, text, data["revision"], event.id))
            else:
                key = tx.keys.key(origin.scope, change.event.key)
                new.append(NewRow(key, text, data["revision"], event.id))
        if new:
            tx.snapshot.add_all(new, origin.scope, self.boot_id, at)
        if changed:
            tx.snapshot.update_all(changed, at)
        if ended:
            tx.snapshot.mark_ended(ended, at)
        tx.record_all(events, at)

    def _end_evidence(
        self, row: LiveRow, event: ScheduledEvent, grants: Sequence[Grant], poll: PollResult
    ) -> EndEvidence:
        start_sent = any(grant.may_be_accepted for grant in grants)
        return EndEvidence(
            start_sent=start_sent,
            gap=poll.gap,
            rebooted=self._has_rebooted(row)
            and (event.event_type or "").lower() in _REBOOT_TYPES
            and self.resource_names is not None
            and names_this_vm(event.resources, self.resource_names)
            and (start_sent or _is_due(event, poll.at)),
        )

    def _has_rebooted(self, row: LiveRow) -> bool:
        if self.boot_id is None or row.boot_id is None:
            return False
        return row.boot_id != self.boot_id


@dataclass(frozen=True, slots=True)
class _Found:
    """A change that a source found. ``outcome`` says how the event ended, if it has."""

    change: Change
    incarnation: int | None
    outcome: Callable[[LiveRow, ScheduledEvent, Sequence[Grant]], EndOutcome] | None = None


def _split_by_event(news: Sequence[EventNews]) -> Iterator[list[EventNews]]:
    """Yield the news in steps of one transaction that hold each event at most once."""
    step: list[EventNews] = []
    keys: set[str] = set()
    for item in news:
        key = _event_key(item)
        if key in keys or len(step) == CHANGES_PER_STEP:
            yield step
            step, keys = [], set()
        step.append(item)
        keys.add(key)
    if step:
        yield step


def _event_key(news: EventNews) -> str:
    return news.event.key if isinstance(news, EventSighting) else news.key


def _find_change(news: EventNews, rows: Mapping[str, LiveRow], at: datetime) -> _Found | None:
    """Return what news changes; None if the snapshot says the same already."""
    row = rows.get(_event_key(news))
    before = _parse(row.data) if row is not None else None
    if isinstance(news, EventSighting):
        change = compare_event(before, news.event)
        return None if change is None else _Found(change, news.incarnation)
    if before is None:
        return None
    departure = news

    def outcome(_: LiveRow, event: ScheduledEvent, grants: Sequence[Grant]) -> EndOutcome:
        evidence = EndEvidence(
            start_sent=any(grant.may_be_accepted for grant in grants),
            gap=departure.gap,
            rebooted=departure.rebooted,
        )
        return determine_outcome(event, evidence, at)

    return _Found(Change("ended", before, {}), None, outcome)


def names_this_vm(resources: Iterable[str], resource_names: frozenset[str]) -> bool:
    """Whether ``Resources`` holds one of the names of this VM. The names are in lower case."""
    return any(resource.lower() in resource_names for resource in resources)


def _may_explain_reboot(
    tx: Transaction, occurrence: int, event: ScheduledEvent, now: datetime
) -> bool:
    """Whether this event can be the cause of a reboot: it has started, is due, or was approved."""
    return (
        event.is_started
        or _is_due(event, now)
        or any(grant.may_be_accepted for grant in tx.decisions.grants(occurrence))
    )


def _parse(data: str) -> ScheduledEvent:
    return ScheduledEvent.from_fields(orjson.loads(data))


def _is_due(event: ScheduledEvent, now: datetime) -> bool:
    return event.not_before_time is not None and event.not_before_time <= now
