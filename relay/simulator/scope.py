"""The state machine of a scope: VMs that share one document, its events, and their approvals.

It has no clock and no network: the caller passes the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal

from relay.errors import RelayError
from relay.settings import Duration
from relay.simulator.event import (
    DEFAULT_NOTICE,
    NEWEST_API_VERSION,
    Event,
    Plan,
    Status,
    event_fields,
)
from relay.simulator.instance import VM

_MAX_PAST_EVENTS = 1000
"""How many events that are gone can still be found."""

TransitionKind = Literal[
    "scheduled",
    "updated",
    "approved",
    "started",
    "completed",
    "canceled",
    "shown",
    "reset",
    "disabled",
]


class UnknownEvent(RelayError):
    """No event has this EventId or name."""


class InvalidTransition(RelayError):
    """The event's state does not allow the action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The VMs and the behavior of the simulated Azure.

    Durations are seconds, in YAML text such as ``2m``. They pass ``scale`` times faster. Raises
    ValueError without VMs, for two VMs of one name, and for numbers out of range.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    vms: tuple[VM, ...] = (VM("vm-0"),)
    scale: float = 1.0
    """How many times faster than Azure all waits and notices pass."""
    incarnation: int = 1
    """The first DocumentIncarnation."""
    broadcast: bool = True
    """False: a VM sees only events that name it, as GPU VMs of a set with one fault domain do."""
    first_call: Duration = 0.0
    """How long the first call waits for its answer; Azure takes up to two minutes."""
    events_after: Duration = 0.0
    """From the first call until events are shown; Azure takes up to five minutes."""
    disabled_after: Duration = 86400.0
    """After so long without a call, the service is off and the next call is a first call."""
    rate_limit: int | None = 5
    """Calls that a VM may make within a second; None: no limit."""
    instance_metadata: bool = True
    """False: instance metadata is answered 404."""

    def __post_init__(self) -> None:
        names = [vm.name for vm in self.vms]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected at least one VM and no name twice, got {names}")
        if self.scale <= 0 or (self.rate_limit is not None and self.rate_limit < 1):
            raise ValueError(
                "expected scale above 0 and rate_limit of 1 or more, "
                f"got {self.scale:g} and {self.rate_limit}"
            )


@dataclass(frozen=True, slots=True)
class Transition:
    """One thing that happened to an event or to the service."""

    at: datetime
    kind: TransitionKind
    event: Event | None = None
    detail: str = ""


