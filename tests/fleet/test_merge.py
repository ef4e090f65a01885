"""The merge of what agents say about one event: stories whose times and edges no law shows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest

from relay.fleet.hub.merge import (
    EventHistory,
    GoneFromDocument,
    Word,
    apply_word,
    end_if_still_gone,
    forget_agent,
    not_in_future,
    restore_history,
    wait_again,
    words_of_pulse,
)
from tests.clocks import NOON
from tests.events.strategies import make_event

A = make_event(description="A")
B = make_event(description="B")
C = make_event(description="C")
STARTED = make_event(description="S", event_status="Started", not_before=None)
GONE = GoneFromDocument(gap=False)
DAY = 86_400.0


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


@dataclass
class Hub:
    """A history, and what was told of it. ``silent`` names the agents that are not fresh."""

    history: EventHistory | None = None
    told: list[Word] = field(default_factory=list)
    silent: Collection[str] = ()

    @classmethod
    def of(cls, agents: str) -> Hub:
        """Return a hub that has heard A of these agents, at 0 s."""
        hub = cls()
        for agent in agents:
            hub.hear(agent, A, 0)
        return hub

    def hear(self, agent: str, word: Word, seen: float, *, now: float | None = None) -> Word | None:
        """Apply a word that an agent saw and, if ``now`` is given, said later."""
        moment = at(seen if now is None else now)
        seen_at = not_in_future(at(seen), moment)
        fresh = self._is_fresh
        return self._take(*apply_word(self.history, agent, word, seen_at, moment, fresh))

    def hear_all(self, agents: str, word: Word, seen: float) -> None:
        for agent in agents:
            self.hear(agent, word, seen)

    def wait_until(self, now: float) -> Word | None:
        return self._take(*end_if_still_gone(self.known, at(now), self._is_fresh))

    def forget(self, agent: str, now: float, *, is_last: bool = False) -> Word | None:
        return self._take(*forget_agent(self.known, agent, at(now), is_last=is_last))

    @property
    def known(self) -> EventHistory:
        assert self.history is not None
        return self.history

    @property
    def states(self) -> str:
        """What was told: the descriptions of states, and a dot for an end."""
        return "".join(
            "." if isinstance(it, GoneFromDocument) else f"{it.description}" for it in self.told
        )

    def _is_fresh(self, agent: str) -> bool:
        return agent not in self.silent

    def _take(self, history: EventHistory | None, news: Word | None) -> Word | None:
        self.history = history
        if news is not None:
            self.told.append(news)
        return news


# --- states


def test_an_agent_that_moves_back_to_a_state_tells_it_again_and_those_behind_do_not() -> None:
    hub = Hub.of("ab")
    assert hub.hear("a", B, 1) == B
    assert hub.known.told_at == at(1)
    hub.hear("c", A, 2)
    assert hub.hear("a", A, 3) == A
    hub.hear_all("bc", B, 4)
    hub.hear_all("bc", A, 5)
    assert hub.states == "ABA"


def test_an_agent_that_cannot_read_keeps_no_state_that_others_have_left() -> None:
    """It is heard, and shows the last state told, but its word is old."""
    hub = Hub.of("abc")
    hub.hear_all("abc", B, 1)
    hub.hear_all("ab", A, 100)
    assert hub.states == "AB"
    hub.hear("a", A, 152)
    assert hub.states == "ABA"


@pytest.mark.parametrize(("silent", "news"), [("b", A), ("", None)])
def test_a_silent_agent_keeps_no_state_that_another_has_left(
    silent: str, news: Word | None
) -> None:
    hub = Hub.of("ab")
    hub.hear_all("ab", B, 10)
    hub.silent = silent
    assert hub.hear("a", A, 20) == news


@pytest.mark.parametrize("word", [A, B, GONE], ids=["A", "B", "gone"])
@pytest.mark.parametrize("seen", [0, 19, 20])
def test_a_word_not_later_than_its_agents_last_changes_nothing(word: Word, seen: float) -> None:
    """An agent never says two things of one time, so it comes again."""
    hub = Hub.of("ab")
    hub.hear("a", B, 20)
    before = hub.history
    assert hub.hear("a", word, seen, now=21) is None
    assert hub.history == before


def test_a_state_that_somebody_saw_later_than_another_is_not_replaced_by_that() -> None:
    hub = Hub.of("ab")
    hub.hear("a", C, 10)
    hub.hear("a", C, 60)  # a pulse
    assert hub.hear("b", B, 54.9, now=61) is None
    assert hub.hear("c", B, 55.1, now=62) == B


def test_an_end_that_nobody_reported_is_told_when_the_event_is_not_started_any_more() -> None:
    hub = Hub()
    hub.hear("a", STARTED, 0)
    hub.silent = "a"
    assert hub.hear("b", A, 150) is None
    assert hub.hear("b", A, 151) == GoneFromDocument(gap=True)
    assert hub.known.ended_at == at(151)
    assert hub.hear("a", STARTED, 150) is None
    assert hub.hear("b", A, 152) == A


# --- ends


def test_an_event_ends_when_every_fresh_agent_says_gone_with_the_facts_of_all() -> None:
    hub = Hub.of("abcd")
    hub.silent = "d"
    hub.hear("a", GoneFromDocument(rebooted=True, gap=True), 5)
    hub.hear("a", GoneFromDocument(), 6)  # its pulse knows less
    hub.hear("b", GONE, 6)
    hub.hear("b", GoneFromDocument(), 7)
    assert hub.hear("c", GoneFromDocument(), 8) == GoneFromDocument(rebooted=True, gap=False)
    assert hub.known.ended_at == at(8)


def test_an_event_does_not_end_while_an_agent_says_again_that_it_is_there() -> None:
    hub = Hub.of("abc")
    hub.hear("a", GONE, 5)
    assert hub.known.end_due_at == at(15)
    hub.hear("b", A, 6)
    for minute in range(1, 5):
        assert hub.known.end_due_at is None
        assert hub.wait_until(60.0 * minute - 1) is None
        hub.hear("a", GONE, 60.0 * minute)
        assert hub.known.end_due_at is None, "b has shown the event within 150 s"
        hub.hear("b", A, 60.0 * minute + 1)
    hub.hear("b", GONE, 299)  # c said nothing again
    assert hub.wait_until(308.9) is None
    assert hub.wait_until(309) == GONE
    assert hub.known.ended_at == at(299)
    assert hub.known.end_due_at is None


def test_an_agent_that_cannot_read_its_document_does_not_keep_an_event_alive() -> None:
    hub = Hub.of("ab")
    hub.hear("a", GONE, 5)
    hub.hear("b", A, 6)
    # From now on b sends pulses, but what they say was seen at 6 s.
    for second in (60, 120, 156):
        hub.hear("a", GONE, second)
        hub.hear("b", A, 6, now=second)
        assert hub.known.end_due_at is None
    hub.hear("a", GONE, 157)
    hub.hear_all("bc", A, 6)
    assert hub.wait_until(166) is None
    assert hub.wait_until(167) == GONE


def test_an_agent_that_is_behind_does_not_end_what_another_saw_later() -> None:
    hub = Hub.of("ab")
    hub.hear("b", A, 1000)
    hub.silent = "b"
    assert hub.hear("a", GONE, 994, now=2000) is None
    assert hub.known.end_due_at is None
    assert hub.hear("a", GONE, 996, now=2001) == GONE


def test_an_event_that_was_seen_after_it_was_gone_does_not_end_after_a_restart() -> None:
    """Whoever saw it last is known to the state file, and says nothing now."""
    hub = Hub.of("ab")
    hub.hear("a", GONE, 5)
    hub.hear("b", A, 11)
    hub.history = wait_again(hub.known, at(3600))
    assert hub.wait_until(3610) is None
    assert hub.known.end_due_at is None
    hub.hear("a", GONE, 3611)
    assert hub.wait_until(3621) == GONE


def test_nothing_ends_if_no_agent_is_fresh() -> None:
    hub = Hub.of("ab")
    hub.hear("a", GONE, 5)
    hub.silent = "ab"
    assert hub.wait_until(1000) is None
    assert hub.known.end_due_at is None
    hub.silent = "b"
    assert hub.hear("a", GONE, 1001) == GONE


def test_the_events_of_a_scope_end_when_its_last_agent_is_forgotten() -> None:
    hub = Hub.of("ab")
    for agent in ("unknown", "a"):
        assert hub.forget(agent, DAY) is None
    assert hub.forget("b", DAY, is_last=True) == GoneFromDocument(gap=True)
    assert (hub.known.words, hub.known.ended_at) == ({}, at(DAY))
    assert hub.hear("b", A, 10, now=DAY + 1) is None
    assert hub.hear("b", A, DAY + 200) == A
    assert hub.forget("b", DAY + 300, is_last=True) is not None
    assert hub.forget("b", DAY + 300, is_last=True) is None


def test_an_event_stays_when_the_only_agent_that_told_it_is_forgotten_and_others_see_it() -> None:
    """They left out what the hub knew. One has read its document before the event was in it."""
    hub = Hub.of("a")
    assert hub.forget("a", 10) is None
    assert hub.known.is_orphaned
    assert hub.wait_until(1000) is None
    for word in words_of_pulse("b", {}, {A.lowercase_event_id: hub.known}).values():
        assert hub.hear("b", word, 1000) is None
    assert hub.known.end_due_at is not None
    assert hub.hear("c", A, 1005) is None
    assert hub.known.end_due_at is None
    assert hub.hear("c", B, 2001) == B


def test_after_a_restart_the_hub_waits_again_for_those_that_show_the_event() -> None:
    hub = Hub.of("ab")
    assert wait_again(hub.known, at(1)) == hub.history
    hub.hear("a", GONE, 5)
    hub.history = wait_again(hub.known, at(3600))
    assert hub.wait_until(3609) is None
    assert Hub(hub.history).wait_until(3610) == GONE
    hub.hear("b", A, 3609)
    assert hub.wait_until(3610) is None
    hub.hear_all("ab", GONE, 3611)
    assert wait_again(hub.known, at(4000)).end_due_at is None
    assert restore_history([at(1)], {}) is None, "the rows before were pruned"


def test_an_agent_that_is_behind_does_not_end_a_return() -> None:
    hub = Hub.of("abc")
    hub.hear_all("ab", GONE, 10)
    hub.wait_until(20)
    hub.hear("a", A, 21)
    hub.silent = "a"
    assert hub.hear("b", GONE, 18, now=22) is None  # it can be the end before
    old: list[Word] = [GONE, A, GONE, B, GONE]
    for seen, word in enumerate(old, 12):
        assert hub.hear("c", word, seen, now=23) is None
        assert hub.known.end_due_at is None
    assert hub.states == "A.A"


# --- clocks and pulses


def test_a_time_in_the_future_does_not_silence_the_other_agents() -> None:
    hub = Hub()
    hub.hear("a", A, DAY, now=0)
    assert hub.known.words["a"].seen == at(5)
    assert hub.hear("b", B, 1) == B


def test_a_pulse_stands_for_a_word_about_each_event_that_the_agent_knew_or_knows() -> None:
    events = {name: make_event(event_id=name.upper()) for name in ("new", "kept", "lost", "other")}
    hubs = {name: Hub() for name in ("kept", "lost", "other", "gone", "over", "left")}
    for name, hub in hubs.items():
        hub.hear("b" if name == "other" else "a", events.get(name, A), 0)
    hubs["gone"].hear("b", A, 0)
    hubs["gone"].hear("a", GONE, 1)
    hubs["over"].hear("a", GONE, 1)
    hubs["left"].hear("b", A, 0)
    hubs["left"].silent = "a"
    hubs["left"].hear("b", GONE, 1)
    histories = {name: hub.known for name, hub in hubs.items()}
    shown = {name: events[name] for name in ("kept", "new")}
    assert words_of_pulse("a", shown, histories) == {
        "new": events["new"],
        "kept": events["kept"],
        "lost": GoneFromDocument(),
        "gone": GoneFromDocument(),  # it says so again: others may have become silent since
        "left": GoneFromDocument(),  # it has ended, and the agent still showed it
    }
