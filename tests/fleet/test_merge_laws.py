"""The laws of the merge, against a model of Azure, its VMs and a bad network."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override  # in typing from Python 3.12

from relay.events.model import ScheduledEvent
from relay.fleet.hub.merge import Word
from tests.fleet.azure_model import (
    Fleet,
    Vm,
    make_state,
    told_in_shape,
    told_truly,
    took_started_back,
)

_NAMES = ["a", "b", "c", "d"]
_VMS = st.sampled_from(_NAMES)
_CHANGE_INTERVAL = 12.0
"""Seconds between two changes of Azure: more than polls are late and clocks are wrong."""


class Network(RuleBasedStateMachine):
    """What can happen to VMs that all see the same documents, with clocks that are nearly right."""

    fleet: Fleet
    OFFSETS = (-2.0, 0.0, 1.0, 2.0)
    PATIENT = True

    @initialize(choices=st.lists(st.integers(0, 3), min_size=4, max_size=4))
    def begin(self, choices: list[int]) -> None:
        self.fleet = Fleet(patient=self.PATIENT)
        offsets = [self.OFFSETS[choice] for choice in choices]
        for name, offset in zip(_NAMES[:3], offsets, strict=False):
            self.fleet.vms[name] = Vm(name, offset=offset)
        self._joining_offset = offsets[-1]

    # --- Azure

    @rule(state=st.sampled_from(["A", "B", "C", "S1", "S2"]), delays=st.permutations(_NAMES))
    def change(self, state: str, delays: list[str]) -> None:
        """Azure changes the event; soon all VMs that can poll see that."""
        new, current = self.choose_state(state), self.fleet.current
        if (
            new is None
            or new == current
            or (current is not None and current.is_started and not new.is_started)
        ):
            return
        self._azure(new, delays)

    def choose_state(self, name: str) -> ScheduledEvent | None:
        return make_state(name)

    @precondition(lambda self: self.fleet.current is not None)
    @rule(delays=st.permutations(_NAMES))
    def end(self, delays: list[str]) -> None:
        self._azure(None, delays)

    def _azure(self, state: ScheduledEvent | None, delays: list[str]) -> None:
        fleet = self.fleet
        fleet.pass_time(_CHANGE_INTERVAL)
        fleet.truth.append((fleet.now, state))
        for name in delays:
            if name in fleet.vms:
                fleet.now += timedelta(seconds=0.25)
                fleet.poll(fleet.vms[name])

    # --- messages

    @rule(name=_VMS)
    def deliver(self, name: str) -> None:
        vm = self.fleet.vms.get(name)
        if vm is not None and vm.is_up and vm.queue:
            word = vm.queue[0].word
            self.fleet.deliver(vm)
            self.check_delivered(word)

    def check_delivered(self, word: Word) -> None:
        """A law about a report that the hub has just received."""

    @rule(name=_VMS)
    def deliver_all(self, name: str) -> None:
        if name in self.fleet.vms:
            while self.fleet.vms[name].is_up and self.fleet.vms[name].queue:
                self.fleet.deliver(self.fleet.vms[name])

    @rule(name=_VMS, first=st.integers(0, 3))
    def deliver_again(self, name: str, first: int) -> None:
        """The hub was killed before it acknowledged: the broker delivers the last again."""
        if name in self.fleet.vms:
            vm = self.fleet.vms[name]
            for report in vm.sent[-1 - first :]:
                self.fleet.hear(vm, report)

    @rule(name=_VMS)
    def send_pulse(self, name: str) -> None:
        if name in self.fleet.vms:
            vm = self.fleet.vms[name]
            self.fleet.poll(vm)
            self.fleet.send_pulse(vm)

    @rule(name=_VMS)
    def deliver_pulse(self, name: str) -> None:
        if name in self.fleet.vms:
            self.fleet.deliver_pulse(self.fleet.vms[name])

    @rule(name=_VMS)
    def lose_pulse(self, name: str) -> None:
        if name in self.fleet.vms and self.fleet.vms[name].pulses:
            self.fleet.vms[name].pulses.popleft()

    # --- trouble

    @rule(name=_VMS)
    def supersede_report(self, name: str) -> None:
        """The agent does not send a report, because the hub has told the same."""
        vm = self.fleet.vms.get(name)
        if vm is not None and len(vm.queue) > 0 and self._is_told(vm):
            vm.queue.popleft()

    def _is_told(self, vm: Vm) -> bool:
        word = vm.queue[0].word
        history = self.fleet.history
        if history is None:
            return False
        return any(getattr(news, "event", None) == word for _, news in self.fleet.told[-2:])

    @rule(name=_VMS, connected=st.booleans())
    def connect(self, name: str, connected: bool) -> None:
        if name in self.fleet.vms:
            self.fleet.vms[name].connected = connected

    @rule(name=_VMS, polls=st.booleans())
    def poll_or_not(self, name: str, polls: bool) -> None:
        if name in self.fleet.vms:
            self.fleet.vms[name].polls = polls
            self.fleet.poll(self.fleet.vms[name])

    @rule(name=_VMS)
    def lose_disk(self, name: str) -> None:
        """The agent begins anew: it knows no event and has nothing to send."""
        if name in self.fleet.vms:
            vm = self.fleet.vms[name]
            vm.queue.clear()
            vm.state = vm.polled_at = None
            self.fleet.poll(vm)

    @rule(name=_VMS)
    def kill(self, name: str) -> None:
        if name in self.fleet.vms and len(list(self.fleet.living())) > 1:
            self.fleet.vms[name].dead = True

    @rule()
    def join(self) -> None:
        if "d" not in self.fleet.vms:
            vm = self.fleet.vms["d"] = Vm("d", offset=self._joining_offset)
            self.fleet.poll(vm)

    @rule(seconds=st.sampled_from([0.5, 5.0, 11.0, 60.0, 200.0, 100_000.0]))
    def wait(self, seconds: float) -> None:
        self.fleet.pass_time(seconds)

    @rule()
    def restart_hub(self) -> None:
        self.fleet.restart_hub()

    # --- laws

    @invariant()
    def each_occurrence_appears_changes_and_ends(self) -> None:
        if hasattr(self, "fleet"):
            assert told_in_shape(self.fleet)

    @invariant()
    def nothing_ends_while_an_agent_can_say_that_it_sees_the_event(self) -> None:
        if hasattr(self, "fleet"):
            assert not self.fleet.false_ends

    @invariant()
    def started_is_never_taken_back(self) -> None:
        if hasattr(self, "fleet"):
            assert not took_started_back(self.fleet)

    @invariant()
    def the_rows_give_the_history_back(self) -> None:
        if hasattr(self, "fleet"):
            assert self.fleet.restored() == self.fleet.history

    @invariant()
    def what_is_told_is_azures_history(self) -> None:
        if hasattr(self, "fleet"):
            assert told_truly(self.fleet)

    @override
    def teardown(self) -> None:
        """In the end, the hub says what Azure says."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.settle(20)
        for vm in list(fleet.vms.values()):
            if vm.dead:
                fleet.forget(vm)
        fleet.settle(5)
        self.each_occurrence_appears_changes_and_ends()
        self.started_is_never_taken_back()
        self.what_is_told_is_azures_history()
        self.agree()

    def agree(self) -> None:
        fleet, history = self.fleet, self.fleet.history
        views = [state for vm in fleet.living() if (state := fleet.view(vm)) is not None]
        if views:
            assert history is not None
            assert history.ended_at is None
            last = [news.event for _, news in fleet.told if hasattr(news, "event")][-1]
            assert last in views
        else:
            assert history is None or history.ended_at is not None


