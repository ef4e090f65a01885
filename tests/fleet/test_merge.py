"""The merge of what agents say about one event: each case is told as a story."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest

from relay.events.model import ScheduledEvent
from relay.fleet.hub.merge import (
    END_WAIT,
    EventAppeared,
    EventChanged,
    EventEnded,
    EventHistory,
    GoneFromDocument,
    News,
    Word,
    apply_word,
    end_if_still_gone,
    forget_agent,
    not_in_future,
    restore_history,
    wait_again,
    words_of_pulse,
)
from tests.events.strategies import make_event

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
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
    told: list[News] = field(default_factory=list)
    silent: Collection[str] = ()

    @classmethod
    def of(cls, agents: str) -> Hub:
        """Return a hub that has heard A of these agents, at 0 s."""
        hub = cls()
        for agent in agents:
            hub.hear(agent, A, 0)
        return hub

    def hear(self, agent: str, word: Word, seen: float, *, now: float | None = None) -> News | None:
        """Apply a word that an agent saw and, if ``now`` is given, said later."""
        return self._take(
            *apply_word(
                self.history,
                agent,
                word,
                not_in_future(at(seen), at(seen if now is None else now)),
                at(seen if now is None else now),
                self._is_fresh,
            )
        )

    def wait_until(self, now: float) -> News | None:
        """Let time pass."""
        return self._take(*end_if_still_gone(self.known, at(now), self._is_fresh))

    def forget(self, agent: str, now: float, *, is_last: bool = False) -> News | None:
        return self._take(*forget_agent(self.known, agent, at(now), is_last=is_last))

    @property
    def known(self) -> EventHistory:
        assert self.history is not None
        return self.history

    @property
    def states(self) -> list[str]:
        """What was told: the descriptions of states, and ``ended``."""
        return [
            "ended" if isinstance(news, EventEnded) else str(news.event.description)
            for news in self.told
        ]

    def _is_fresh(self, agent: str) -> bool:
        return agent not in self.silent

    def _take(self, history: EventHistory | None, news: News | None) -> News | None:
        self.history = history
        if news is not None:
            self.told.append(news)
        return news


# --- states


def test_the_first_to_report_a_state_tells_it_and_all_others_catch_up() -> None:
    hub = Hub()
    assert hub.hear("a", A, 0) == EventAppeared(A, at(0))
    assert hub.hear("b", A, 1) is None
    assert hub.hear("b", B, 2) == EventChanged(B, at(2))
    assert hub.hear("a", B, 3) is None
    assert hub.hear("c", A, 4) is None
    assert hub.hear("c", B, 5) is None


def test_an_agent_that_moves_back_to_a_state_tells_it_again_and_those_behind_do_not() -> None:
    hub = Hub.of("a")
    hub.hear("b", A, 0)
    hub.hear("a", B, 1)
    hub.hear("c", A, 2)
    hub.hear("a", A, 3)
    for agent in "bc":
        hub.hear(agent, B, 4)
        hub.hear(agent, A, 5)
    assert hub.states == ["A", "B", "A"]


def test_a_word_that_is_older_than_the_last_of_its_agent_changes_nothing() -> None:
    hub = Hub.of("a")
    hub.hear("a", B, 20)
    before = hub.history
    assert hub.hear("a", A, 0, now=21) is None
    assert hub.hear("a", GONE, 19, now=22) is None
    assert hub.history == before


@pytest.mark.parametrize("word", [A, B, GONE], ids=["A", "B", "gone"])
def test_a_word_of_the_same_time_as_the_last_of_its_agent_changes_nothing(word: Word) -> None:
    """An agent never says two things of one time, so it comes again."""
    hub = Hub.of("ab")
    hub.hear("a", B, 20)
    before = hub.history
    assert hub.hear("a", word, 20, now=21) is None
    assert hub.history == before


def test_an_agent_that_was_cut_off_for_two_days_tells_nothing_of_its_old_queue() -> None:
    hub = Hub.of("ab")
    hub.hear("a", C, 2 * DAY)
    # Between, Azure changed the event and took it back. Only b saw that.
    old: list[Word] = [B, STARTED, GONE, A, GONE, A, B]
    for observed, word in enumerate(old, 100):
        assert hub.hear("b", word, float(observed), now=2 * DAY + observed) is None
    assert hub.hear("b", C, 2 * DAY + 1, now=2 * DAY + 200) is None
    assert hub.states == ["A", "C"]
    assert hub.known.agents_seeing_told_state == {"a", "b"}


def test_a_state_that_somebody_saw_later_than_another_is_not_replaced_by_that() -> None:
    hub = Hub.of("ab")
    hub.hear("a", C, 10)
    hub.hear("a", C, 60)  # a pulse
    assert hub.hear("b", B, 54.9, now=61) is None
    assert hub.hear("c", B, 55.1, now=62) == EventChanged(B, at(55.1))


def test_a_state_that_only_a_lost_agent_saw_gives_way_to_what_the_others_see() -> None:
    hub = Hub.of("ab")
    hub.hear("a", B, 10)
    hub.silent = "a"
    assert hub.hear("b", A, 160) is None
    hub.silent = ""
    assert hub.hear("b", A, 161) is None
    hub.silent = "a"
    assert hub.hear("b", A, 162) == EventChanged(A, at(162))
    assert hub.hear("b", A, 400) is None
    hub.silent = ""
    assert hub.hear("a", A, 401) is None


def test_two_agents_that_see_different_states_for_ever_tell_each_once() -> None:
    hub = Hub()
    for minute in range(10):
        hub.hear("a", A, 60.0 * minute)
        hub.hear("b", B, 60.0 * minute + 1)
    assert hub.states == ["A", "B"]


def test_started_is_not_taken_back() -> None:
    hub = Hub.of("ab")
    hub.hear("a", STARTED, 10)
    assert hub.hear("b", B, 11) is None
    assert hub.hear("a", B, 12) is None
    assert hub.hear("a", STARTED, 13) is None
    more = replace(STARTED, description="longer")
    assert hub.hear("b", more, 14) == EventChanged(more, at(14))


def test_an_end_that_nobody_reported_is_told_when_the_event_is_not_started_any_more() -> None:
    hub = Hub()
    hub.hear("a", STARTED, 0)
    hub.silent = "a"
    assert hub.hear("b", A, 150) is None
    assert hub.hear("b", A, 151) == EventEnded(rebooted=False, gap=True, seen=at(151))
    assert hub.hear("a", STARTED, 150) is None
    assert hub.hear("b", A, 152) == EventAppeared(A, at(152))


# --- ends


def test_an_event_ends_when_every_fresh_agent_that_showed_it_says_gone() -> None:
    hub = Hub.of("abc")
    hub.silent = "c"
    assert hub.hear("a", GONE, 5) is None
    assert hub.hear("b", GoneFromDocument(rebooted=True), 6) == EventEnded(
        rebooted=True, gap=False, seen=at(6)
    )


def test_an_event_ends_after_a_wait_if_nobody_shows_it_again() -> None:
    hub = Hub.of("a")
    hub.hear("b", A, 0)
    hub.hear("a", GONE, 5)
    assert hub.history is not None
    due = hub.known.end_due_at
    assert due == at(5) + END_WAIT
    assert hub.wait_until(14.9) is None
    assert hub.wait_until(15) == EventEnded(rebooted=False, gap=False, seen=at(5))
    assert hub.known.end_due_at is None


def test_an_event_does_not_end_while_an_agent_says_again_that_it_is_there() -> None:
    hub = Hub.of("abc")
    hub.hear("a", GONE, 5)
    assert hub.known.is_ending
    hub.hear("b", A, 6)
    assert not hub.known.is_ending
    assert hub.wait_until(100) is None
    for minute in range(1, 5):
        hub.hear("a", GONE, 60.0 * minute)
        assert not hub.known.is_ending, "b has shown the event within 150 s"
        hub.hear("b", A, 60.0 * minute + 1)
        assert hub.wait_until(60.0 * minute + 50) is None
    hub.hear("b", GONE, 299)  # c said nothing again
    assert hub.wait_until(308) is None
    assert hub.wait_until(309) == EventEnded(rebooted=False, gap=False, seen=at(299))


def test_an_agent_that_cannot_read_its_document_does_not_keep_an_event_alive() -> None:
    hub = Hub.of("ab")
    hub.hear("a", GONE, 5)
    hub.hear("b", A, 6)
    # From now on b sends pulses, but what they say was seen at 6 s.
    for second in (60, 120, 156):
        hub.hear("a", GONE, second)
        hub.hear("b", A, 6, now=second)
        assert not hub.known.is_ending
    hub.hear("a", GONE, 157)
    hub.hear("b", A, 6, now=158)
    assert hub.wait_until(166) is None
    assert hub.wait_until(167) == EventEnded(rebooted=False, gap=False, seen=at(157))


def test_an_agent_that_is_behind_does_not_end_what_another_saw_later() -> None:
    hub = Hub.of("ab")
    hub.hear("b", A, 1000)
    hub.silent = "b"
    assert hub.hear("a", GONE, 994, now=2000) is None
    assert not hub.known.is_ending
    assert hub.hear("a", GONE, 996, now=2001) == EventEnded(rebooted=False, gap=False, seen=at(996))


def test_nothing_ends_if_no_agent_is_fresh() -> None:
    hub = Hub.of("ab")
    hub.hear("a", GONE, 5)
    hub.silent = "ab"
    assert hub.wait_until(1000) is None
    assert hub.known.end_due_at is None
    hub.silent = "b"
    assert hub.hear("a", GONE, 1001) == EventEnded(rebooted=False, gap=False, seen=at(1001))


def test_the_facts_about_an_end_are_those_of_all_agents() -> None:
    hub = Hub.of("abc")
    hub.hear("a", GoneFromDocument(rebooted=True, gap=True), 5)
    hub.hear("a", GoneFromDocument(), 6)  # its pulse knows less
    hub.hear("b", GoneFromDocument(rebooted=False, gap=False), 6)
    hub.hear("b", GoneFromDocument(), 7)
    assert hub.hear("c", GoneFromDocument(), 8) == EventEnded(rebooted=True, gap=False, seen=at(8))


def test_the_events_of_a_scope_end_when_its_last_agent_is_forgotten() -> None:
    hub = Hub.of("ab")
    for agent in ("unknown", "a"):
        assert hub.forget(agent, DAY) is None
    assert hub.forget("b", DAY, is_last=True) == EventEnded(rebooted=False, gap=True, seen=at(DAY))
    assert hub.known.words == {}
    assert hub.hear("b", A, 10, now=DAY + 1) is None
    assert hub.hear("b", A, DAY + 200) == EventAppeared(A, at(DAY + 200))
    assert hub.forget("b", DAY + 300, is_last=True) is not None
    assert hub.forget("b", DAY + 300, is_last=True) is None


def test_an_event_stays_when_the_only_agent_that_told_it_is_forgotten_and_others_see_it() -> None:
    """They left out what the hub knew. One has read its document before the event was in it."""
    hub = Hub.of("a")
    assert hub.forget("a", 10) is None
    assert hub.known.is_orphaned
    assert hub.wait_until(1000) is None
    for said in words_of_pulse("b", [], {A.lowercase_event_id: hub.known}):
        assert hub.hear("b", said[1], 1000) is None
    assert hub.known.is_ending
    assert hub.hear("c", A, 1005) is None
    assert not hub.known.is_ending
    assert hub.wait_until(2000) is None
    assert hub.hear("c", B, 2001) == EventChanged(B, at(2001))


# --- events that return


def test_an_agent_that_saw_the_event_gone_tells_its_return() -> None:
    hub = Hub.of("ab")
    for agent in "ab":
        hub.hear(agent, GONE, 10)
    assert hub.hear("a", A, 11) == EventAppeared(A, at(11))
    assert hub.known.returned_at == at(11)
    assert hub.hear("b", A, 12) is None


def test_a_return_of_a_few_seconds_ends_when_all_who_showed_it_say_gone() -> None:
    hub = Hub.of("ab")
    for agent in "ab":
        hub.hear(agent, GONE, 10)
    for agent in "ab":
        hub.hear(agent, A, 11)
    hub.hear("a", GONE, 12)
    assert hub.hear("b", GONE, 12) == EventEnded(rebooted=False, gap=False, seen=at(12))


@pytest.mark.parametrize("word", [A, B, C], ids=["A", "B", "C"])
@pytest.mark.parametrize("agent", ["late", "new"])
def test_an_agent_that_is_behind_tells_no_return(agent: str, word: ScheduledEvent) -> None:
    hub = Hub()
    for name in ("a", "late"):
        hub.hear(name, A, 0)
    hub.hear("a", B, 5)
    hub.silent = ["late"]
    hub.hear("a", GONE, 10)
    assert hub.states == ["A", "B", "ended"]
    assert hub.hear(agent, word, 159, now=1000) is None
    assert hub.hear(agent, GONE, 160, now=1001) is None
    assert hub.states == ["A", "B", "ended"]


@pytest.mark.parametrize("agent", ["late", "new"])
def test_an_agent_that_sees_the_event_long_after_the_end_tells_its_return(agent: str) -> None:
    hub = Hub()
    for name in ("a", "late"):
        hub.hear(name, A, 0)
    hub.silent = ["late"]
    hub.hear("a", GONE, 10)
    assert hub.hear(agent, A, 160) is None
    assert hub.hear(agent, A, 161) == EventAppeared(A, at(161))


def test_an_agent_that_is_behind_does_not_end_a_return() -> None:
    hub = Hub.of("abc")
    for agent in "ab":
        hub.hear(agent, GONE, 10)
    hub.wait_until(20)
    hub.hear("a", A, 21)
    hub.silent = "a"
    assert hub.hear("b", GONE, 18, now=22) is None  # it can be the end before
    assert hub.hear("c", GONE, 12, now=22) is None
    assert not hub.known.is_ending
    assert hub.hear("c", A, 13, now=23) is None
    assert hub.hear("c", GONE, 14, now=23) is None
    assert hub.hear("c", B, 15, now=23) is None
    assert hub.hear("c", GONE, 17, now=23) is None
    assert not hub.known.is_ending
    assert hub.states == ["A", "ended", "A"]


# --- clocks


def test_a_time_in_the_future_does_not_silence_the_other_agents() -> None:
    hub = Hub()
    hub.hear("a", A, DAY, now=0)
    assert hub.known.words["a"].seen == at(5)
    assert hub.hear("b", B, 1) == EventChanged(B, at(1))


@pytest.mark.parametrize("word", [B, GONE], ids=["B", "gone"])
def test_what_comes_again_is_a_repeat_though_the_clock_of_the_hub_is_behind(word: Word) -> None:
    hub = Hub()
    for now in (-2.9, -0.9):
        hub.hear("a", A, 0, now=now)
        hub.hear("a", word, 1, now=now + 1)
    assert len(hub.told) == 2


# --- pulses


def test_a_pulse_stands_for_a_word_about_each_event_that_the_agent_knew_or_knows() -> None:
    events = {name: make_event(event_id=name.upper()) for name in ("new", "kept", "lost", "other")}
    hubs = {name: Hub() for name in ("kept", "lost", "other", "gone", "over")}
    for name, hub in hubs.items():
        hub.hear("b" if name == "other" else "a", events.get(name, A), 0)
    hubs["gone"].hear("b", A, 0)
    hubs["gone"].hear("a", GONE, 1)
    hubs["over"].hear("a", GONE, 1)
    histories = {name: hub.known for name, hub in hubs.items()}
    live = [events["kept"], events["new"]]
    assert dict(words_of_pulse("a", live, histories)) == {
        "new": events["new"],
        "kept": events["kept"],
        "lost": GoneFromDocument(),
        "gone": GoneFromDocument(),  # it says so again: others may have become silent since
    }


def test_a_pulse_says_gone_of_an_event_that_has_ended_if_the_agent_still_showed_it() -> None:
    hub = Hub.of("ab")
    hub.silent = "b"
    hub.hear("a", GONE, 5)
    histories = {A.lowercase_event_id: hub.known}
    assert dict(words_of_pulse("b", [], histories)) == {A.lowercase_event_id: GoneFromDocument()}
    assert dict(words_of_pulse("a", [], histories)) == {}


# --- restarts


def test_a_history_is_made_from_the_journal_and_the_last_words() -> None:
    hub = Hub.of("a")
    hub.hear("a", GONE, 1)
    hub.hear("a", A, 2)
    hub.hear("b", A, 3)
    hub.hear("a", STARTED, 4)
    steps: list[tuple[ScheduledEvent, datetime] | datetime]
    steps = [(A, at(0)), at(1), (A, at(2)), (STARTED, at(4))]
    assert restore_history(steps, hub.known.words) == hub.history
    assert restore_history([*steps, at(5)], {}) == replace(hub.known, words={}, ended_at=at(5))
    assert restore_history([], {}) is None
    assert restore_history([at(1)], {}) is None, "the rows before were pruned"


def test_after_a_restart_the_hub_waits_again_for_those_that_show_the_event() -> None:
    hub = Hub.of("ab")
    assert wait_again(hub.known, at(1)) == hub.history
    hub.hear("a", GONE, 5)
    hub.history = wait_again(hub.known, at(3600))
    assert hub.wait_until(3609) is None
    alone = replace(hub)
    assert alone.wait_until(3610) == EventEnded(rebooted=False, gap=False, seen=at(5))
    hub.hear("b", A, 3609)
    assert hub.wait_until(3610) is None
    hub.hear("a", GONE, 3611)
    hub.hear("b", GONE, 3612)
    assert wait_again(hub.known, at(4000)).first_gone_at is None
