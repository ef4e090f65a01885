"""Approvals that wait for their decision: within the rate of each client, holds first. Pure.

docs/decisions/0028-approvals-are-read-ahead.md says why.
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
    """A submission and the tag of its message. Tags grow in the order of arrival."""

    tag: int
    submission: ReceivedDecision


@dataclass(slots=True)
class _ClientBacklog:
    """What waits of one client, in the order of arrival."""

    urgent: deque[WaitingMessage] = field(default_factory=deque)  # holds and releases
    votes: deque[WaitingMessage] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.urgent) + len(self.votes)

    def queue_for_decision(self, submission: ReceivedDecision) -> deque[WaitingMessage]:
        return self.votes if submission.decision == "approve" else self.urgent


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

    def add(self, message: WaitingMessage) -> WaitingMessage | None:
        """Add a message; return the message that is given up for it."""
        messages = self._clients.setdefault(message.submission.user, _ClientBacklog())
        messages.queue_for_decision(message.submission).append(message)
        if sum(map(len, self._clients.values())) <= self._capacity:
            return None
        most = max(self._clients.values(), key=len)
        given_up = (most.votes or most.urgent)[-1]
        self._remove_message(given_up)
        return given_up

    def take(self, now: float) -> WaitingMessage | float:
        """Return the next message, or the seconds until there can be one.

        `now` is monotonic seconds.
        """
        clients = self._clients.values()
        urgent = (messages.urgent[0] for messages in clients if messages.urgent)
        votes = (messages.votes[0] for messages in clients if messages.votes)
        delay = math.inf
        for message in (*sorted(urgent, key=lambda message: message.tag), *votes):
            wait = self._buckets.take(message.submission.user, now)
            if not wait:
                self._remove_message(message)
                return message
            delay = min(delay, wait)
        return delay

    def take_releases_before_hold(self, taken: WaitingMessage) -> list[WaitingMessage]:
        """Return the releases that came before this hold on the same event, and still wait.

        Their clients are over their rate. Such a release could end a hold that is newer than it.
        """
        if taken.submission.decision != "hold":
            return []
        overtaken = [
            message
            for messages in self._clients.values()
            for message in messages.urgent
            if message.submission.decision == "release"
            and message.submission.is_about_same_event(taken.submission)
            and message.tag < taken.tag
        ]
        for message in overtaken:
            self._remove_message(message)
        return overtaken

    def _remove_message(self, message: WaitingMessage) -> None:
        """Remove a message. Its client is then the one that was served last."""
        user = message.submission.user
        messages = self._clients.pop(user)
        messages.queue_for_decision(message.submission).remove(message)
        if messages:
            self._clients[user] = messages
