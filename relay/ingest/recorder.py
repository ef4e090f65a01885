"""From a document to the journal: what changed since the last one is told, and the snapshot moves on, in one transaction."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay.events.build import (
    EndEvidence,
    Origin,
    EndOutcome,
    change_event,
    determine_outcome,
    event_data,
    transition_id,
)
from relay.events.cloudevent import CloudEvent
from relay.events.delta import Change, diff
from relay.events.model import Document, Event
from relay.imds.discovery import names_this_vm
from relay.outbox import Grant, Occurrence
from relay.outbox.transaction import Transaction

_REBOOTING = ("reboot", "redeploy")


@dataclass(frozen=True, slots=True)
class PollResult:
    """One successful poll. ``gap``: polling had paused before it for longer than cancellations can be told for."""

    document: Document
    at: datetime
    gap: bool


@dataclass(frozen=True, slots=True)
class _Told:
    """A change as it is said, and what the snapshot then holds."""

    key: str
    event: CloudEvent
    transition: str
    data: dict[str, Any]
    new: bool
    outcome: EndOutcome | None


@dataclass(frozen=True, slots=True)
class Recorder:
    """Who saw it: the relay, the VM's boot, and by which names events mean this VM (None: not known)."""

    origin: Origin
    boot_id: str | None
    names: frozenset[str] | None

    def record(self, tx: Transaction, sighting: PollResult) -> int:
        """Work for the store: tell every change and keep the new snapshot; returns how many changes there were."""
        live = {occurrence.key: occurrence for occurrence in tx.snapshot.live()}
        changes = diff((occurrence.event for occurrence in live.values()), sighting.document)
        told = [self._tell(tx, change, live.get(change.event.key), sighting) for change in changes]
        tx.record_all([(one.event, one.transition) for one in told], sighting.at)
        for one in told:
            self._keep(tx, one, sighting.at)
        for occurrence in live.values():
            if occurrence.boot_id != self.boot_id and not _under_way(tx, occurrence, sighting.at):
                tx.snapshot.set_boot_id(occurrence.id, self.boot_id)
        return len(changes)

    def _tell(
        self, tx: Transaction, change: Change, occurrence: Occurrence | None, sighting: PollResult
    ) -> _Told:
        transition = transition_id(change, self.origin)
        grants = tx.decisions.grants(occurrence.id) if occurrence is not None else []
        outcome: EndOutcome | None = None
        data: dict[str, Any]
        if change.kind == "ended" and occurrence is not None:
            data = occurrence.data
            outcome = determine_outcome(
                change.event, self._end_facts(occurrence, grants, sighting), sighting.at
            )
        else:
            data = event_data(change.event, sighting.document.incarnation)
        event = change_event(
            change,
            self.origin,
            sighting.at,
            data=data,
            told=tx.journal.count_transition(transition),
            approved=any(grant.state == "accepted" for grant in grants),
            outcome=outcome,
        )
        return _Told(
            change.event.key, event, transition, data, new=occurrence is None, outcome=outcome
        )

    def _keep(self, tx: Transaction, told: _Told, at: datetime) -> None:
        if told.new:
            tx.snapshot.add(told.key, told.data, self.boot_id, told.event, at)
        elif told.outcome is None:
            tx.snapshot.update(told.key, told.data, told.event, at)
        else:
            tx.snapshot.mark_ended(told.key, told.outcome[0], told.event, at)

    def _end_facts(
        self, occurrence: Occurrence, grants: list[Grant], sighting: PollResult
    ) -> EndEvidence:
        event = occurrence.event
        booted = (
            None not in (self.boot_id, occurrence.boot_id) and occurrence.boot_id != self.boot_id
        )
        return EndEvidence(
            start_sent=_start_sent(grants),
            gap=sighting.gap,
            rebooted=booted
            and _reboots(event)
            and self.names is not None
            and names_this_vm(event.resources, self.names)
            and (_start_sent(grants) or _due(event, sighting.at)),
        )


def _under_way(tx: Transaction, occurrence: Occurrence, now: datetime) -> bool:
    """Whether a boot may have been the event's doing: it was approved by us, or due."""
    return (
        occurrence.event.is_started
        or _due(occurrence.event, now)
        or _start_sent(tx.decisions.grants(occurrence.id))
    )


def _start_sent(grants: list[Grant]) -> bool:
    """Whether a StartRequest was sent that IMDS did not answer with 400. Of several tries only the last answer is known."""
    return any(
        grant.attempts > 1 or (grant.attempts == 1 and grant.status != 400) for grant in grants
    )  # HTTP


def _due(event: Event, now: datetime) -> bool:
    return event.not_before_time is not None and event.not_before_time <= now


def _reboots(event: Event) -> bool:
    return (event.event_type or "").lower() in _REBOOTING
