"""The merge at its edges: exact tolerances, who counts as showing an event, and places."""

from __future__ import annotations

import pytest

from relay.events.build import state_digest
from relay.fleet.hub.merge import (
    NO_PLACE,
    EventAppeared,
    EventChanged,
    EventEnded,
    GoneFromDocument,
    LastWord,
    document_times_of_pulse,
    end_check_due_at,
    repeats_last_state,
    restore_history,
    split_pulse_by_event,
)
from tests.fleet.test_merge import GONE, STARTED, A, B, C, Hub, at, make_pulse


def hub_with(*agents: str) -> Hub:
    """Return a hub that has heard A of these agents, at 0 s."""
    hub = Hub()
    for agent in agents:
        hub.hear(agent, A, 0)
    return hub


# --- what is remembered


def test_a_live_word_is_kept_with_its_place_and_times_and_nothing_else() -> None:
    assert hub_with("a").known.words == {
        "a": LastWord(
            state=state_digest(A), place=0, at=at(0), seen=at(0), rebooted=False, gap=False
        )
    }


def test_no_place_is_minus_1_as_state_files_have_it() -> None:
    assert NO_PLACE == -1


def test_only_agents_whose_last_word_is_the_last_state_told_are_current() -> None:
    hub = hub_with("a", "b")
    hub.hear("a", B, 1)
    assert hub.known.agents_now_seeing_last_told_state == {"a"}


def test_only_the_last_state_of_a_live_event_is_repeated() -> None:
    hub = hub_with("a")
    hub.hear("a", B, 1)
    assert repeats_last_state(hub.known, B) is True
    assert repeats_last_state(hub.known, A) is False
    assert repeats_last_state(hub.known, GONE) is False
    hub.hear("a", GONE, 2)
    assert repeats_last_state(hub.known, B) is False


def test_a_pulse_without_an_event_admits_a_gap_and_knows_of_no_reboot() -> None:
    words = dict(
        split_pulse_by_event("a", make_pulse(), {A.lowercase_event_id: hub_with("a").known})
    )
    assert words == {A.lowercase_event_id: GoneFromDocument(rebooted=False, gap=True)}


def test_a_pulse_says_gone_of_an_event_that_has_ended_if_the_agent_still_showed_it() -> None:
    hub = hub_with("a", "b")
    hub.silent = "b"
    hub.hear("a", GONE, 5)
    histories = {A.lowercase_event_id: hub.known}
    assert dict(split_pulse_by_event("b", make_pulse(), histories)) == {
        A.lowercase_event_id: GoneFromDocument()
    }
    assert dict(split_pulse_by_event("a", make_pulse(), histories)) == {}


def test_an_event_that_has_ended_waits_for_no_agent_after_a_restart() -> None:
    history = restore_history([(A, at(0)), at(1)], {}, first_gone_at=at(1))
    assert history is not None
    assert end_check_due_at(history) is None


def test_started_is_known_after_a_restart_whatever_was_told_after_it() -> None:
    history = restore_history([(STARTED, at(0)), (B, at(1))], {})
    assert history is not None
    assert history.started


@pytest.mark.parametrize("poll_age", [None, 0.0])
def test_a_pulse_without_an_age_is_as_old_as_its_message(poll_age: float | None) -> None:
    assert document_times_of_pulse(make_pulse(poll_age=poll_age), at(100), at(200)) == (
        at(100),
        at(100),
    )


# --- clocks


def test_a_word_of_the_same_moment_as_the_last_is_heard() -> None:
    assert hub_with("a").hear("a", B, 0) == EventChanged(B, at(0))


@pytest.mark.parametrize(
    ("first", "observed", "now", "is_heard"),
    [(160, 3, 10, False), (160.1, 3, 10, True), (300, 160, 10, True), (300, 160.1, 10, False)],
)
def test_a_clock_is_set_right_if_it_was_more_than_150_s_ahead_and_is_not_now(
    first: float, observed: float, now: float, *, is_heard: bool
) -> None:
    hub = Hub()
    hub.hear("a", A, first, now=0)
    assert (hub.hear("a", B, observed, now=now) is not None) is is_heard


