"""Merges what pulses say about events, so that it does not overtake what reports say.

A pulse lists the events that an agent sees now in its document, which is what the metadata service
of its VM returned last. Each of them is an `AgentWordAboutEvent`, and so is each event that the
agent showed before and does not list. A report says more: each state, and how
an event ended. But pulses overtake reports. So words of pulses that tell nothing new are merged at
once, and the others are postponed: they are merged `PULSE_GRACE` later, when no report waits in the
queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NoReturn

from relay.clock import Clock
from relay.fleet.hub.histories import EventHistoryCache
from relay.fleet.hub.merge import (
    document_times_of_pulse,
    split_pulse_by_event,
)
from relay.fleet.hub.merger import AgentWordAboutEvent, EventMerger
from relay.fleet.message_reader import ReceivedMessage
from relay.fleet.messages import MAX_LIVE_EVENTS, Pulse
from relay.fleet.routing import AuthorizedSender

PULSE_GRACE = 5.0
"""Seconds that reports have to arrive before a pulse is believed that says something new."""
MAX_POSTPONED = 2 * MAX_LIVE_EVENTS
"""Words of an agent that wait for its reports. Of more, the oldest go: the next pulse says them."""

AgentName = tuple[str, str]
"""The scope of an agent, and its relay word: its name as a word of a routing key."""
_log = logging.getLogger(__name__)


class PulseMerger:
    """The way of pulses into the histories of events. `Hub` hands their words over."""

    def __init__(
        self,
        histories: EventHistoryCache,
        merger: EventMerger,
        clock: Clock,
        *,
        has_waiting_reports: Callable[[], Awaitable[bool]],
    ) -> None:
        """``has_waiting_reports`` says whether the queue of reports holds any."""
        self._histories = histories
        self._merger = merger
        self._clock = clock
        self._has_waiting_reports = has_waiting_reports
        self._postponed: dict[AgentName, deque[tuple[float, AgentWordAboutEvent]]] = {}
        """When words of an agent are due, in monotonic seconds, the longest postponed first."""

    def words_of_pulse(
        self, sender: AuthorizedSender, received: ReceivedMessage, pulse: Pulse
    ) -> Iterator[AgentWordAboutEvent]:
        """Yield the words that a pulse stands for."""
        histories = self._histories.histories_in_memory_of_scope(sender.scope)
        if not pulse.live and not histories:
            return
        incarnations = {
            event["eventId"].lower(): event["documentIncarnation"] for event in pulse.live or ()
        }
        observed_at, seen = document_times_of_pulse(pulse, received.at, self._clock.now())
        for event_id, word in split_pulse_by_event(sender.relay, pulse, histories):
            yield AgentWordAboutEvent(
                name=(sender.scope, event_id),
                relay=sender.relay,
                word=word,
                observed_at=observed_at,
                seen=seen,
                incarnation=incarnations.get(event_id),
            )

    async def merge_repeats(self, heard: Sequence[AgentWordAboutEvent]) -> None:
        """Merge the words of pulses that tell nothing new, and postpone the others."""
        if not heard:
            return
        news = await self._merger.merge_received(heard, only_quiet=True)
        due = self._clock.monotonic() + PULSE_GRACE
        for word in news:
            agent = (word.name[0], word.relay)
            words = self._postponed.setdefault(agent, deque(maxlen=MAX_POSTPONED))
            words.append((due, word))

    async def merge_postponed_words_when_due(self) -> NoReturn:
        """Merge postponed words that are due, once nothing waits in the queue of reports."""
        while True:
            await self._clock.sleep(PULSE_GRACE / 5)
            now = self._clock.monotonic()
            due = [agent for agent, words in self._postponed.items() if words[0][0] <= now]
            if not due or await self._has_waiting_reports():
                continue
            for agent in due:
                heard, words = [], self._postponed.pop(agent)
                while words and words[0][0] <= now:
                    heard.append(words.popleft()[1])
                if words:
                    self._postponed[agent] = words
                try:
                    await self._merger.merge_received(heard)
                except Exception:  # noqa: BLE001  # the next pulse of the agent says the same
                    _log.exception("internal error: a pulse of %s was dropped", "/".join(agent))
