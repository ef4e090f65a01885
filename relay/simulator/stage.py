"""The scope brought to life: it has a clock, remembers who called, lets faults happen, and tests can wait for what it does."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay.clock import Clock, SystemClock
from relay.simulator.event import Event, Plan
from relay.simulator.faults import Fault, Faults
from relay.simulator.scope import Scope, Setup, Transition

_CALLS = 10_000  # remembered


@dataclass(slots=True)
class Call:
    """One call that came in."""

    at: datetime
    vm: str
    """The VM whose address was called."""
    method: str
    path: str
    query: str
    peer: str
    """Address and port of the caller."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    event_ids: tuple[str, ...] = ()
    """The EventIds of a StartRequest, as they came."""
    status: int | None = None
    """What was answered; None while it is not, and where the connection was broken off."""
    fault: str | None = None
    """What went wrong on purpose."""


class Stage:
    """Azure for one scope, without its HTTP. Methods take an Event, or its EventId or name, and raise what `Scope` raises."""

    def __init__(
        self,
        setup: Setup | None = None,
        *,
        clock: Clock | None = None,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.setup = setup or Setup()
        self.clock: Clock = clock or SystemClock()
        self.scope = Scope(self.setup, new_id=new_id, watch=self._watch)
        self.faults = Faults()
        self.calls: deque[Call] = deque(maxlen=_CALLS)
        self._tell = tell
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._running = False

    # what a test or a playbook does

    def schedule(self, plan: Plan) -> Event:
        """Let an event appear."""
        return self._settled(self.scope.schedule(plan, self.clock.now()))

    def start(self, event: Event | str) -> Event:
        """Start a Scheduled event at once."""
        return self._settled(self.scope.start(_ref(event), self.clock.now()))

    def end(self, event: Event | str) -> Event:
        """End a Started event at once."""
        return self._settled(self.scope.end(_ref(event), self.clock.now()))

    def cancel(self, event: Event | str) -> Event:
        """Take a Scheduled event back."""
        return self._settled(self.scope.cancel(_ref(event), self.clock.now()))

    def update(
        self,
        event: Event | str,
        *,
        notice: float | None = None,
        resources: Sequence[str] | None = None,
        description: str | None = None,
        duration: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Event:
        """Change a live event; None leaves a thing as it is. ``notice`` is in seconds from now."""
        changed = self.scope.update(
            _ref(event),
            self.clock.now(),
            notice=notice,
            resources=resources,
            description=description,
            duration=duration,
            fields=fields,
        )
        return self._settled(changed)

    def approve(self, event: Event | str, vm: str) -> Event:
        """Approve as another VM, or as an operator through Azure Resource Manager, would."""
        return self._settled(self.scope.approve_one(_ref(event), vm, self.clock.now()))

    def fault(self, fault: Fault) -> None:
        """Let a fault happen from now on."""
        self.faults.add(fault, self.clock.now(), self.scope.span)
        self.tell(f"fault {name_of(fault)} waits for {fault.on} calls")

    def clear_faults(self) -> None:
        """Let all answers be right again."""
        self.faults.clear()
        self.tell("no more faults")

    def skip_incarnations(self, numbers: int) -> None:
        """Let DocumentIncarnation leave out that many numbers at the next change."""
        self.scope.skip(numbers, self.clock.now())

    def reset_incarnation(self, to: int = 1) -> None:
        """Let DocumentIncarnation go on from another number."""
        self.scope.reset(to, self.clock.now())
        self.notify()

    def disable(self) -> None:
        """Switch the service off, as Azure does after a day without a call."""
        self.scope.disable(self.clock.now())
        self.notify()

    def tell(self, text: str) -> None:
        """Tell whoever watches, with the time."""
        self._tell(f"{self.clock.now():%H:%M:%S} {text}")

    # what a test looks at and waits for

    @property
    def events(self) -> tuple[Event, ...]:
        """Every event in the document now."""
        self.tick()
        return self.scope.events

    def event(self, event: Event | str) -> Event:
        """The event as it is now, also when it is gone."""
        self.tick()
        return self.scope.find(_ref(event))

    @property
    def start_requests(self) -> tuple[Call, ...]:
        """Every POST that came in, whatever it was answered."""
        return tuple(call for call in self.calls if call.method == "POST")

    async def approved(self, event: Event | str, *, within: float) -> Event:
        """Wait at most ``within`` seconds (never scaled) until all have approved who must. Raises TimeoutError."""
        return await self._wait(event, lambda found: found.approved, "approved", within)

    async def started(self, event: Event | str, *, within: float) -> Event:
        """Wait until the event is no longer Scheduled. Raises TimeoutError."""
        return await self._wait(event, lambda found: found.status != "Scheduled", "started", within)

    async def ended(self, event: Event | str, *, within: float) -> Event:
        """Wait until the event is gone. Raises TimeoutError."""
        return await self._wait(event, lambda found: not found.live, "gone", within)

    async def until(self, condition: Callable[[], bool], *, within: float | None = None) -> None:
        """Wait until something holds; it is asked again after every call and every change. Raises TimeoutError."""
        async with asyncio.timeout(within):
            while not condition():
                await self._changed.wait()

    # the clockwork

    def tick(self) -> None:
        """Let happen what is due. Only a test whose clock stands still needs to call it."""
        self.scope.tick(self.clock.now())

    def notify(self) -> None:
        """Wake whoever waits, and set the timer for what is due next."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and (due := self.scope.due()) is not None:
            seconds = (due - self.clock.now()).total_seconds()
            self._timer = asyncio.get_running_loop().call_later(max(seconds, 0.001), self._on_time)

    def begin(self) -> None:
        """Let time run: from now on what is due happens by itself. Needs a running event loop."""
        self._running = True
        self.notify()

    def stop(self) -> None:
        """Let time stand still."""
        self._running = False
        self.notify()

    def _on_time(self) -> None:
        self.tick()
        self.notify()

    def _settled(self, event: Event) -> Event:
        self.notify()
        return event

    def _watch(self, happening: Transition) -> None:
        self._tell(f"{happening.at:%H:%M:%S} {_line(happening)}")

    async def _wait(
        self, event: Event | str, condition: Callable[[Event], bool], state: str, within: float
    ) -> Event:
        ref = _ref(event)
        try:
            await self.until(lambda: condition(self.event(ref)), within=within)
        except TimeoutError as error:
            found = self.event(ref)
            by = ", ".join(found.approved_by) or "nobody"
            raise TimeoutError(
                f"expected {ref} to be {state} within {within:g} s, it is {found.status}, approved by {by}"
            ) from error
        return self.event(ref)


def name_of(fault: Fault) -> str:
    """A fault in a word, for people."""
    return str(fault.status) if fault.kind == "status" else fault.kind


def _ref(event: Event | str) -> str:
    return event if isinstance(event, str) else event.event_id


def _line(happening: Transition) -> str:
    event = happening.event
    if event is None:
        return happening.detail
    plan = event.plan
    text = f"{happening.what:<9} {plan.type} {event.event_id} of {', '.join(event.resources) or 'no VM'}"
    if happening.what in ("scheduled", "updated") and event.status == "Scheduled":
        text += f", not before {event.not_before:%Y-%m-%d %H:%M:%S} UTC, {plan.source}, {plan.duration} s"
    return " ".join(filter(None, (text, happening.detail)))