def test_a_clock_that_was_150_s_ahead_counts_as_set_back_if_it_saw_more() -> None:
    hub = Hub()
    hub.hear("a", A, 160, now=0)
    assert hub.hear("a", B, 10, now=10) == EventChanged(B, at(10))


def test_an_older_word_is_new_if_it_was_seen_more_than_5_s_later() -> None:
    hub = Hub()
    hub.hear("a", A, 100)
    assert hub.hear("a", B, 90, now=110, seen=105) is None
    assert hub.hear("a", B, 90, now=110, seen=105.1) == EventChanged(B, at(105.1))


def test_a_state_that_was_seen_5_s_before_another_is_told() -> None:
    hub = hub_with("a", "b")
    hub.hear("a", C, 10)
    assert hub.hear("b", B, 5, now=11) == EventChanged(B, at(5))


@pytest.mark.parametrize(("seen", "news"), [(95, None), (95.1, EventAppeared(A, at(95.1)))])
def test_an_agent_that_said_gone_tells_no_return_that_it_saw_5_s_before_the_end(
    seen: float, news: EventAppeared | None
) -> None:
    hub = hub_with("a", "b")
    hub.hear("b", GONE, 5)
    hub.hear("a", GONE, 100)
    assert hub.hear("b", A, seen, now=101) == news


# --- who shows the event


def test_time_ends_nothing_if_no_agent_that_said_gone_is_fresh() -> None:
    hub = hub_with("a", "b")
    hub.hear("a", GONE, 5)
    hub.silent = "a"
    assert hub.wait_until(15) is None
    assert not hub.known.is_ending


def test_time_ends_an_event_if_some_agent_that_said_gone_is_fresh() -> None:
    hub = hub_with("a", "b", "c")
    hub.hear("a", GONE, 5)
    hub.hear("b", GONE, 6)
    hub.silent = "a"
    assert hub.wait_until(15) == EventEnded(rebooted=False, gap=False, seen=at(6))


def test_an_agent_that_takes_back_its_own_started_missed_the_end() -> None:
    hub = Hub()
    hub.hear("a", STARTED, 0)
    assert hub.hear("a", A, 150) is None
    hub = Hub()
    hub.hear("a", STARTED, 0)
    assert hub.hear("a", A, 151) == EventEnded(rebooted=False, gap=True, seen=at(151))


def test_a_fresh_agent_that_is_behind_does_not_show_the_last_state() -> None:
    hub = hub_with("a", "c")
    hub.hear("a", STARTED, 10)
    hub.silent = "a"
    assert hub.hear("b", A, 161) == EventEnded(rebooted=False, gap=True, seen=at(161))


def test_a_single_fresh_agent_is_enough_to_show_the_last_state() -> None:
    hub = Hub()
    for agent in "ab":
        hub.hear(agent, STARTED, 0)
    hub.silent = "a"
    assert hub.hear("c", A, 200) is None


def test_an_agent_without_a_word_says_gone_also_right_after_the_event_appeared() -> None:
    hub = hub_with("a")
    hub.silent = "a"
    assert hub.hear("b", GONE, 4) == EventEnded(rebooted=False, gap=False, seen=at(4))


def test_the_agent_that_told_a_return_can_end_it_at_once() -> None:
    hub = hub_with("a")
    hub.hear("a", GONE, 10)
    hub.hear("a", A, 20)
    assert hub.hear("a", GONE, 22) == EventEnded(rebooted=False, gap=False, seen=at(22))


# --- places


def test_a_repeated_word_about_an_earlier_occurrence_is_no_state_of_the_return() -> None:
    hub = hub_with("a", "b")
    hub.silent = "b"
    hub.hear("a", GONE, 10)
    hub.hear("a", B, 20)
    assert hub.hear("b", A, 100) is None
    assert hub.states == ["A", "ended", "B"]


def test_an_agent_that_said_gone_of_an_event_that_is_there_catches_up() -> None:
    hub = Hub()
    for second, word in enumerate([A, B, C]):
        hub.hear("a", word, second)
    hub.hear("b", GONE, 3)
    assert hub.hear("b", B, 4) is None
    assert hub.places == {"a": 2, "b": 1}


