"""Records what one poll of a source returned.

The recorder compares the document with the snapshot in the store. It journals one CloudEvent for
each change and moves the snapshot on, in one transaction. It does not know which source polled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

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
from relay.events.model import Document, Event
from relay.outbox import Grant, TrackedEvent
from relay.outbox.transaction import Transaction

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

    def record(self, tx: Transaction, poll: PollResult) -> int:
        """Work for the store: record every change and the new snapshot. Return the change count."""
        live = {occurrence.key: occurrence for occurrence in tx.snapshot.live()}
        changes = diff((occurrence.event for occurrence in live.values()), poll.document)
        events = [
            self._apply_change(tx, change, live.get(change.event.key), poll) for change in changes
        ]
        tx.record_all(events, poll.at)
        for occurrence in live.values():
            if occurrence.boot_id != self.boot_id and not _may_explain_reboot(
                tx, occurrence, poll.at
            ):
                tx.snapshot.set_boot_id(occurrence.id, self.boot_id)
        return len(changes)

    def _apply_change(
        self, tx: Transaction, change: Change, occurrence: TrackedEvent | None, poll: PollResult
    ) -> tuple[CloudEvent, str]:
        """Update the snapshot. Return the CloudEvent of the change and its transition."""
        transition = transition_id(change, self.origin)
        grants = tx.decisions.grants(occurrence.id) if occurrence is not None else []
        outcome: EndOutcome | None = None
        if change.kind == "ended" and occurrence is not None:
            data = occurrence.data
            evidence = self._end_evidence(occurrence, grants, poll)
            outcome = determine_outcome(change.event, evidence, poll.at)
        else:
            data = event_data(change.event, poll.document.incarnation)
        event = change_event(
            change,
            self.origin,
            poll.at,
            data=data,
            previous_count=tx.journal.count_transition(transition),
            approved_by_relay=any(grant.state == "accepted" for grant in grants),
            outcome=outcome,
        )
        key = change.event.key
        if occurrence is None:
            tx.snapshot.add(key, data, self.boot_id, event, poll.at)
        elif outcome is None:
            tx.snapshot.update(key, data, event, poll.at)
        else:
            tx.snapshot.mark_ended(key, outcome.outcome, event, poll.at)
        return event, transition

    def _end_evidence(
        self, occurrence: TrackedEvent, grants: list[Grant], poll: PollResult
    ) -> EndEvidence:
        event = occurrence.event
        start_sent = any(grant.may_be_accepted for grant in grants)
        return EndEvidence(
            start_sent=start_sent,
            gap=poll.gap,
            rebooted=self._has_rebooted(occurrence)
            and (event.event_type or "").lower() in _REBOOT_TYPES
            and self.resource_names is not None
            and names_this_vm(event.resources, self.resource_names)
            and (start_sent or _is_due(event, poll.at)),
        )

    def _has_rebooted(self, occurrence: TrackedEvent) -> bool:
        if self.boot_id is None or occurrence.boot_id is None:
            return False
        return occurrence.boot_id != self.boot_id


def names_this_vm(resources: Iterable[str], resource_names: frozenset[str]) -> bool:
    """Whether ``Resources`` holds one of the names of this VM. The names are in lower case."""
    return any(resource.lower() in resource_names for resource in resources)


def _may_explain_reboot(tx: Transaction, occurrence: TrackedEvent, now: datetime) -> bool:
    """Whether this event can be the cause of a reboot: it has started, is due, or was approved."""
    return (
        occurrence.event.is_started
        or _is_due(occurrence.event, now)
        or any(grant.may_be_accepted for grant in tx.decisions.grants(occurrence.id))
    )


def _is_due(event: Event, now: datetime) -> bool:
    return event.not_before_time is not None and event.not_before_time <= now