class Scope:
    """The state machine. Each method with a ``now`` first lets everything happen that was due."""

    def __init__(
        self,
        setup: Setup,
        *,
        new_id: Callable[[], str],
        on_transition: Callable[[Transition], None] = lambda _: None,
    ) -> None:
        self.setup = setup
        self.incarnation = setup.incarnation
        self._new_id = new_id
        self._on_transition = on_transition
        self._live_events: dict[str, Event] = {}
        self._past_events: deque[Event] = deque(maxlen=_MAX_PAST_EVENTS)
        self._skipped_incarnations = 0
        self._answers_at: datetime | None = None
        self._shows_events_at: datetime | None = None
        self._hides_events = setup.events_after > 0
        self._last_call_at: datetime | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """The events in the document, oldest first."""
        return tuple(self._live_events.values())

    def span(self, seconds: float) -> timedelta:
        """Return the scaled duration of a number of Azure's seconds."""
        return timedelta(seconds=seconds / self.setup.scale)

    def find_event(self, reference: str) -> Event:
        """Return the event with this EventId, in any case, or this name. Raises UnknownEvent.

        A live event comes first, then the newest one.
        """
        for event in (*reversed(self._live_events.values()), *reversed(self._past_events)):
            if event.event_id.casefold() == reference.casefold() or event.plan.name == reference:
                return event
        raise UnknownEvent(f"expected the EventId or name of an event, got {reference!r}")

    def document(
        self, api_version: str = NEWEST_API_VERSION, vm: str | None = None
    ) -> dict[str, Any]:
        """Return the document for a VM. None: for a VM that every event names."""
        entries = (
            event_fields(event, api_version)
            for event in self._live_events.values()
            if self._sees(vm, event)
        )
        return {
            "DocumentIncarnation": self.incarnation,
            "Events": [entry for entry in entries if entry is not None],
        }

    def next_due(self) -> datetime | None:
        """Return when the next thing happens by itself."""
        times = [
            time
            for event in self._live_events.values()
            if (time := event.starts or event.ends) is not None
        ]
        if self._hides_events and self._shows_events_at is not None:
            times.append(self._shows_events_at)
        return min(times, default=None)

    def tick(self, now: datetime) -> None:
        """Let everything happen that was due until ``now``, in order and each at its own time."""
        while (at := self.next_due()) is not None and at <= now:
            if (
                self._hides_events
                and self._shows_events_at is not None
                and self._shows_events_at <= at
            ):
                self._hides_events = False
                self._change_document(changed=bool(self._live_events))
                self._on_transition(Transition(at, "shown", detail="events are shown from now on"))
                continue
            event = next(
                event for event in self._live_events.values() if (event.starts or event.ends) == at
            )
            if event.status == "Scheduled":
                self._start(event, at)
            else:
                self._remove(event, "Completed", at)

    def call(self, now: datetime) -> timedelta:
        """Register a call, which switches the service on. Return how long the answer must wait."""
        self.tick(now)
        disabled_after = self.span(self.setup.disabled_after)
        if self._last_call_at is not None and now - self._last_call_at > disabled_after:
            self.disable(now)
        self._last_call_at = now
        if self._answers_at is None:
            self._answers_at = now + self.span(self.setup.first_call)
            self._shows_events_at = now + self.span(self.setup.events_after)
        return max(self._answers_at - now, timedelta(0))

    def disable(self, now: datetime) -> None:
        """Switch the service off, as Azure does after a day without a call.

        DocumentIncarnation starts again.
        """
        self.tick(now)
        self._answers_at = self._shows_events_at = None
        self._hides_events = self.setup.events_after > 0
        self.incarnation = 1
        self._on_transition(
            Transition(now, "disabled", detail="the service is off until the next call")
        )

    def schedule(self, plan: Plan, now: datetime) -> Event:
        """Add an event. Raises InvalidTransition if the document holds its EventId."""
        self.tick(now)
        event_id = plan.id if plan.id is not None else self._new_id().upper()
        if any(event_id.casefold() == known.casefold() for known in self._live_events):
            raise InvalidTransition(f"expected a new EventId, {event_id} is in the document")
        if plan.resources is None:
            plan = replace(plan, resources=(self.setup.vms[0].name,))
        if plan.started:
            event = Event(
                event_id=event_id,
                plan=plan,
                status="Started",
                not_before=now,
                starts=None,
                ends=self._end_of(plan, now),
            )
            self._put(event, now, "started")
        else:
            notice = plan.notice if plan.notice is not None else DEFAULT_NOTICE[plan.type]
            not_before = now + self.span(notice)
            event = Event(
                event_id=event_id,
                plan=plan,
                status="Scheduled",
                not_before=not_before,
                starts=not_before + self.span(plan.starts_after),
                ends=None,
            )
            self._put(event, now, "scheduled")
        return self._ticked(event, now)

    def approve(self, event_ids: Iterable[str], vm: str, now: datetime) -> None:
        """Accept a StartRequest of a VM.

        Raises UnknownEvent and approves nothing if one EventId is not that of a live event.
        """
        self.tick(now)
        live_events = {event.event_id.casefold(): event for event in self._live_events.values()}
        ids_by_key = {event_id.casefold(): event_id for event_id in event_ids}
        for key, event_id in ids_by_key.items():
            if key not in live_events:
                raise UnknownEvent(
                    f"expected the EventId of an event in the document, got {event_id!r}"
                )
        for key in ids_by_key:
            self._approve(live_events[key], vm, now)
        self.tick(now)

    def _approve(self, event: Event, vm: str, now: datetime) -> None:
        if event.status != "Scheduled" or vm in event.approved_by:
            return
        approved_by = (*event.approved_by, vm)
        approved = event.approved or not self._lacks_approval(event, approved_by)
        starts = event.starts
        if approved and event.plan.approvals != "ignored" and starts is not None:
            starts = min(starts, now + self.span(event.plan.starts_after))
        event = replace(event, approved_by=approved_by, approved=approved, starts=starts)
        self._put(event, now, "approved", f"by {vm}")

    def approve_event(self, reference: str, vm: str, now: datetime) -> Event:
        """Approve an event as a VM. Raises UnknownEvent, or InvalidTransition if it is gone."""
        event = self._expect(reference, None, now)
        self.approve([event.event_id], vm, now)
        return self.find_event(event.event_id)

    def start(self, reference: str, now: datetime) -> Event:
        """Start a Scheduled event at once. Raises UnknownEvent, InvalidTransition."""
        event = self._start(self._expect(reference, "Scheduled", now), now)
        return self._ticked(event, now)

    def end(self, reference: str, now: datetime) -> Event:
        """End a Started event at once. Raises UnknownEvent, InvalidTransition."""
        return self._remove(self._expect(reference, "Started", now), "Completed", now)

    def cancel(self, reference: str, now: datetime) -> Event:
        """Remove a Scheduled event without starting it. Raises UnknownEvent, InvalidTransition."""
        return self._remove(self._expect(reference, "Scheduled", now), "Canceled", now)

    def update(
        self,
        reference: str,
        now: datetime,
        *,
        notice: float | None = None,
        resources: Sequence[str] | None = None,
        description: str | None = None,
        duration: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Event:
        """Change a live event; None changes nothing. Raises UnknownEvent, InvalidTransition.

        A new notice counts from now.
        """
        event = self._expect(reference, None, now)
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
            event = self._reschedule(event, notice, now)
        self._put(event, now, "updated")
        return self._ticked(event, now)

    def _reschedule(self, event: Event, notice: float, now: datetime) -> Event:
        if event.status != "Scheduled":
            raise InvalidTransition(
                "expected a Scheduled event to give a new notice, "
                f"{event.event_id} is {event.status}"
            )
        not_before = now + self.span(notice)
        starts = not_before + self.span(event.plan.starts_after)
        if event.approved and event.plan.approvals != "ignored":
            return replace(event, not_before=not_before)  # it starts early, as approved
        return replace(event, not_before=not_before, starts=starts)

    def skip_incarnations(self, count: int, now: datetime) -> None:
        """Let the next change of DocumentIncarnation skip so many numbers."""
        self.tick(now)
        self._skipped_incarnations += count

    def reset_incarnation(self, incarnation: int, now: datetime) -> None:
        """Set DocumentIncarnation, which may make it lower."""
        self.tick(now)
        self.incarnation = incarnation
        self._on_transition(
            Transition(now, "reset", detail=f"DocumentIncarnation is {incarnation}")
        )

    def _sees(self, vm: str | None, event: Event) -> bool:
        return not self._hides_events and (
            self.setup.broadcast or vm is None or vm in event.resources
        )

    def _lacks_approval(self, event: Event, approved_by: Sequence[str]) -> bool:
        needed = {vm.name for vm in self.setup.vms} & set(event.resources)
        return event.plan.approvals == "all" and not needed <= set(approved_by)

    def _expect(self, reference: str, status: Status | None, now: datetime) -> Event:
        self.tick(now)
        event = self.find_event(reference)
        if not event.is_live or status not in (None, event.status):
            raise InvalidTransition(
                f"expected {event.event_id} to be {status or 'in the document'}, "
                f"it is {event.status}"
            )
        return event

    def _end_of(self, plan: Plan, started: datetime) -> datetime | None:
        return started + self.span(plan.lasts) if plan.lasts is not None else None

    def _ticked(self, event: Event, now: datetime) -> Event:
        """Return the event after everything that is due at this very time has happened too."""
        self.tick(now)
        return self.find_event(event.event_id)

    def _start(self, event: Event, at: datetime) -> Event:
        event = replace(event, status="Started", starts=None, ends=self._end_of(event.plan, at))
        self._put(event, at, "started")
        return event

    def _remove(
        self, event: Event, status: Literal["Completed", "Canceled"], at: datetime
    ) -> Event:
        gone = replace(event, status=status, starts=None, ends=None)
        del self._live_events[event.event_id]
        self._past_events.append(gone)
        self._change_document(changed=True)
        self._on_transition(
            Transition(at, "completed" if status == "Completed" else "canceled", gone)
        )
        return gone

    def _put(self, event: Event, at: datetime, kind: TransitionKind, detail: str = "") -> None:
        before = self._live_events.get(event.event_id)
        self._live_events[event.event_id] = event
        self._change_document(changed=before is None or _fields(before) != _fields(event))
        self._on_transition(Transition(at, kind, event, detail))

    def _change_document(self, *, changed: bool) -> None:
        """Increase DocumentIncarnation if the document changed and shows events."""
        if changed and not self._hides_events:
            self.incarnation += 1 + self._skipped_incarnations
            self._skipped_incarnations = 0


def _fields(event: Event) -> dict[str, Any] | None:
    return event_fields(event, NEWEST_API_VERSION)
