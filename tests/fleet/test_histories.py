"""The histories that a hub has in memory, and how it reads them again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from relay.fleet.hub import histories
from relay.fleet.hub.histories import EventHistoryCache, changed_last_words_by_agent
from relay.fleet.hub.merge import EventHistory, LastWord, PublishedState

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SCOPE = "vmss-a-1f0c33ab"


def word(state: str | None = "s", place: int = 0, seconds: float = 0) -> LastWord:
    at = NOON + timedelta(seconds=seconds)
    return LastWord(state=state, place=place, at=at, seen=at)


def history(*, ended: bool = False, ending: bool = False) -> EventHistory:
    return EventHistory(
        path=(PublishedState("s", NOON),),
        started=False,
        ended_at=NOON if ended else None,
        first_gone_at=NOON if ending else None,
        words={"vm-0": word()},
    )


def test_live_events_stay_in_memory_and_the_oldest_ended_ones_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(histories, "MAX_ENDED", 2)
    known = EventHistoryCache()
    known.put((SCOPE, "live"), history())
    names = [(SCOPE, f"e-{number}") for number in range(4)]
    for name in names[:3]:
        known.put(name, history(ended=True))
    known.put(names[1], history(ended=True))  # used again
    known.put(names[3], None)
    assert not known.event_names_to_load(names)  # a merge may need each of them
    known.evict_surplus_ended_events()
    assert known.event_names_to_load([*names, (SCOPE, "live")]) == {names[0], names[2]}
    assert set(known.histories_in_memory_of_scope(SCOPE)) == {"live", "e-1"}
    assert [name for name, _ in known.live()] == [(SCOPE, "live")]


def test_the_events_that_may_have_ended_are_known_by_scope() -> None:
    known = EventHistoryCache()
    for name in ((SCOPE, "b"), (SCOPE, "a"), ("other", "c")):
        known.put(name, history(ending=True))
    assert known.ending_event_ids(SCOPE) == ["a", "b"]
    known.put((SCOPE, "a"), history(ended=True))
    known.put((SCOPE, "b"), history())
    assert known.ending_event_ids(SCOPE) == []
    assert known.ending == {("other", "c")}


def test_the_agents_that_still_show_an_event_that_may_have_ended_are_known() -> None:
    known = EventHistoryCache()
    shown = replace(history(ending=True), words={"vm-0": word(None), "vm-2": word()})
    known.put((SCOPE, "a"), shown)
    known.put((SCOPE, "b"), replace(shown, words={"vm-2": word(), "vm-1": word("other")}))
    known.put((SCOPE, "c"), replace(history(), words={"vm-3": word()}))
    known.put(("other", "a"), replace(shown, words={"vm-4": word()}))
    assert known.agents_still_showing_ending_events(SCOPE) == ["vm-1", "vm-2"]
    assert known.agents_still_showing_ending_events("unknown") == []


def test_a_word_that_was_only_repeated_is_not_stored() -> None:
    before = history()
    repeated = EventHistory(
        path=before.path, started=False, words={"vm-0": word(seconds=9), "vm-1": word()}
    )
    assert set(changed_last_words_by_agent(before, repeated)) == {"vm-1"}
    moved = EventHistory(path=before.path, started=False, words={"vm-0": word(place=1)})
    assert set(changed_last_words_by_agent(before, moved)) == {"vm-0"}
    assert set(changed_last_words_by_agent(None, moved)) == {"vm-0"}
