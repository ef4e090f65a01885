"""The state machine of a scope: VMs that share one document, its events, and their approvals.

An event is Scheduled, then Started, then Completed, or it is Canceled before its start. What is due
by time happens at the next call of any method (`tick`), at the time at which it was due.

Azure's service is off until its first call, and again after a day without one (`disable`). It does
not answer that call for a while (``first_call``): `enable_by_call`.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from relay.clock import Clock
from relay.errors import RelayError
from relay.imds.document import NEWEST_API_VERSION
from relay.simulator.event import DEFAULT_NOTICE, Event, Plan, Status, event_fields
from relay.simulator.setup import Setup


class UnknownEvent(RelayError):
    """No event has this EventId or name."""


class InvalidTransition(RelayError):
    """The event's state does not allow the action."""


class Scope:
    """The state machine. What was due happens before a method reads or changes anything.

    Methods take an Event, its EventId in any case, or its name. They raise UnknownEvent, or
    InvalidTransition if the state of the event does not allow the action.
    """

    def __init__(self, setup: Setup, *, clock: Clock) -> None:
        self.setup = setup
        self.clock = clock
        self.incarnation = setup.incarnation
        self._live_events: dict[str, Event] = {}
        self._past_events: deque[Event] = deque(maxlen=1000)
        self._skipped_incarnations = 0
        self._on_since: datetime | None = None  # None: the service is off

    def tell(self, at: datetime, kind: str, event: Event | None, text: str) -> None:
        """Is called with what happens: ``kind`` is a word such as scheduled or reset."""

    @property
    def events(self) -> tuple[Event, ...]:
        self.tick()
        return tuple(self._live_events.values())

    def scale_duration(self, seconds: float) -> timedelta:
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
        to_all = self.setup.broadcast or vm is None
        shown = [each for each in self._live_events.values() if to_all or vm in each.resources]
        entries = [event_fields(event, api_version) for event in shown]
        known = [entry for entry in entries if entry is not None]
        return {"DocumentIncarnation": self.incarnation, "Events": known}

    def next_transition_at(self) -> datetime | None:
        times = (event.starts or event.ends for event in self._live_events.values())
        return min(filter(None, times), default=None)

    def tick(self) -> datetime:
        """Let everything happen that is due, in order and each at its own time. Return the time.

        Methods that read or change the state call it first. Only the timer, and tests with a manual
        clock, need to call it.
        """
        now = self.clock.now()
        while (at := self.next_transition_at()) is not None and at <= now:
            events = self._live_events.values()
            event = next(event for event in events if (event.starts or event.ends) == at)
            if event.status == "Scheduled":
                self._start(event, at)
            else:
                self._remove(event, "Completed", at)
        return now

    def enable_by_call(self) -> timedelta:
        """Switch the service on, as each call does. Return how long the answer must wait."""
        now = self.tick()
        self._on_since = self._on_since or now
        answers_at = self._on_since + self.scale_duration(self.setup.first_call)
        return max(answers_at - now, timedelta(0))

    def disable(self) -> None:
        """Switch the service off, as after a day without a call; the incarnation starts again."""
        now = self.tick()
        self._on_since = None
        self.incarnation = 1
        self.tell(now, "disabled", None, "the service is off until the next call")

    def schedule(self, plan: Plan) -> Event:
        """Add an event. Raises InvalidTransition if the document holds its EventId."""
        now = self.tick()
        event_id = plan.id if plan.id is not None else str(uuid.uuid4()).upper()
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
            self._start(event, now)
        else:
            self._keep(event, now, "scheduled")
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
                problem = f"expected the EventId of an event in the document, got {event_id!r}"
                raise UnknownEvent(problem)
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
        self._keep(event, now, "approved", f"by {vm}")

    def approve(self, event: Event | str, vm: str) -> Event:
        event = self._require_live(event)
        self.accept_start_request([event.event_id], vm)
        return self.event(event)

    def start(self, event: Event | str) -> Event:
        event = self._require_live(event, "Scheduled")
        self._start(event, self.clock.now())
        return self.event(event)

    def end(self, event: Event | str) -> Event:
        return self._remove(self._require_live(event, "Started"), "Completed", self.clock.now())

    def cancel(self, event: Event | str) -> Event:
        return self._remove(self._require_live(event, "Scheduled"), "Canceled", self.clock.now())

    def update_event(
        self, event: Event | str, *, notice: float | None = None, **changes: Any
    ) -> Event:
        """Change a live event. ``notice`` is in seconds from now; None changes nothing.

        ``changes`` are fields of its plan: resources, description, duration, fields.
        """
        event = self._require_live(event)
        now = self.clock.now()
        given = {name: value for name, value in changes.items() if value is not None}
        event = replace(event, plan=replace(event.plan, **given))
        if notice is not None:
            if event.status != "Scheduled":
                raise InvalidTransition(
                    "expected a Scheduled event to give a new notice, "
                    f"{event.event_id} is {event.status}"
                )
            not_before, starts = now + self.scale_duration(notice), event.starts
            if not event.approved or event.plan.approvals == "ignored":  # else it starts early
                starts = not_before + self.scale_duration(event.plan.starts_after)
            event = replace(event, not_before=not_before, starts=starts)
        self._keep(event, now, "updated")
        return self.event(event)

    def skip_incarnations(self, count: int) -> None:
        """Let the next change of DocumentIncarnation skip so many numbers."""
        self.tick()
        self._skipped_incarnations += count

    def reset_incarnation(self, incarnation: int = 1) -> None:
        """Set DocumentIncarnation, which may make it lower."""
        now = self.tick()
        self.incarnation = incarnation
        self.tell(now, "reset", None, f"DocumentIncarnation is {incarnation}")

    def _require_live(self, event: Event | str, status: Status | None = None) -> Event:
        event = self.event(event)
        if not event.is_live or status not in (None, event.status):
            raise InvalidTransition(
                f"expected {event.event_id} to be {status or 'in the document'}, "
                f"it is {event.status}"
            )
        return event

    def _start(self, event: Event, at: datetime) -> None:
        lasts = event.plan.lasts
        ends = at + self.scale_duration(lasts) if lasts is not None else None
        self._keep(replace(event, status="Started", starts=None, ends=ends), at, "started")

    def _remove(self, event: Event, status: Status, at: datetime) -> Event:
        gone = replace(event, status=status, starts=None, ends=None)
        del self._live_events[event.event_id]
        self._past_events.append(gone)
        self._count_change()
        self.tell(at, status.lower(), gone, "")
        return gone

    def _keep(self, event: Event, at: datetime, kind: str, detail: str = "") -> None:
        before = self._live_events.get(event.event_id)
        self._live_events[event.event_id] = event
        shown = [event_fields(each, NEWEST_API_VERSION) for each in (before, event) if each]
        if len(shown) == 1 or shown[0] != shown[1]:
            self._count_change()
        self.tell(at, kind, event, detail)

    def _count_change(self) -> None:
        self.incarnation += 1 + self._skipped_incarnations
        self._skipped_incarnations = 0
