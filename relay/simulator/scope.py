"""A scope as Azure sees it, without clock and network: VMs that share one document, its events, and who approved them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal

from relay.errors import RelayError
from relay.settings import Duration
from relay.simulator.event import NEWEST, NOTICE, Event, Plan, Status, event_fields
from relay.simulator.instance import VM

_REMEMBERED = 1000  # events that are gone, for tests and people who ask what became of them

What = Literal[
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
    """The event is not in a state where that can happen to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the simulated Azure is built. Spans are seconds here, ``2m`` in YAML, and run ``scale`` times faster.

    Raises ValueError without VMs, for two of one name, and for numbers that make no sense.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    vms: tuple[VM, ...] = (VM("vm-0"),)
    scale: float = 1.0
    """How many times faster than Azure all waits and notices run."""
    incarnation: int = 1
    """DocumentIncarnation at the start."""
    broadcast: bool = True
    """False: a VM sees only the events that name it, as GPU VMs in a scale set with one fault domain do."""
    first_call: Duration = 0.0
    """How long the first call waits for its answer; of Azure up to two minutes."""
    events_after: Duration = 0.0
    """From the first call until events are shown; of Azure up to five minutes."""
    disabled_after: Duration = 86400.0
    """Without a call for this long, the service is switched off: the next call is a first call again."""
    rate_limit: int | None = 5
    """Calls a VM may make in any one second; None: as many as it likes."""
    instance_metadata: bool = True
    """False: instance metadata answers 404."""

    def __post_init__(self) -> None:
        names = [vm.name for vm in self.vms]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected at least one VM and no name twice, got {names}")
        if self.scale <= 0 or (self.rate_limit is not None and self.rate_limit < 1):
            raise ValueError(
                f"expected scale above 0 and rate_limit of 1 or more, got {self.scale:g} and {self.rate_limit}"
            )


@dataclass(frozen=True, slots=True)
class Transition:
    """One thing that happened, for whoever watches."""

    at: datetime
    what: What
    event: Event | None = None
    detail: str = ""