class SplitDocuments(Network):
    """VMs of one scope can see different documents: the event is in some and not in others."""

    @rule(name=_VMS, hidden=st.booleans())
    def hide(self, name: str, hidden: bool) -> None:
        if name in self.fleet.vms:
            self.fleet.pass_time(_CHANGE_INTERVAL)
            vm = self.fleet.vms[name]
            vm.hidden, vm.unhidden_at = hidden, self.fleet.now
            self.fleet.poll(vm)

    @override
    def what_is_told_is_azures_history(self) -> None:
        """There is no one history."""


class BadClocks(Network):
    """Clocks are wrong by minutes, perhaps unknown to the hub, and pulses overtake reports."""

    OFFSETS = (-600.0, -60.0, 60.0, 600.0)
    PATIENT = False

    @rule(name=_VMS, known=st.booleans())
    def learn_offset(self, name: str, known: bool) -> None:
        if name in self.fleet.vms:
            self.fleet.vms[name].is_offset_known = known

    @override
    def what_is_told_is_azures_history(self) -> None:
        """Times prove nothing here."""

    @override
    def nothing_ends_while_an_agent_can_say_that_it_sees_the_event(self) -> None:
        """Nor does what an agent said before."""


class DistinctStates(Network):
    """One occurrence whose states differ all."""

    @override
    def choose_state(self, name: str) -> ScheduledEvent | None:
        fleet = self.fleet
        if fleet.truth and fleet.current is None:
            return None
        started = fleet.current is not None and fleet.current.is_started
        return make_state(f"{'S' if started else name[0]}{len(fleet.truth)}")

    @override
    def check_delivered(self, word: Word) -> None:
        """What an agent reports is told, unless a later state was told before."""
        if isinstance(word, ScheduledEvent):
            states = [state for _, state in self.fleet.truth]
            told = [getattr(news, "event", None) for _, news in self.fleet.told]
            assert any(state in told for state in states[states.index(word) :])


_SETTINGS = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestNetwork = Network.TestCase
TestNetwork.settings = _SETTINGS
TestSplitDocuments = SplitDocuments.TestCase
TestSplitDocuments.settings = _SETTINGS
TestBadClocks = BadClocks.TestCase
TestBadClocks.settings = _SETTINGS
TestDistinctStates = DistinctStates.TestCase
TestDistinctStates.settings = _SETTINGS
