"""A model of one event in Azure, of the VMs that see it, and of what travels to the hub.

It uses only the functions of the merge. What was told is compared with Azure's true history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta

from relay.events.build import state_digest
from relay.events.model import ScheduledEvent
from relay.fleet.hub.merge import (
    EventHistory,
    GoneFromDocument,
    LastWord,
    Word,
    apply_word,
    end_if_still_gone,
    forget_agent,
    not_in_future,
    restore_history,
    wait_again,
    words_of_pulse,
)
from relay.fleet.hub.merger import last_word
from relay.store.fleet import AgentRow, SightingRow
from tests.events.strategies import make_event

START = datetime(2026, 1, 1, tzinfo=UTC)
SILENT_AFTER = timedelta(seconds=150)
PULSE_TTL = timedelta(seconds=120)
DATE_ERROR = 2.0
"""Seconds by which the time of a read can be wrong: IMDS says it in whole seconds."""


def make_state(name: str) -> ScheduledEvent:
    """Return a state of the event by its name. A name that begins with S or T is Started."""
    if name.startswith(("S", "T")):
        return make_event(description=name, event_status="Started", not_before=None)
    return make_event(description=name)


NOT_STARTED = frozenset(state_digest(make_state(name)) for name in "ABC")


@dataclass(frozen=True)
class Report:
    """A change on its way. ``at`` is when the document was read, as the agent says."""

    word: Word
    at: datetime


@dataclass(frozen=True)
class SentPulse:
    """A pulse on its way. ``at`` is when its document was read, ``left`` is by Azure's clock."""

    state: ScheduledEvent | None
    at: datetime | None
    left: datetime


@dataclass
class Vm:
    """A VM with its agent.

    ``offset``: seconds that its clock is ahead. ``gets_date``: IMDS says the time with a document.
    ``hidden``: its document never shows the event.
    """

    name: str
    offset: float = 0.0
    gets_date: bool = True
    hidden: bool = False
    unhidden_at: datetime | None = None
    polls: bool = True
    connected: bool = True
    dead: bool = False
    state: ScheduledEvent | None = None
    polled_at: datetime | None = None
    read_at: datetime | None = None
    """``polled_at`` as the agent says it."""
    queue: deque[Report] = field(default_factory=deque)
    sent: list[Report] = field(default_factory=list)
    pulses: deque[SentPulse] = field(default_factory=deque)

    @property
    def is_up(self) -> bool:
        return self.connected and not self.dead


