"""The state machine of a scope: VMs that share one document, its events, and their approvals.

An event is Scheduled, then Started, then Completed, or it is Canceled before its start. Each change
is a `PastTransition`, which is reported. What is due by time happens at the next call of any method
(`tick`), at the time at which it was due.

Azure's service is off until its first call, and again after a day without one. After that call it
does not answer for a while (``first_call``), and does not show events for a while
(``events_after``): `enable_by_call`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from relay.clock import Clock
from relay.errors import RelayError
from relay.simulator.event import (
    DEFAULT_NOTICE,
    NEWEST_API_VERSION,
    Event,
    Plan,
    Status,
    event_fields,
)
from relay.simulator.setup import Setup

_MAX_PAST_EVENTS = 1000
"""How many events that are gone can still be found."""


class UnknownEvent(RelayError):
    """No event has this EventId or name."""


class InvalidTransition(RelayError):
    """The event's state does not allow the action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTransition:
    """One thing that happened to an event or to the service."""

    at: datetime
    kind: str
    """Such as scheduled or shown, the word of the report."""
    event: Event | None = None
    detail: str = ""


class Scope:
    """The state machine. What was due happens before a method reads or changes anything.

    Methods take an Event, its EventId in any case, or its name. They raise UnknownEvent, or
    InvalidTransition if the state of the event does not allow the action.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        clock: Clock,
        new_id: Callable[[], str],
        on_transition: Callable[[PastTransition], None],
    ) -> None:
        self.setup = setup
        self.clock = clock
        self.incarnation = setup.incarnation
        self._new_id = new_id
        self._on_transition = on_transition
        self._live_events: dict[str, Event] = {}
        self._past_events: deque[Event] = deque(maxlen=_MAX_PAST_EVENTS)
        self._skipped_incarnations = 0
        self._answers_at: datetime | None = None  # None: the service is off
        self._shows_events_at: datetime | None = None
        self._hides_events = setup.events_after > 0
        self._last_call_at: datetime | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """The events in the document now, oldest first."""
        self.tick()
        return tuple(self._live_events.values())

    def scale_duration(self, seconds: float) -> timedelta:
        """Return the scaled duration of a number of Azure's seconds."""
        return timedelta(seconds=seconds / self.setup.scale)

    def event(self, event: Event | str) -> Event:
        """Return the current state of an event, also of one that is gone.

        Of several events with one name, a live event comes first, then the newest one.
        """
        self.tick()
        reference = event if isinstance(event, str) else event.event_id
        for known in (*reversed(self._live_events.values()), *reversed(self._past_events)):
            if known.event_id.casefold() == reference.casefold() or known.plan.name == reference:
                return known
        raise UnknownEvent(f"expected the EventId or name of an event, got {reference!r}")

    def document(
        self, api_version: str = NEWEST_API_VERSION, vm: str | None = None
    ) -> dict[str, Any]:
        """Return the document for a VM. None: for a VM that every event names."""
        self.tick()
        entries = (
            event_fields(event, api_version)
            for event in self._live_events.values()
            if not self._hides_events
            and (self.setup.broadcast or vm is None or vm in event.resources)
        )
        return {
            "DocumentIncarnation": self.incarnation,
            "Events": [entry for entry in entries if entry is not None],
        }

    def next_transition_at(self) -> datetime | None:
        """Return when the next thing happens by itself."""
        times = [
            time
            for event in self._live_events.values()
            if (time := event.starts or event.ends) is not None
        ]
        if self._hides_events and self._shows_events_at is not None:
            times.append(self._shows_events_at)
        return min(times, default=None)

    def tick(self) -> datetime:
        """Let everything happen that is due, in order and each at its own time. Return the time.

        Methods that read or change the state call it first. Only the timer, and tests with a manual
        clock, need to call it.
        """
        now = self.clock.now()
        while (at := self.next_transition_at()) is not None and at <= now:
            if self._hides_events and self._shows_events_at == at:
                self._hides_events = False
                self._count_change(changed=bool(self._live_events))
                self._on_transition(
                    PastTransition(at=at, kind="shown", detail="events are shown from now on")
                )
                continue
            event = next(
                event for event in self._live_events.values() if (event.starts or event.ends) == at
            )
            if event.status == "Scheduled":
                self._set_event_started(event, at)
            else:
                self._remove(event, "Completed", at)
        return now

    def enable_by_call(self) -> timedelta:
        """Switch the service on, as each call does. Return how long the answer must wait."""
        now = self.tick()
        disabled_after = self.scale_duration(self.setup.disabled_after)
        if self._last_call_at is not None and now - self._last_call_at > disabled_after:
            self.disable()
        self._last_call_at = now
        if self._answers_at is None:
            self._answers_at = now + self.scale_duration(self.setup.first_call)
            self._shows_events_at = now + self.scale_duration(self.setup.events_after)
        return max(self._answers_at - now, timedelta(0))

    def disable(self) -> None:
        """Switch the service off, as Azure does after a day without a call.

        DocumentIncarnation starts again.
        """
        now = self.tick()
        self._answers_at = self._shows_events_at = None
        self._hides_events = self.setup.events_after > 0
        self.incarnation = 1
        self._on_transition(
            PastTransition(at=now, kind="disabled", detail="the service is off until the next call")
        )

    def schedule(self, plan: Plan) -> Event:
        """Add an event. Raises InvalidTransition if the document holds its EventId."""
        now = self.tick()
        event_id = plan.id if plan.id is not None else self._new_id().upper()
        if any(event_id.casefold() == known.casefold() for known in self._live_events):
            raise InvalidTransition(f"expected a new EventId, {event_id} is in the document")
        if plan.resources is None:
            plan = replace(plan, resources=(self.setup.vms[0].name,))
        notice = plan.notice if plan.notice is not None else DEFAULT_NOTICE[plan.type]
        not_before = now if plan.started else now + self.scale_duration(notice)
        event = Event(
            event_id=event_id,
            plan=plan,
            status="Scheduled",
            not_before=not_before,
            starts=not_before + self.scale_duration(plan.starts_after),
            ends=None,
        )
        if plan.started:
            self._set_event_started(event, now)
        else:
            self._store_event(event, now, "scheduled")
        return self.event(event)

    def accept_start_request(self, event_ids: Iterable[str], vm: str) -> None:
        """Approve events by their EventIds, as a VM.

        Raises UnknownEvent and approves nothing if one EventId is not that of a live event.
        """
        now = self.tick()
        live_events = {event.event_id.casefold(): event for event in self._live_events.values()}
        ids_by_key = {event_id.casefold(): event_id for event_id in event_ids}
        for key, event_id in ids_by_key.items():
            if key not in live_events:
                raise UnknownEvent(
                    f"expected the EventId of an event in the document, got {event_id!r}"
                )
        for key in ids_by_key:
            self._approve(live_events[key], vm, now)
        self.tick()

    def _approve(self, event: Event, vm: str, now: datetime) -> None:
        if event.status != "Scheduled" or vm in event.approved_by:
            return
        approved_by = (*event.approved_by, vm)
        needed = {vm.name for vm in self.setup.vms} & set(event.resources)
        approved = event.approved or event.plan.approvals != "all" or needed <= set(approved_by)
        starts = event.starts
        if approved and event.plan.approvals != "ignored" and starts is not None:
            starts = min(starts, now + self.scale_duration(event.plan.starts_after))
        event = replace(event, approved_by=approved_by, approved=approved, starts=starts)
        self._store_event(event, now, "approved", f"by {vm}")

    def approve(self, event: Event | str, vm: str) -> Event:
        """Approve a live event as a VM or an operator."""
        event = self._require_live_event_in_status(event)
        self.accept_start_request([event.event_id], vm)
        return self.event(event)

    def start(self, event: Event | str) -> Event:
        """Start a Scheduled event at once."""
        event = self._require_live_event_in_status(event, "Scheduled")
        return self.event(self._set_event_started(event, self.clock.now()))

    def end(self, event: Event | str) -> Event:
        """End a Started event at once."""
        return self._remove(
            self._require_live_event_in_status(event, "Started"), "Completed", self.clock.now()
        )

    def cancel(self, event: Event | str) -> Event:
        """Remove a Scheduled event without starting it."""
        return self._remove(
            self._require_live_event_in_status(event, "Scheduled"), "Canceled", self.clock.now()
        )

    def update_event(
        self,
        event: Event | str,
        *,
        notice: float | None = None,
        resources: Sequence[str] | None = None,
        description: str | None = None,
        duration: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Event:
        """Change a live event; None changes nothing. ``notice`` is in seconds from now."""
        event = self._require_live_event_in_status(event)
        now = self.clock.now()
        changes = {
            "resources": tuple(resources) if resources is not None else None,
            "description": description,
            "duration": duration,
            "fields": fields,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        plan = replace(event.plan, **changes)  # type: ignore[arg-type]  # the types are those above
        event = replace(event, plan=plan)
        if notice is not None:
            if event.status != "Scheduled":
                raise InvalidTransition(
                    "expected a Scheduled event to give a new notice, "
                    f"{event.event_id} is {event.status}"
                )
            not_before, starts = now + self.scale_duration(notice), event.starts
            if not event.approved or plan.approvals == "ignored":  # else it starts early
                starts = not_before + self.scale_duration(plan.starts_after)
            event = replace(event, not_before=not_before, starts=starts)
        self._store_event(event, now, "updated")
        return self.event(event)

    def skip_incarnations(self, count: int) -> None:
        """Let the next change of DocumentIncarnation skip so many numbers."""
        self.tick()
        self._skipped_incarnations += count

    def reset_incarnation(self, incarnation: int = 1) -> None:
        """Set DocumentIncarnation, which may make it lower."""
        now = self.tick()
        self.incarnation = incarnation
        self._on_transition(
            PastTransition(at=now, kind="reset", detail=f"DocumentIncarnation is {incarnation}")
        )

    def _require_live_event_in_status(
        self, event: Event | str, status: Status | None = None
    ) -> Event:
        event = self.event(event)
        if not event.is_live or status not in (None, event.status):
            raise InvalidTransition(
                f"expected {event.event_id} to be {status or 'in the document'}, "
                f"it is {event.status}"
            )
        return event

    def _set_event_started(self, event: Event, at: datetime) -> Event:
        lasts = event.plan.lasts
        ends = at + self.scale_duration(lasts) if lasts is not None else None
        event = replace(event, status="Started", starts=None, ends=ends)
        self._store_event(event, at, "started")
        return event

    def _remove(
        self, event: Event, status: Literal["Completed", "Canceled"], at: datetime
    ) -> Event:
        gone = replace(event, status=status, starts=None, ends=None)
        del self._live_events[event.event_id]
        self._past_events.append(gone)
        self._count_change(changed=True)
        self._on_transition(
            PastTransition(
                at=at, kind="completed" if status == "Completed" else "canceled", event=gone
            )
        )
        return gone

    def _store_event(self, event: Event, at: datetime, kind: str, detail: str = "") -> None:
        before = self._live_events.get(event.event_id)
        self._live_events[event.event_id] = event
        self._count_change(changed=before is None or _shown(before) != _shown(event))
        self._on_transition(PastTransition(at=at, kind=kind, event=event, detail=detail))

    def _count_change(self, *, changed: bool) -> None:
        """Increase DocumentIncarnation if the document changed and shows events."""
        if changed and not self._hides_events:
            self.incarnation += 1 + self._skipped_incarnations
            self._skipped_incarnations = 0


def _shown(event: Event) -> dict[str, Any] | None:
    return event_fields(event, NEWEST_API_VERSION)
