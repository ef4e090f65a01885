"""Records what one poll of a source returned.

The recorder compares the document with the snapshot in the store. It journals one CloudEvent for
each change and moves the snapshot on, in one transaction. It does not know which source polled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from relay.events.delta import Change, diff
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
        for first in range(0, len(changes), CHANGES_PER_STEP):
            self._record_changes(tx, changes[first : first + CHANGES_PER_STEP], rows, poll)
        for row in live:
            if row.boot_id != self.boot_id and not _may_explain_reboot(
                tx, row.id, events[row.key], poll.at
            ):
                tx.snapshot.set_boot_id(row.id, self.boot_id)
        return len(changes)

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
        changes: Sequence[Change],
        live: Mapping[str, LiveRow],
        poll: PollResult,
    ) -> None:
        """Update the snapshot, and record a CloudEvent for each change."""
        transitions = [transition_id(change, self.origin) for change in changes]
        counts = tx.journal.count_transitions(transitions)
        known = [live[change.event.key].id for change in changes if change.event.key in live]
        grants = tx.decisions.grants_of(known) if known else {}
        new: list[NewRow] = []
        changed: list[ChangedRow] = []
        ended: list[EndedRow] = []
        events: list[tuple[CloudEvent, str]] = []
        for change, transition in zip(changes, transitions, strict=True):
            key = change.event.key
            row = live.get(key)
            row_grants = grants.get(row.id, []) if row is not None else []
            outcome: EndOutcome | None = None
            if change.kind == "ended" and row is not None:
                data = orjson.loads(row.data)
                evidence = self._end_evidence(row, change.event, row_grants, poll)
                outcome = determine_outcome(change.event, evidence, poll.at)
            else:
                data = event_data(change.event, poll.document.incarnation)
            event = change_event(
                change,
                self.origin,
                poll.at,
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
                new.append(NewRow(key, text, data["revision"], event.id))
        if new:
            tx.snapshot.add_all(new, self.boot_id, poll.at)
        if changed:
            tx.snapshot.update_all(changed, poll.at)
        if ended:
            tx.snapshot.mark_ended(ended, poll.at)
        tx.record_all(events, poll.at)

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
