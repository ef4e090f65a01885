"""Approvals that wait for their decision: within the rate of each client, holds first. Pure.

docs/decisions.md#approvals-over-rabbitmq-are-read-ahead says why.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from relay.rate_limits import TokenBuckets


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedDecision:
    """A decision of a known client, in a message that is not acknowledged yet."""

    user: str
    """The RabbitMQ user of the client."""
    decision: Literal["approve", "hold", "release"]
    scope: str | None
    """The scope of the event; None: the queue is for one scope."""
    event_id: str
    decide: Callable[[], Awaitable[bool]]
    """Decides; returns False if the decision cannot be recorded now."""

    def is_about_same_event(self, other: ReceivedDecision) -> bool:
        """Whether two decisions are about the same event."""
        return (self.scope, self.event_id.lower()) == (other.scope, other.event_id.lower())


@dataclass(frozen=True, slots=True, eq=False)
class WaitingMessage:
    """The decision in a message that waits, and the tag of the message on its channel.

    Tags grow in the order of arrival.
    """

    tag: int
    received: ReceivedDecision


@dataclass(slots=True)
class _ClientBacklog:
    """What waits of one client, in the order of arrival."""

    urgent: deque[WaitingMessage] = field(default_factory=deque)  # holds and releases
    votes: deque[WaitingMessage] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.urgent) + len(self.votes)

    def vote_or_urgent_queue_for(self, message: WaitingMessage) -> deque[WaitingMessage]:
        return self.votes if message.received.decision == "approve" else self.urgent


class FairQueue:
    """Chooses the next message of those that wait.

    Holds and releases come before votes, in the order of arrival. Votes come from one client after
    the other. A client without a token waits, and delays no other. Of more than `capacity`
    messages, the client that has the most loses its newest.
    """

    def __init__(self, buckets: TokenBuckets, capacity: int) -> None:
        self._buckets = buckets
        self._capacity = capacity
        self._clients: dict[str, _ClientBacklog] = {}  # the one that was served last is the last

    def add_evicting_if_full(self, message: WaitingMessage) -> WaitingMessage | None:
        """Add a message; return the message that is given up for it."""
        backlog = self._clients.setdefault(message.received.user, _ClientBacklog())
        backlog.vote_or_urgent_queue_for(message).append(message)
        if sum(map(len, self._clients.values())) <= self._capacity:
            return None
        most = max(self._clients.values(), key=len)
        given_up = (most.votes or most.urgent)[-1]
        self._remove_message(given_up)
        return given_up

    def take_message_or_delay(self, now: float) -> WaitingMessage | float:
        """Return the next message, or the seconds until there can be one.

        `now` is monotonic seconds.
        """
        backlogs = self._clients.values()
        urgent = (backlog.urgent[0] for backlog in backlogs if backlog.urgent)
        votes = (backlog.votes[0] for backlog in backlogs if backlog.votes)
        delay = math.inf
        for message in (*sorted(urgent, key=lambda message: message.tag), *votes):
            wait = self._buckets.take(message.received.user, now)
            if not wait:
                self._remove_message(message)
                return message
            delay = min(delay, wait)
        return delay

    def remove_releases_overtaken_by_hold(self, taken: WaitingMessage) -> list[WaitingMessage]:
        """Return the releases that came before this hold on the same event, and still wait.

        Their clients are over their rate. Such a release could end a hold that is newer than it.
        """
        if taken.received.decision != "hold":
            return []
        overtaken = [
            message
            for backlog in self._clients.values()
            for message in backlog.urgent
            if message.received.decision == "release"
            and message.received.is_about_same_event(taken.received)
            and message.tag < taken.tag
        ]
        for message in overtaken:
            self._remove_message(message)
        return overtaken

    def _remove_message(self, message: WaitingMessage) -> None:
        """Remove a message. Its client is then the one that was served last."""
        user = message.received.user
        backlog = self._clients.pop(user)
        backlog.vote_or_urgent_queue_for(message).remove(message)
        if backlog:
            self._clients[user] = backlog