@dataclass
class Fleet:
    """Azure, the VMs and the hub. ``truth`` is each state with its time; None: no event."""

    now: datetime = START
    truth: list[tuple[datetime, ScheduledEvent | None]] = field(default_factory=list)
    vms: dict[str, Vm] = field(default_factory=dict)
    history: EventHistory | None = None
    told: list[tuple[datetime, Word, datetime]] = field(default_factory=list)
    """What was told, after when it was told and before when it was seen."""
    rows: dict[str, SightingRow] = field(default_factory=dict)
    """What the state file has of the last words. It has not what a pulse only repeats."""
    agents: dict[str, AgentRow] = field(default_factory=dict)
    """The agents that have sent a document, as the state file has them."""
    heard: dict[str, datetime] = field(default_factory=dict)
    listening_since: datetime = START
    false_ends: int = 0
    """How often the end was told though an agent that can speak saw the event."""
    hub_behind: timedelta = timedelta(0)
    """How far the clock of the hub is behind that of Azure."""
    patient: bool = True
    """An agent sends its reports before its pulses."""

    # --- Azure and its VMs

    @property
    def current(self) -> ScheduledEvent | None:
        return self.truth[-1][1] if self.truth else None

    def view(self, vm: Vm) -> ScheduledEvent | None:
        return None if vm.hidden else self.current

    def poll(self, vm: Vm) -> None:
        if vm.dead or not vm.polls:
            return
        state, read_at = self.view(vm), self.time_of_read(vm)
        if state != vm.state:
            gap = vm.polled_at is None or self.now - vm.polled_at > timedelta(seconds=5)
            vm.queue.append(Report(state or GoneFromDocument(gap=gap), read_at))
        vm.state, vm.polled_at, vm.read_at = state, self.now, read_at

    def time_of_read(self, vm: Vm) -> datetime:
        """Return what the agent says about when it read: by IMDS, or by its own clock."""
        error = max(-DATE_ERROR, min(vm.offset, DATE_ERROR)) if vm.gets_date else vm.offset
        return self.now + timedelta(seconds=error)

    def send_pulse(self, vm: Vm) -> None:
        if not vm.is_up or (self.patient and vm.queue):
            return
        vm.pulses.append(SentPulse(vm.state, vm.read_at, self.now))

    # --- what the hub does

    def is_fresh(self, agent: str) -> bool:
        if agent not in self.heard:
            return False
        return self.now - max(self.heard[agent], self.listening_since) <= SILENT_AFTER

    def deliver(self, vm: Vm) -> None:
        if vm.is_up and vm.queue:
            report = vm.queue.popleft()
            vm.sent.append(report)
            self.hear(vm, report)

    def hear(self, vm: Vm, report: Report) -> None:
        self.heard[vm.name] = self.now
        before = self.history.words.get(vm.name) if self.history is not None else None
        self._apply(vm.name, report.word, report.at)
        word = self.history.words.get(vm.name) if self.history is not None else None
        if word is not None and word is not before:
            self.rows[vm.name] = _row(vm.name, word)

    def deliver_pulse(self, vm: Vm) -> None:
        if not vm.pulses:
            return
        message = vm.pulses.popleft()
        if self.now - message.left > PULSE_TTL:
            return
        self.heard[vm.name] = self.now
        if message.at is None:
            return
        key = make_state("A").lowercase_event_id
        histories = {} if self.history is None else {key: self.history}
        shown = {key: message.state} if message.state is not None else {}
        for word in words_of_pulse(vm.name, shown, histories).values():
            self._apply(vm.name, word, message.at)
        known = self.agents.get(vm.name)
        at = not_in_future(message.at, self.now - self.hub_behind)
        if known is not None and known.document_at is not None:
            at = max(at, known.document_at)
        self.agents[vm.name] = AgentRow(
            scope="", relay=vm.name, user="", name="", first_heard=self.now, document_at=at
        )

    def pass_time(self, seconds: float) -> None:
        """Let time pass. Agents that are connected answer that they show what is ending."""
        end = self.now + timedelta(seconds=seconds)
        while self.now < end:
            if self._is_ending:
                self.now = min(end, self.now + timedelta(seconds=1))
                self._answer_ending()
            else:
                self.now = end
            self._apply_timer()

    def restart_hub(self) -> None:
        self.listening_since = self.now
        if (history := self.restored()) is not None:
            self.history = wait_again(history, self.now - self.hub_behind)

    def restored(self) -> EventHistory | None:
        """Return the history as the state file gives it back."""
        steps = [
            seen if isinstance(word, GoneFromDocument) else (word, seen)
            for _, word, seen in self.told
        ]
        words = {name: last_word(row, self.agents.get(name)) for name, row in self.rows.items()}
        return restore_history(steps, words)

    def forget(self, vm: Vm) -> None:
        self.heard.pop(vm.name, None)
        self.agents.pop(vm.name, None)
        self.rows.pop(vm.name, None)
        if self.history is not None:
            is_last = not list(self.living())
            now = self.now - self.hub_behind
            self._take(*forget_agent(self.history, vm.name, now, is_last=is_last))

    def settle(self, rounds: int) -> None:
        """Let everything that is alive work again, for a number of minutes."""
        for vm in self.vms.values():
            vm.connected = vm.polls = True
            vm.gets_date = True
        for _ in range(rounds):
            for vm in self.living():
                self.poll(vm)
                while vm.queue:
                    self.deliver(vm)
                vm.pulses.clear()
                self.send_pulse(vm)
                self.deliver_pulse(vm)
            self.pass_time(60)

    def living(self) -> Iterator[Vm]:
        return (vm for vm in list(self.vms.values()) if not vm.dead)

    @property
    def _is_ending(self) -> bool:
        return self.history is not None and self.history.end_due_at is not None

    def _answer_ending(self) -> None:
        for vm in self.living():
            if not self._is_ending:
                return
            if vm.is_up and vm.polls:
                self.poll(vm)
                if vm.state is not None:
                    while vm.queue:
                        self.deliver(vm)
                    self.send_pulse(vm)
                    while vm.pulses:
                        self.deliver_pulse(vm)

    def _apply_timer(self) -> None:
        if self.history is not None:
            now = self.now - self.hub_behind
            self._take(*end_if_still_gone(self.history, now, self.is_fresh))

    def _apply(self, agent: str, word: Word, at: datetime) -> None:
        now = self.now - self.hub_behind
        at = not_in_future(at, now)
        self._take(*apply_word(self.history, agent, word, at, now, self.is_fresh))

    def _take(self, history: EventHistory | None, news: Word | None) -> None:
        can_object = self._shows
        if self.history is not None and self.history.is_orphaned:
            can_object = self._would_show
        old = self.history.words if self.history is not None else {}
        self.history = history
        for name, word in history.words.items() if history is not None else ():
            if name not in old or replace(old[name], seen=word.seen) != word:
                self.rows[name] = _row(name, word)
        if history is not None and news is not None:
            self.told.append((self.now, news, history.ended_at or history.told_at))
        if isinstance(news, GoneFromDocument) and any(map(can_object, self.living())):
            self.false_ends += 1

    def _would_show(self, vm: Vm) -> bool:
        """Whether the document of a VM shows the event, which it would say if it was asked.

        After an end that nobody told, it shows the next occurrence.
        """
        told_at = self.history.told_at if self.history is not None else START
        error = timedelta(seconds=DATE_ERROR)
        if any(state is None and at >= told_at - error for at, state in self.truth):
            return False
        return self.view(vm) is not None and vm.is_up and vm.polls and self.is_fresh(vm.name)

    def _shows(self, vm: Vm) -> bool:
        """Whether a VM has said that it sees the event, still does, and would say so again."""
        word = self.history.words.get(vm.name) if self.history is not None else None
        if word is None or word.state is None or self.view(vm) is None:
            return False
        if self.history is not None and self.history.started and word.state in NOT_STARTED:
            return False  # it has seen the next occurrence
        breaks = [at for at, state in self.truth if state is None]
        if vm.unhidden_at is not None:
            breaks.append(vm.unhidden_at)
        tolerance = timedelta(seconds=5)
        is_unbroken = all(word.seen > at + tolerance for at in breaks)
        return is_unbroken and vm.is_up and vm.polls and self.is_fresh(vm.name)


def _row(relay: str, word: LastWord) -> SightingRow:
    return SightingRow(event_key="", relay=relay, **asdict(word))


def told_truly(fleet: Fleet) -> bool:
    """Whether what was told is a part of Azure's true history, in its order, without repeats."""
    truth = iter(fleet.truth)
    for at, word, _ in fleet.told:
        wanted = None if isinstance(word, GoneFromDocument) else word
        since = next((since for since, state in truth if state == wanted), None)
        if since is None or since > at:
            return False
    return True


def told_in_shape(fleet: Fleet) -> bool:
    """Whether each occurrence begins with a state and ends once, and never takes Started back."""
    state: ScheduledEvent | None = None
    for _, word, _ in fleet.told:
        if isinstance(word, GoneFromDocument):
            if state is None:
                return False
            state = None
        elif state is not None and state.is_started and not word.is_started:
            return False
        else:
            state = word
    return True
