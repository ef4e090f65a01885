"""The laws of the merge, against a model of Azure, its VMs and a bad network.

Each example is a walk: Azure changes the event, VMs poll, messages are delivered, repeated and
lost, agents and the hub fail. After each step, and when everything works again, the laws must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override  # in typing from Python 3.12

from relay.events.model import ScheduledEvent
from relay.fleet.hub.merge import EventHistory, GoneFromDocument, LastWord, Word
from tests.depth import depth
from tests.fleet.azure_model import START, Fleet, Vm, make_state, told_in_shape, told_truly

_CHANGE_INTERVAL = 12.0
"""Seconds between two changes of Azure: more than polls are late and clocks are wrong."""
_WAITS = (0.5, 5.0, 11.0, 60.0, 200.0, 100_000.0)
_STATES = ("AB", "ABC", "ABCST", "AS")


class Network:
    """What can happen to VMs that all see the same documents, with clocks that are nearly right."""

    OFFSETS: tuple[float, ...] = (-2.0, 0.0, 1.0, 2.0)
    PATIENT = True

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        behind = timedelta(seconds=chance.choice((0.0, 0.0, 3.0)))
        self.fleet = Fleet(patient=self.PATIENT, hub_behind=behind)
        self._states = chance.choice(_STATES)
        for name in "abc":
            self._add_vm(name)

    @property
    def steps(self) -> Mapping[Callable[[], None], float]:
        return {
            self.change: 5.0,
            self.end: 2.0,
            self.deliver: 8.0,
            self.deliver_all: 5.0,
            self.deliver_again: 2.0,
            self.send_pulse: 5.0,
            self.deliver_pulse: 5.0,
            self.lose_pulse: 1.0,
            self.supersede_report: 3.0,
            self.connect_or_cut_off: 1.0,
            self.poll_or_fail_to: 1.0,
            self.lose_disk: 1.0,
            self.kill: 0.2,
            self.scale_in: 0.2,
            self.join: 0.5,
            self.wait: 3.0,
            self.restart_hub: 1.0,
        }

    def _add_vm(self, name: str) -> None:
        self.fleet.vms[name] = Vm(name, offset=self.chance.choice(self.OFFSETS))

    def _any_vm(self) -> Vm:
        return self.chance.choice(list(self.fleet.vms.values()))

    # --- Azure

    def change(self) -> None:
        """Azure changes the event; soon all VMs that can poll see that."""
        new, current = self.choose_state(), self.fleet.current
        is_regress = current is not None and current.is_started and not new.is_started
        if new != current and not is_regress:
            self._set_state(new)

    def choose_state(self) -> ScheduledEvent:
        return make_state(self.chance.choice(self._states))

    def end(self) -> None:
        if self.fleet.current is not None:
            self._set_state(None)

    def _set_state(self, state: ScheduledEvent | None) -> None:
        fleet = self.fleet
        fleet.pass_time(_CHANGE_INTERVAL)
        fleet.truth.append((fleet.now, state))
        vms = list(fleet.vms.values())
        self.chance.shuffle(vms)
        for vm in vms:
            fleet.now += timedelta(seconds=0.25)
            fleet.poll(vm)

    # --- messages

    def deliver(self) -> None:
        self._deliver(self._any_vm())

    def deliver_all(self) -> None:
        vm = self._any_vm()
        while vm.is_up and vm.queue:
            self._deliver(vm)

    def _deliver(self, vm: Vm) -> None:
        if vm.is_up and vm.queue:
            word = vm.queue[0].word
            self.fleet.deliver(vm)
            self.check_delivered(word)

    def check_delivered(self, word: Word) -> None:
        """A law about a report that the hub has just received."""

    def deliver_again(self) -> None:
        """The hub was killed before it acknowledged: the broker delivers the last again."""
        vm = self._any_vm()
        for report in vm.sent[-self.chance.randint(1, 4) :]:
            self.fleet.hear(vm, report)

    def send_pulse(self) -> None:
        vm = self._any_vm()
        self.fleet.poll(vm)
        self.fleet.send_pulse(vm)

    def deliver_pulse(self) -> None:
        self.fleet.deliver_pulse(self._any_vm())

    def lose_pulse(self) -> None:
        vm = self._any_vm()
        if vm.pulses:
            vm.pulses.popleft()

    def supersede_report(self) -> None:
        """The agent does not send a report, because the hub has told the same."""
        vm = self._any_vm()
        told = [word for _, word, _ in self.fleet.told[-2:]]
        if vm.queue and vm.queue[0].word in told:
            vm.queue.popleft()

    # --- trouble

    def connect_or_cut_off(self) -> None:
        self._any_vm().connected = self.chance.random() < 0.6

    def poll_or_fail_to(self) -> None:
        vm = self._any_vm()
        vm.polls = self.chance.random() < 0.6
        self.fleet.poll(vm)

    def lose_disk(self) -> None:
        """The agent begins anew: it knows no event and has nothing to send."""
        vm = self._any_vm()
        vm.queue.clear()
        vm.state = vm.polled_at = vm.read_at = None
        self.fleet.poll(vm)

    def kill(self) -> None:
        if len(list(self.fleet.living())) > 1:
            self._any_vm().dead = True

    def scale_in(self) -> None:
        vm = self._any_vm()
        if len(list(self.fleet.living())) > 1:
            vm.dead = True
            self.fleet.forget(vm)

    def join(self) -> None:
        if "d" not in self.fleet.vms:
            self._add_vm("d")
            self.fleet.poll(self.fleet.vms["d"])

    def wait(self) -> None:
        self.fleet.pass_time(self.chance.choice(_WAITS))

    def restart_hub(self) -> None:
        self.fleet.restart_hub()

    # --- laws

    def check(self) -> None:
        assert told_in_shape(self.fleet), "each occurrence appears, changes, starts and ends"
        restored, history = self.fleet.restored(), self.fleet.history
        assert (restored is None) == (history is None)
        if restored is not None and history is not None:
            of_rows, of_memory = map(self.without_lost_times, (restored, history))
            assert of_rows == of_memory, "the rows give the history back"
        self.check_truth()

    def is_time_lost(self, name: str, word: LastWord) -> bool:
        """Whether the rows may give back another time.

        A pulse repeated that the event is gone. Or a report came again after a later document, from
        an agent that was forgotten between: then a restart takes the time of the document, and an
        end can come later.
        """
        agent = self.fleet.agents.get(name)
        document_at = agent.document_at if agent is not None else None
        return word.state is None or (document_at is not None and word.seen < document_at)

    def without_lost_times(self, history: EventHistory) -> EventHistory:
        known = self.fleet.history.words if self.fleet.history is not None else {}
        words = {
            name: replace(word, seen=START)
            if name in known and self.is_time_lost(name, known[name])
            else word
            for name, word in history.words.items()
        }
        return replace(history, words=words, end_due_at=None)  # that is only in memory

    def check_truth(self) -> None:
        assert told_truly(self.fleet), "what is told is Azure's history"
        assert not self.fleet.false_ends, "nothing ends while an agent can say that it is there"

    def check_agreement(self) -> None:
        """Let everything work again. Then the hub says what Azure says."""
        fleet = self.fleet
        fleet.settle(20)
        for vm in list(fleet.vms.values()):
            if vm.dead:
                fleet.forget(vm)
        fleet.settle(5)
        self.check()
        views = [state for vm in fleet.living() if (state := fleet.view(vm)) is not None]
        if views:
            assert fleet.told[-1][1] in views
        else:
            assert not fleet.told or isinstance(fleet.told[-1][1], GoneFromDocument)


class SplitDocuments(Network):
    """VMs of one scope can see different documents: the event is in some and not in others."""

    @property
    @override
    def steps(self) -> Mapping[Callable[[], None], float]:
        return {**super().steps, self.hide_or_show: 3.0}

    def hide_or_show(self) -> None:
        self.fleet.pass_time(_CHANGE_INTERVAL)
        vm = self._any_vm()
        vm.hidden, vm.unhidden_at = self.chance.random() < 0.5, self.fleet.now
        self.fleet.poll(vm)

    @override
    def check_truth(self) -> None:
        assert not self.fleet.false_ends, "nothing ends while an agent can say that it is there"


class BadClocks(Network):
    """Clocks are wrong by minutes, IMDS may not say the time, and pulses overtake reports."""

    OFFSETS = (-600.0, -60.0, 60.0, 600.0)
    PATIENT = False

    @property
    @override
    def steps(self) -> Mapping[Callable[[], None], float]:
        return {**super().steps, self.get_or_lose_date: 3.0}

    def get_or_lose_date(self) -> None:
        self._any_vm().gets_date = self.chance.random() < 0.5

    @override
    def is_time_lost(self, name: str, word: LastWord) -> bool:
        """A document that overtakes a report is later than the word of that."""
        return True

    @override
    def check_truth(self) -> None:
        """Times prove nothing here."""


class DistinctStates(Network):
    @override
    def change(self) -> None:
        if not self.fleet.truth or self.fleet.current is not None:
            super().change()

    @override
    def choose_state(self) -> ScheduledEvent:
        current = self.fleet.current
        is_started = current is not None and current.is_started
        name = "S" if is_started else super().choose_state().description
        return make_state(f"{name}{len(self.fleet.truth)}")

    @override
    def check_delivered(self, word: Word) -> None:
        """What an agent reports is told, unless a later state or the end was told before."""
        if isinstance(word, ScheduledEvent):
            states = [state for _, state in self.fleet.truth]
            told = [
                None if isinstance(word, GoneFromDocument) else word
                for _, word, _ in self.fleet.told
            ]
            assert any(state in told for state in states[states.index(word) :])


@pytest.mark.parametrize("network", [Network, SplitDocuments, BadClocks, DistinctStates])
@given(chance=st.randoms(use_true_random=False))
@settings(max_examples=depth(2500, 60))
def test_the_laws_hold_whatever_happens(network: type[Network], chance: Random) -> None:
    walk = network(chance)
    # Each walk has its own mixture of what happens.
    steps = {step: weight * chance.choice((0.2, 1, 2)) for step, weight in walk.steps.items()}
    for _ in range(chance.randint(5, 60)):
        (step,) = chance.choices(list(steps), list(steps.values()))
        step()
        walk.check()
    walk.check_agreement()
