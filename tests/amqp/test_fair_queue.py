"""Which approval is decided next, and which is given up, when more arrive than may be decided."""

from __future__ import annotations

from typing import Literal

from relay.amqp.fair_queue import FairQueue, ReceivedDecision, WaitingMessage
from relay.rate_limits import TokenBuckets


class Lane:
    """A queue with a clock, and names for its messages."""

    def __init__(self, *, rate: float = 1, burst: int = 100, capacity: int = 100) -> None:
        self.now = 0.0
        self._queue = FairQueue(TokenBuckets(rate, burst), capacity)
        self._names: dict[int, str] = {}

    def add(
        self,
        user: str,
        decision: Literal["approve", "hold", "release"] = "approve",
        event_id: str = "E",
        scope: str | None = None,
    ) -> str | None:
        """Add a message; return the name of the one that is given up."""
        tag = len(self._names) + 1
        self._names[tag] = f"{user} {tag}"
        received = ReceivedDecision(
            user=user, decision=decision, scope=scope, event_id=event_id, decide=_decide
        )
        given_up = self._queue.add_evicting_if_full(WaitingMessage(tag, received))
        return None if given_up is None else self._names[given_up.tag]

    def take(self) -> tuple[list[str], float]:
        """Take all that may be taken now; return the names, and the seconds until the next.

        A release that a hold overtook has a minus before its name.
        """
        names = []
        while isinstance(taken := self._queue.take_message_or_delay(self.now), WaitingMessage):
            overtaken = self._queue.remove_releases_overtaken_by_hold(taken)
            names += [f"-{self._names[release.tag]}" for release in overtaken]
            names.append(self._names[taken.tag])
        return names, taken


async def _decide() -> bool:
    return True


def test_votes_are_taken_from_one_client_after_the_other() -> None:
    lane = Lane()
    for user in ("loud", "loud", "loud", "quiet", "quiet"):
        lane.add(user)
    assert lane.take()[0] == ["loud 1", "quiet 4", "loud 2", "quiet 5", "loud 3"]


def test_holds_and_releases_come_first_in_the_order_of_arrival() -> None:
    """A release that came after a hold must not come before it, nor the other way around."""
    lane = Lane()
    lane.add("a")
    lane.add("b", "hold")
    lane.add("a", "release")
    lane.add("b", "release")
    lane.add("a", "hold")
    assert lane.take()[0] == ["b 2", "a 3", "b 4", "a 5", "a 1"]


def test_a_client_over_its_rate_waits_and_delays_no_other() -> None:
    lane = Lane(rate=2, burst=1)
    for user in ("loud", "loud", "quiet"):
        lane.add(user)
    assert lane.take() == (["loud 1", "quiet 3"], 0.5)
    lane.now = 0.5
    assert lane.take() == (["loud 2"], float("inf"))


def test_of_too_many_the_newest_vote_of_the_loudest_client_is_given_up() -> None:
    lane = Lane(capacity=4)
    assert [lane.add("loud", decision) for decision in ("hold", "approve", "approve")] == [None] * 3
    assert lane.add("quiet") is None
    assert lane.add("quiet") == "loud 3"
    assert lane.add("loud") == "loud 6"
    assert lane.add("loud", "hold") == "loud 2"
    assert lane.add("loud", "hold") == "loud 8"
    assert lane.take()[0] == ["loud 1", "loud 7", "quiet 4", "quiet 5"]


def test_a_release_that_waits_does_not_end_a_hold_that_is_newer() -> None:
    """Only its client's rate delays it. On another event it still counts."""
    lane = Lane(burst=1)
    lane.add("loud")
    assert lane.take()[0] == ["loud 1"]
    lane.add("loud", "release")
    lane.add("loud", "release", "another")
    lane.add("holder", "hold", "e")
    assert lane.take() == (["-loud 2", "holder 4"], 1)
    lane.now = 1
    assert lane.take()[0] == ["loud 3"]


def test_a_hold_overtakes_no_release_of_the_same_event_id_in_another_scope() -> None:
    lane = Lane(burst=1)
    lane.add("a", "release", "E", "prod")
    lane.add("a", "release", "E", "test")
    lane.add("b", "hold", "E", "prod")
    assert lane.take()[0] == ["a 1", "b 3"]
    lane = Lane(burst=1)
    for _ in range(2):
        lane.add("a", "release", "E", "prod")
    lane.add("a", "release", "E", "test")
    lane.add("b", "hold", "e", "prod")
    assert lane.take()[0] == ["a 1", "-a 2", "b 4"]
