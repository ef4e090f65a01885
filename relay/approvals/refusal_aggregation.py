"""Aggregates the refusals of a principal that asks again and again.

In each minute the first refusals are recorded one by one. The others are counted, and recorded as
one event for each EventId when the minute is over. `engine` asks in its transaction whether a
refusal is recorded; `gate` counts it otherwise, and has the engine record the counts that are due.
The counts are in memory: a crash loses those of open minutes.

An earlier version of the relay recorded each refusal. `collapse_refusals_in_history` aggregates
them in the history of an event for readers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import orjson

from relay.approvals.request import DecisionRequest
from relay.events.timestamps import parse_timestamp

MINUTE = timedelta(minutes=1)
MAX_RECORDED_ABOUT_EVENT = 10
"""Refusals of one principal about one EventId that are recorded one by one in a minute.

All EventIds that the store does not know count as one.
"""
MAX_RECORDED = 100
"""Refusals of one principal about all EventIds that are recorded one by one in a minute."""


@dataclass(frozen=True, slots=True)
class AggregatedRefusals:
    """Refusals that become one event. The request and the reason are those of the newest."""

    request: DecisionRequest
    reason: str
    count: int


@dataclass(slots=True)
class _RefusalMinuteInHistory:
    """The refusals of one principal in a history, from ``began`` on."""

    began: datetime
    single: int = 0
    """Refusals that are shown as they are, also those that stand for several already."""
    surplus: int = 0
    """Refusals that are shown as one."""
    newest: int | None = None
    """Where the event is that stands for the surplus."""


@dataclass(slots=True)
class _OpenMinute:
    """The refusals of one principal from ``began`` on."""

    began: datetime
    recorded: list[tuple[str | None, DecisionRequest]] = field(default_factory=list)
    """Each with the key of its event; None if the store does not know the event."""
    aggregated: dict[str | None, AggregatedRefusals] = field(default_factory=dict)
    """By event key. None: events about which nothing else was recorded."""

    def is_over(self, now: datetime) -> bool:
        # Concurrent requests come out of order, by much less than a minute. After an earlier time
        # than that, the clock was set back, and the minute would not end.
        return abs(now - self.began) >= MINUTE


def collapse_refusals_in_history(history: Iterable[tuple[str, bytes]]) -> list[bytes]:
    """Return the JSON of CloudEvents; surplus refusals of a minute are one event with ``count``.

    ``history`` holds the kind and the JSON of each, oldest first.
    """
    shown: list[bytes | None] = []
    minutes: dict[str, _RefusalMinuteInHistory] = {}
    for kind, body in history:
        shown.append(body)
        if kind != "approval.refused":
            continue
        event = orjson.loads(body)
        at = parse_timestamp(event["time"]) or datetime.min.replace(tzinfo=UTC)
        principal = event["data"]["principal"]
        minute = minutes.get(principal)
        if minute is None or abs(at - minute.began) >= MINUTE:
            minute = minutes[principal] = _RefusalMinuteInHistory(at)
        if minute.single < MAX_RECORDED_ABOUT_EVENT or "count" in event["data"]:
            minute.single += 1
            continue
        minute.surplus += 1
        event["data"]["count"] = minute.surplus
        shown[-1] = orjson.dumps(event)
        if minute.newest is not None:
            shown[minute.newest] = None
        minute.newest = len(shown) - 1
    return [body for body in shown if body is not None]


class RefusalAggregator:
    """Decides which refusals are recorded one by one, and counts the others.

    `admit` runs in transactions, on the thread of the store. The rest runs on the event loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._minutes: dict[str, _OpenMinute] = {}
        """The open minute of each principal."""
        self._due: list[AggregatedRefusals] = []

    def admit(self, request: DecisionRequest, event_key: str | None) -> bool:
        """Return whether the refusal of a request is recorded by itself.

        If not, the caller calls `aggregate_refusal` after the transaction. A transaction can run
        twice, so the answer for the same request stays the same.
        """
        with self._lock:
            recorded = self._get_or_open_minute(request).recorded
            if any(admitted is request for _, admitted in recorded):
                return True
            about_event = sum(key == event_key for key, _ in recorded)
            if about_event >= MAX_RECORDED_ABOUT_EVENT or len(recorded) >= MAX_RECORDED:
                return False
            recorded.append((event_key, request))
            return True

    def undo_admit(self, request: DecisionRequest) -> None:
        """Take back that a refusal was admitted: it could not be recorded."""
        with self._lock:
            minute = self._minutes.get(request.caller.principal)
            if minute is not None:
                minute.recorded = [entry for entry in minute.recorded if entry[1] is not request]

    def aggregate_refusal(
        self, request: DecisionRequest, reason: str, event_key: str | None
    ) -> None:
        """Count a refusal that was not admitted.

        Those about events without a recorded refusal in the minute are counted together, so that
        nobody can fill the memory with EventIds.
        """
        with self._lock:
            minute = self._get_or_open_minute(request)
            if all(key != event_key for key, _ in minute.recorded):
                event_key = None
            before = minute.aggregated.get(event_key)
            count = before.count + 1 if before is not None else 1
            minute.aggregated[event_key] = AggregatedRefusals(request, reason, count)

    def next_due(self) -> datetime | None:
        """Return when `take_due` will return something; None if nothing was counted."""
        with self._lock:
            if self._due:
                return datetime.min.replace(tzinfo=UTC)
            began = (minute.began for minute in self._minutes.values() if minute.aggregated)
            return min((moment + MINUTE for moment in began), default=None)

    def take_due(self, now: datetime | None) -> list[AggregatedRefusals]:
        """Return and remove what was counted in minutes that are over; None: in all minutes."""
        with self._lock:
            self._move_ended_minutes_to_due(now)
            due, self._due = self._due, []
            return due

    def put_back(self, aggregated: Iterable[AggregatedRefusals]) -> None:
        """Return what could not be recorded: the next `take_due` returns it again."""
        with self._lock:
            self._due += aggregated

    def _get_or_open_minute(self, request: DecisionRequest) -> _OpenMinute:
        principal = request.caller.principal
        minute = self._minutes.get(principal)
        if minute is None or minute.is_over(request.at):
            self._move_ended_minutes_to_due(request.at)
            minute = self._minutes[principal] = _OpenMinute(request.at)
        return minute

    def _move_ended_minutes_to_due(self, now: datetime | None) -> None:
        """Close the minutes that are over; None: all."""
        for principal, minute in list(self._minutes.items()):
            if now is None or minute.is_over(now):
                del self._minutes[principal]
                self._due += minute.aggregated.values()