class Scope:
    """The state machine. When a method that is given ``now`` returns, all that was due until then has happened."""

    def __init__(
        self,
        setup: Setup,
        *,
        new_id: Callable[[], str],
        watch: Callable[[Transition], None] = lambda _: None,
    ) -> None:
        self.setup = setup
        self.incarnation = setup.incarnation
        self._new_id = new_id
        self._watch = watch
        self._live: dict[str, Event] = {}
        self._past: deque[Event] = deque(maxlen=_REMEMBERED)
        self._skip = 0
        self._answers_from: datetime | None = None
        self._shows_from: datetime | None = None
        self._hidden = setup.events_after > 0
        self._last_call: datetime | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """Every event that is in the document, oldest first."""
        return tuple(self._live.values())

    def span(self, seconds: float) -> timedelta:
        """What that many seconds of Azure are here."""
        return timedelta(seconds=seconds / self.setup.scale)

    def find(self, ref: str) -> Event:
        """The event with this EventId (case is ignored) or name: a live one first, then the newest. Raises UnknownEvent."""
        for event in (*reversed(self._live.values()), *reversed(self._past)):
            if event.event_id.casefold() == ref.casefold() or event.plan.name == ref:
                return event
        raise UnknownEvent(f"expected the EventId or name of an event, got {ref!r}")

    def document(self, api_version: str = NEWEST, vm: str | None = None) -> dict[str, Any]:
        """What a GET by ``vm`` is answered (None: what a VM that every event names would see)."""
        entries = (
            event_fields(event, api_version)
            for event in self._live.values()
            if self._sees(vm, event)
        )
        return {
            "DocumentIncarnation": self.incarnation,
            "Events": [entry for entry in entries if entry is not None],
        }

    def due(self) -> datetime | None:
        """When something happens next by itself."""
        moments = [
            moment
            for event in self._live.values()
            if (moment := event.starts or event.ends) is not None
        ]
        if self._hidden and self._shows_from is not None:
            moments.append(self._shows_from)
        return min(moments, default=None)

    def tick(self, now: datetime) -> None:
        """Let happen what was due until ``now``, in its order and each at its own moment, however late the tick is."""
        while (at := self.due()) is not None and at <= now:
            if self._hidden and self._shows_from is not None and self._shows_from <= at:
                self._hidden = False
                self._bump(changed=bool(self._live))
                self._watch(Transition(at, "shown", detail="events are shown from now on"))
                continue
            event = next(
                event for event in self._live.values() if (event.starts or event.ends) == at
            )
            if event.status == "Scheduled":
                self._start(event, at)
            else:
                self._leave(event, "Completed", at)

    def call(self, now: datetime) -> timedelta:
        """A VM calls, which switches the service on if it is off. How long to wait with the answer."""
        self.tick(now)
        if self._last_call is not None and now - self._last_call > self.span(
            self.setup.disabled_after
        ):
            self.disable(now)
        self._last_call = now
        if self._answers_from is None:
            self._answers_from = now + self.span(self.setup.first_call)
            self._shows_from = now + self.span(self.setup.events_after)
        return max(self._answers_from - now, timedelta(0))

    def disable(self, now: datetime) -> None:
        """Switch the service off, as Azure does after a day without a call. DocumentIncarnation starts again."""
        self.tick(now)
        self._answers_from = self._shows_from = None
        self._hidden = self.setup.events_after > 0
        self.incarnation = 1
        self._watch(Transition(now, "disabled", detail="the service is off until the next call"))

    def schedule(self, plan: Plan, now: datetime) -> Event:
        """A new event appears. Raises WrongMove when the document already holds its EventId."""
        self.tick(now)
        event_id = plan.id if plan.id is not None else self._new_id().upper()
        if any(event_id.casefold() == known.casefold() for known in self._live):
            raise InvalidTransition(f"expected a new EventId, {event_id} is in the document")
        if plan.resources is None:
            plan = replace(plan, resources=(self.setup.vms[0].name,))
        not_before = now + self.span(plan.notice if plan.notice is not None else NOTICE[plan.type])
        if plan.started:
            event = Event(event_id, plan, "Started", now, None, self._end_of(plan, now))
        else:
            event = Event(
                event_id,
                plan,
                "Scheduled",
                not_before,
                not_before + self.span(plan.starts_after),
                None,
            )
        self._put(event, now, "started" if plan.started else "scheduled")
        return self._after(event, now)

    def approve(self, event_ids: Iterable[str], vm: str, now: datetime) -> None:
        """A StartRequest of ``vm``. Raises UnknownEvent, and then approves nothing, when one is not the EventId of a live event."""
        self.tick(now)
        wanted = {event_id.casefold(): event_id for event_id in event_ids}
        by_id = {known.casefold(): known for known in self._live}
        for key, event_id in wanted.items():
            if key not in by_id:
                raise UnknownEvent(
                    f"expected the EventId of an event in the document, got {event_id!r}"
                )
        for key in wanted:
            event = self._live[by_id[key]]
            if event.status != "Scheduled" or vm in event.approved_by:
                continue
            by = (*event.approved_by, vm)
            approved = event.approved or not self._missing(event, by)
            starts = event.starts
            if approved and event.plan.approvals != "ignored" and starts is not None:
                starts = min(starts, now + self.span(event.plan.starts_after))
            self._put(
                replace(event, approved_by=by, approved=approved, starts=starts),
                now,
                "approved",
                f"by {vm}",
            )
        self.tick(now)

    def approve_one(self, ref: str, vm: str, now: datetime) -> Event:
        """Approve one event as ``vm``. Raises UnknownEvent for one that never was, WrongMove for one that is gone."""
        event = self._expect(ref, None, now)
        self.approve([event.event_id], vm, now)
        return self.find(event.event_id)

    def start(self, ref: str, now: datetime) -> Event:
        """Start a Scheduled event at once. Raises UnknownEvent, WrongMove."""
        return self._after(self._start(self._expect(ref, "Scheduled", now), now), now)

    def end(self, ref: str, now: datetime) -> Event:
        """End a Started event at once. Raises UnknownEvent, WrongMove."""
        return self._leave(self._expect(ref, "Started", now), "Completed", now)

    def cancel(self, ref: str, now: datetime) -> Event:
        """Take a Scheduled event back: it leaves the document and nothing happens. Raises UnknownEvent, WrongMove."""
        return self._leave(self._expect(ref, "Scheduled", now), "Canceled", now)

    def update(
        self,
        ref: str,
        now: datetime,
        *,
        notice: float | None = None,
        resources: Sequence[str] | None = None,
        description: str | None = None,
        duration: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Event:
        """Change a live event; None leaves a thing as it is. A new notice counts from now. Raises UnknownEvent, WrongMove."""
        event = self._expect(ref, None, now)
        plan = event.plan
        plan = replace(
            plan,
            resources=tuple(resources) if resources is not None else plan.resources,
            description=description if description is not None else plan.description,
            duration=duration if duration is not None else plan.duration,
            fields=fields if fields is not None else plan.fields,
        )
        event = replace(event, plan=plan)
        if notice is not None:
            if event.status != "Scheduled":
                raise InvalidTransition(
                    f"expected a Scheduled event to give a new notice, {event.event_id} is {event.status}"
                )
            not_before = now + self.span(notice)
            forward = event.approved and plan.approvals != "ignored"
            event = replace(
                event,
                not_before=not_before,
                starts=event.starts if forward else not_before + self.span(plan.starts_after),
            )
        self._put(event, now, "updated")
        return self._after(event, now)

    def skip(self, numbers: int, now: datetime) -> None:
        """Let DocumentIncarnation leave out that many numbers at the next change."""
        self.tick(now)
        self._skip += numbers

    def reset(self, incarnation: int, now: datetime) -> None:
        """Let DocumentIncarnation go on from ``incarnation``, which may be lower."""
        self.tick(now)
        self.incarnation = incarnation
        self._watch(Transition(now, "reset", detail=f"DocumentIncarnation is {incarnation}"))

    def _sees(self, vm: str | None, event: Event) -> bool:
        return not self._hidden and (self.setup.broadcast or vm is None or vm in event.resources)

    def _missing(self, event: Event, by: Sequence[str]) -> bool:
        needed = {vm.name for vm in self.setup.vms} & set(event.resources)
        return event.plan.approvals == "all" and not needed <= set(by)

    def _expect(self, ref: str, status: Status | None, now: datetime) -> Event:
        self.tick(now)
        event = self.find(ref)
        if not event.live or status not in (None, event.status):
            raise InvalidTransition(
                f"expected {event.event_id} to be {status or 'in the document'}, it is {event.status}"
            )
        return event

    def _end_of(self, plan: Plan, started: datetime) -> datetime | None:
        return started + self.span(plan.lasts) if plan.lasts is not None else None

    def _after(self, event: Event, now: datetime) -> Event:
        """The event as it is when what else is due at this very moment has happened too."""
        self.tick(now)
        return self.find(event.event_id)

    def _start(self, event: Event, at: datetime) -> Event:
        event = replace(event, status="Started", starts=None, ends=self._end_of(event.plan, at))
        self._put(event, at, "started")
        return event

    def _leave(self, event: Event, status: Literal["Completed", "Canceled"], at: datetime) -> Event:
        gone = replace(event, status=status, starts=None, ends=None)
        del self._live[event.event_id]
        self._past.append(gone)
        self._bump(changed=True)
        self._watch(Transition(at, "completed" if status == "Completed" else "canceled", gone))
        return gone

    def _put(self, event: Event, at: datetime, what: What, detail: str = "") -> None:
        before = self._live.get(event.event_id)
        self._live[event.event_id] = event
        self._bump(
            changed=before is None or event_fields(before, NEWEST) != event_fields(event, NEWEST)
        )
        self._watch(Transition(at, what, event, detail))

    def _bump(self, *, changed: bool) -> None:
        if changed and not self._hidden:
            self.incarnation += 1 + self._skip
            self._skip = 0
