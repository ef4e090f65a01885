"""The merge of what agents say about one event: a table of cases, each told as a story."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from relay.fleet.hub.merge import (
    END_WAIT,
    Appeared,
    Changed,
    Ended,
    EventHistory,
    Gone,
    News,
    Word,
    apply_report,
    apply_timer,
    forget_agent,
    next_timer,
)
from tests.events.strategies import make_event

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
A = make_event(description="A")
B = make_event(description="B")
C = make_event(description="C")
STARTED = make_event(event_status="Started", not_before=None)
GONE = Gone(gap=False)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


@dataclass
class Hub:
    """A history, and what was told of it. ``silent`` names the agents that are not fresh."""

    history: EventHistory | None = None
    told: list[News] = field(default_factory=list)
    silent: Collection[str] = ()

    def hear(
        self, agent: str, word: Word, observed: float, *, now: float | None = None
    ) -> News | None:
        """Apply a word that an agent observed and, if ``now`` is given, said later."""
        return self._take(
            *apply_report(
                self.history,
                agent,
                word,
                at(observed),
                at(observed if now is None else now),
                self._is_fresh,
            )
        )

    def wait_until(self, now: float) -> News | None:
        """Let time pass."""
        assert self.history is not None
        return self._take(*apply_timer(self.history, at(now), self._is_fresh))

    def forget(self, agent: str, now: float) -> News | None:
        assert self.history is not None
        return self._take(*forget_agent(self.history, agent, at(now)))

    @property
    def states(self) -> list[str]:
        """What was told: the descriptions of states, and ``ended``."""
        return [
            "ended" if isinstance(news, Ended) else str(news.event.description)
            for news in self.told
        ]

    def _is_fresh(self, agent: str) -> bool:
        return agent not in self.silent

    def _take(self, history: EventHistory | None, news: News | None) -> News | None:
        self.history = history
        if news is not None:
            self.told.append(news)
        return news


def test_the_first_to_report_a_state_tells_it_and_all_others_catch_up() -> None:
    hub = Hub()
    assert hub.hear("a", A, 0) == Appeared(A, at(0))
    assert hub.hear("b", A, 1) is None
    assert hub.hear("b", B, 2) == Changed(B, at(2))
    assert hub.hear("a", B, 3) is None
    assert hub.hear("c", A, 4) is None
    assert hub.hear("c", B, 5) is None


def test_an_agent_that_moves_back_to_a_state_tells_it_again_and_those_behind_do_not() -> None:
    hub = Hub()
    hub.hear("a", A, 0)
    hub.hear("b", A, 0)
    hub.hear("a", B, 1)
    hub.hear("c", A, 2)
    hub.hear("a", A, 3)
    for agent in "bc":
        hub.hear(agent, B, 4)
        hub.hear(agent, A, 5)
    assert hub.states == ["A", "B", "A"]


def test_an_event_ends_when_every_fresh_agent_that_showed_it_says_gone() -> None:
    hub = Hub()
    for agent in "abc":
        hub.hear(agent, A, 0)
    hub.silent = "c"
    assert hub.hear("a", GONE, 5) is None
    assert hub.hear("b", Gone(rebooted=True), 6) == Ended(rebooted=True, gap=False, seen=at(6))


def test_an_event_ends_after_a_wait_if_nobody_shows_it_again() -> None:
    hub = Hub()
    hub.hear("a", A, 0)
    hub.hear("b", A, 0)
    hub.hear("a", GONE, 5)
    assert hub.history is not None
    due = next_timer(hub.history)
    assert due == at(5) + END_WAIT
    assert hub.wait_until(14.9) is None
    assert hub.wait_until(15) == Ended(rebooted=False, gap=False, seen=at(5))
    assert next_timer(hub.history) is None