def test_an_agent_keeps_its_place_when_it_says_gone() -> None:
    hub = Hub()
    for second, word in enumerate([A, B, C]):
        hub.hear("a", word, second)
        hub.hear("b", word, second)
    hub.hear("a", GONE, 3)
    assert hub.places == {"a": 2, "b": 2}
    assert hub.hear("a", B, 4) == EventChanged(B, at(4))


def test_an_agent_that_tells_a_state_again_is_at_the_end_of_the_path() -> None:
    hub = hub_with("a", "b", "d")
    hub.hear("a", C, 10)
    hub.hear("b", B, 9, now=11)
    hub.silent = "ab"
    assert hub.hear("d", A, 159.5) == EventChanged(A, at(159.5))
    assert hub.places["d"] == 3


def test_an_agent_whose_state_came_too_late_keeps_its_place() -> None:
    hub = hub_with("a", "b")
    hub.hear("a", C, 10)
    hub.hear("a", C, 60)
    assert hub.hear("b", B, 54, now=61) is None
    assert hub.places == {"a": 1, "b": 0}


def test_a_state_that_was_seen_5_s_before_a_return_belongs_to_it() -> None:
    hub = hub_with("a")
    hub.hear("a", GONE, 10)
    hub.hear("a", A, 20)
    assert hub.hear("c", B, 15, now=21) == EventChanged(B, at(15))


# --- the facts about an end


def test_an_end_that_every_agent_reports_with_a_gap_has_a_gap() -> None:
    assert hub_with("a").hear("a", GoneFromDocument(gap=True), 5) == EventEnded(
        rebooted=False, gap=True, seen=at(5)
    )


def test_an_agent_that_goes_back_from_a_state_that_came_too_late_tells_that() -> None:
    hub = hub_with("a", "b")
    hub.hear("a", C, 10)
    hub.hear("a", C, 60)
    assert hub.hear("b", B, 54, now=61) is None
    assert hub.hear("b", A, 70) == EventChanged(A, at(70))


@pytest.mark.parametrize(("seen", "place"), [(1150, 0), (1150.1, 2)])
def test_a_state_that_was_over_150_s_before_is_the_next_of_its_kind(
    seen: float, place: int
) -> None:
    hub = Hub()
    for number, word in enumerate([A, B, A, B]):
        hub.hear("a", word, 1000.0 * number)
    hub.hear("b", A, seen, now=3000)
    assert hub.places["b"] == place


def test_an_event_that_has_ended_by_time_waits_for_nobody_any_more() -> None:
    hub = hub_with("a", "b")
    hub.hear("a", GONE, 5)
    assert hub.known.is_ending
    assert hub.wait_until(15) == EventEnded(rebooted=False, gap=False, seen=at(5))
    assert not hub.known.is_ending


def test_an_end_that_is_reported_twice_with_a_gap_still_has_a_gap() -> None:
    hub = hub_with("a", "b")
    for second in (5, 6):
        hub.hear("a", GoneFromDocument(gap=True), second)
    assert hub.hear("b", GoneFromDocument(gap=True), 7) == EventEnded(
        rebooted=False, gap=True, seen=at(7)
    )


@pytest.mark.parametrize(
    ("seen", "news"), [(94.9, None), (95, EventEnded(rebooted=False, gap=False, seen=at(95)))]
)
def test_the_newest_word_that_says_gone_counts_against_the_newest_that_shows_the_event(
    seen: float, news: EventEnded | None
) -> None:
    hub = hub_with("a", "b", "c")
    hub.hear("c", A, 100)
    hub.silent = "c"
    assert hub.hear("a", GONE, 60, now=100) is None
    assert hub.hear("b", GONE, seen, now=101) == news


def test_a_newer_word_that_says_gone_of_an_earlier_occurrence_does_not_show_the_event() -> None:
    hub = hub_with("a")
    hub.hear("a", GONE, 10)
    hub.hear("b", GONE, 100)
    assert hub.hear("a", A, 20, now=101) == EventAppeared(A, at(20))
    assert hub.hear("a", GONE, 30, now=102) == EventEnded(rebooted=False, gap=False, seen=at(30))
