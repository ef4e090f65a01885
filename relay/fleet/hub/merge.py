"""Merges what the agents of one scope say about one event into one history. Pure.

Each agent reads the document of its own VM. Agents poll at different times, so each sees some of
the states of an event, in Azure's order. Their messages arrive late, repeatedly, or not at all. The
hub must tell each state once.

**The path.** The history holds the states that were told, in order: the path. For each agent it
holds the last word of that agent, and the agent's place: how far along the path the agent has come.
Places are indexes, because a state can return (A, B, A). A place never moves back.

**What a live word does.** A word is the state in which an agent saw the event, or that the event is
gone from its document. It is compared with the agent's own last word and place:

1. A word that is older than the agent's last word is a repeat. It changes nothing.
2. A word that repeats the agent's last word is no news if the agent has its place by that word.
3. A word that equals the last state told is no news. The agent has caught up.
4. A state that the path holds after the agent's place is no news: the agent is catching up. So an
   agent that is behind never causes a return from B to A. An agent that moves on from B to A does.
5. A state without Started is no news once Started was told. Started is never taken back.
6. A state is no news if somebody saw the last state told later than the agent saw this one. An
   agent that was cut off delivers such states. It can become news when the agent repeats it.
7. Anything else is news. It goes to the end of the path.

**Agreement in the end.** If no fresh agent shows the last state told, and an agent sees another
state more than `MAX_LAG` after anybody saw that one, then this state is news in spite of rules 2
and 4. So the hub agrees with the agents in the end, also if an agent reported a state that no other
agent saw, and was lost before it reported the next. If such a state takes Started back, the end of
the event was missed: the word counts as gone, and the next word of the agent tells the return.

**The end.** The event has ended when an agent says that it is gone and

- the last word of every fresh agent says so, or
- `END_WAIT` has passed since the first said so, and no agent has shown the event since.

A word shows the event if it is live and at most `MAX_LAG` older than the newest word that says
gone. So an agent that cannot read its document does not keep an event alive. If somebody saw the
event later than anybody saw it gone, nothing ends: the agents that say gone are behind. If no agent
is fresh, nothing ends.

The hub forgets an agent whose VM was deleted, or that was silent for 24 hours (`forget_agent`). If
it was the only one that showed the event, the event is *orphaned*: it has ended when an agent's
pulse has not listed it, `END_WAIT` has passed, and no agent has shown it. If the scope has no agent
any more, it ends at once.

**Returns.** After the end, a live word is a return of the event if the agent had itself said gone
about this occurrence and now sees the event later than anybody saw it gone, or if it sees the event
more than `MAX_LAG` after the end. All other live words are from agents that are catching up. A
return begins a new path. The other agents keep their words, but have no place on the new path until
they see something that belongs to it.

**Time.** ``observed_at`` is by the agent's own clock. It only orders the words of this one agent.
``seen`` is the same moment by the clock of Azure and the hub (`agent_time_to_hub_time`). It is
compared between agents with a tolerance. ``now`` and ``first_gone_at`` are by the clock of the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypeAlias

from relay.events.build import state_digest
from relay.events.model import ScheduledEvent
from relay.fleet.messages import Pulse

END_WAIT = timedelta(seconds=10)
"""How long the other agents may show that an event is still there, after one said gone."""
MAX_LAG = timedelta(seconds=150)
"""A fresh agent says at least this often what it sees. Nothing that is older is current."""
CLOCK_TOLERANCE = timedelta(seconds=5)
"""How far the times of two agents may be wrong to each other."""
NO_PLACE = -1
"""The place of an agent whose word is about an earlier occurrence, or about none that is known."""
_NEVER = datetime.min.replace(tzinfo=UTC)

IsFresh: TypeAlias = Callable[[str], bool]
"""Whether the hub has heard of an agent of the scope lately. The agent is named by its word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneFromDocument:
    """The event is gone from an agent's document.

    ``gap``: the agent may have missed a state before. ``rebooted``: see `FactsAboutEndedEvent`.
    """

    rebooted: bool = False
    gap: bool = True


Word: TypeAlias = ScheduledEvent | GoneFromDocument
"""What an agent says about an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """What an agent said last about the event. Its fields are simple, so that a row can hold them.

    ``state`` is the digest of the state; None: gone. ``place`` is the index of the agent on the
    path, or `NO_PLACE`. For ``at`` and ``seen`` see the module: ``at`` is by the agent's clock.
    """

    state: str | None
    place: int
    at: datetime
    seen: datetime
    rebooted: bool = False
    gap: bool = False

    @property
    def says_gone(self) -> bool:
        """Whether the agent says that this occurrence of the event is gone."""
        return self.state is None and self.place != NO_PLACE


class PublishedState(NamedTuple):
    """A state that was told. ``seen`` is when the agent that reported it saw it."""

    state: str
    seen: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class EventHistory:
    """What the hub knows about one occurrence of an event in one scope.

    ``path`` is never empty. ``started``: a state on it is Started. ``returned``: there was an
    earlier occurrence. ``ended_at`` is when the agents saw that it was gone. ``words`` holds the
    last word of each agent. ``first_gone_at`` is set while agents disagree whether the event is
    gone and the hub waits for those that show it.
    """

    path: tuple[PublishedState, ...]
    started: bool
    returned: bool = False
    ended_at: datetime | None = None
    words: Mapping[str, LastWord] = field(default_factory=dict)
    first_gone_at: datetime | None = None

    @property
    def last_told_state(self) -> str:
        """The last state told."""
        return self.path[-1].state

    @property
    def is_ending(self) -> bool:
        """Whether the hub waits for agents that still show the event."""
        return self.first_gone_at is not None

    @property
    def is_orphaned(self) -> bool:
        """Whether the agents that showed the event are forgotten, and it has not ended."""
        return self.ended_at is None and all(word.state is None for word in self.words.values())

    @property
    def agents_seeing_told_state(self) -> frozenset[str]:
        """The agents whose last word is the last state told. Only they can act on it."""
        return frozenset(
            agent for agent, word in self.words.items() if word.state == self.last_told_state
        )


@dataclass(frozen=True, slots=True)
class EventAppeared:
    """The event is new, or has returned. ``seen`` is when the agent saw it."""

    event: ScheduledEvent
    seen: datetime


@dataclass(frozen=True, slots=True)
class EventChanged:
    """The event has a new state."""

    event: ScheduledEvent
    seen: datetime


@dataclass(frozen=True, slots=True)
class EventEnded:
    """The event has ended. ``gap`` and ``rebooted`` are as in `FactsAboutEndedEvent`."""

    rebooted: bool
    gap: bool
    seen: datetime


News: TypeAlias = EventAppeared | EventChanged | EventEnded


class MergeResult(NamedTuple):
    """The new history, and what is to be told."""

    history: EventHistory
    news: News | None


# --- what agents say


def apply_word_to_history(
    history: EventHistory | None,
    agent: str,
    word: Word,
    observed_at: datetime,
    now: datetime,
    fresh: IsFresh,
    *,
    seen: datetime | None = None,
) -> tuple[EventHistory | None, News | None]:
    """Apply a word of an agent, from a report or a pulse. The agent itself counts as fresh.

    ``seen`` is what `agent_time_to_hub_time` returns; None: the agent's clock is right.
    """
    seen = min(observed_at if seen is None else seen, now)
    if history is None:
        if isinstance(word, GoneFromDocument):
            return None, None
        return _begin_history(agent, word, observed_at, seen, earlier=None)
    last = history.words.get(agent)
    if last is not None:
        if _is_older_than_agents_last_word(last, observed_at, seen, now):
            return history, None
        seen = max(seen, last.seen)  # the order of one agent's words is known
    if isinstance(word, GoneFromDocument):
        return _apply_gone_from_document(history, agent, word, observed_at, seen, now, fresh)
    if history.ended_at is not None and _has_returned(history, last, seen):
        return _begin_history(agent, word, observed_at, seen, earlier=history)
    return _apply_live_event(history, agent, word, observed_at, seen, now, fresh)


def split_pulse_by_event(
    agent: str, pulse: Pulse, histories: Mapping[str, EventHistory]
) -> Iterator[tuple[str, Word]]:
    """Yield the words that a pulse stands for, with the EventId in lower case of each.

    ``histories`` holds at least those in which the agent has a last word, by EventId in lower case.
    An event that the agent knew, or that is orphaned, and that is not in its document is gone. A
    pulse of an agent that
    has not read its document since it began to run says nothing.
    """
    if pulse.events is None or pulse.poll_age is None:
        return
    shown = {event.lowercase_event_id: event for event in pulse.events}
    yield from shown.items()
    for key, history in histories.items():
        last = history.words.get(agent)
        if key in shown or (last is None and not history.is_orphaned):
            continue
        if history.ended_at is None or (last is not None and last.state is not None):
            yield key, GoneFromDocument()


def document_times_of_pulse(
    pulse: Pulse, sent_at: datetime, now: datetime
) -> tuple[datetime, datetime]:
    """Return ``observed_at`` and ``seen`` of the words of a pulse: when its document was read."""
    poll_age = timedelta(seconds=pulse.poll_age or 0.0)
    seen = agent_time_to_hub_time(sent_at, now, pulse.clock_offset)
    return sent_at - poll_age, seen - poll_age


def forget_agent(
    history: EventHistory, agent: str, now: datetime, *, is_last: bool
) -> tuple[EventHistory, News | None]:
    """Remove an agent that is gone for good. The event ends if it was the last of its scope."""
    words = {name: word for name, word in history.words.items() if name != agent}
    after = replace(history, words=words)
    if is_last and history.ended_at is None:
        return _end_history(after, now)
    return after, None


# --- what time alone does


def end_check_due_at(history: EventHistory) -> datetime | None:
    """Return when `end_if_still_gone` is due, by the clock of the hub; None: never."""
    if history.first_gone_at is None or history.ended_at is not None:
        return None
    return history.first_gone_at + END_WAIT


def end_if_still_gone(
    history: EventHistory, now: datetime, fresh: IsFresh
) -> tuple[EventHistory, News | None]:
    """End the event if nobody has shown it for `END_WAIT` since an agent said that it is gone.

    Only a hub that listens may call this (`Roster.has_hub_listened_without_pause`): agents may say
    what it does not hear.
    """
    due = end_check_due_at(history)
    if due is None or now < due:
        return history, None
    gone = [agent for agent, word in history.words.items() if word.says_gone]
    if not any(map(fresh, gone)) or _was_seen_after_gone(history, _newest_gone_time(history)):
        return replace(history, first_gone_at=None), None
    return _end_history(history, now)


# --- from and to rows


def restore_history(
    steps: Iterable[tuple[ScheduledEvent, datetime] | datetime],
    words: Mapping[str, LastWord],
    first_gone_at: datetime | None = None,
) -> EventHistory | None:
    """Make the history from what the state file holds. Return None if it holds nothing.

    ``steps`` are the ``event.*`` about the EventId in the journal, oldest first: the state and its
    time, or for ``event.ended`` the time alone. ``first_gone_at`` is only in memory.
    `wait_again_for_agents` sets it if that is lost.
    """
    history: EventHistory | None = None
    for step in steps:
        if isinstance(step, datetime):
            history = None if history is None else replace(history, ended_at=step)
            continue
        event, seen = step
        new = PublishedState(state_digest(event), seen)
        if history is None or history.ended_at is not None:
            returned = history is not None
            history = EventHistory(path=(new,), started=event.is_started, returned=returned)
        else:
            started = history.started or event.is_started
            history = replace(history, path=(*history.path, new), started=started)
    if history is None:
        return None
    return replace(history, words=dict(words), first_gone_at=first_gone_at)


def wait_again_for_agents(history: EventHistory, now: datetime) -> EventHistory:
    """Wait once more for the agents that show the event, if others say that it is gone.

    Do this after each time without a connection to the broker: they could not say so then.
    """
    is_disputed = history.ended_at is None and any(
        word.says_gone for word in history.words.values()
    )
    return replace(history, first_gone_at=now if is_disputed else None)


def agent_time_to_hub_time(at: datetime, now: datetime, clock_offset: float | None) -> datetime:
    """Return a time of an agent's clock by the clock of Azure and the hub.

    The agent's clock is ``clock_offset`` seconds ahead, as its last pulse said; None: unknown.
    """
    return min(at - timedelta(seconds=clock_offset or 0.0), now)


# --- the rules


def _begin_history(
    agent: str,
    event: ScheduledEvent,
    observed_at: datetime,
    seen: datetime,
    *,
    earlier: EventHistory | None,
) -> MergeResult:
    state = state_digest(event)
    words = {} if earlier is None else earlier.words
    history = EventHistory(
        path=(PublishedState(state, seen),),
        started=event.is_started,
        returned=earlier is not None,
        words={
            **{name: replace(word, place=NO_PLACE) for name, word in words.items()},
            agent: LastWord(state=state, place=0, at=observed_at, seen=seen),
        },
    )
    return MergeResult(history, EventAppeared(event, seen))


def _is_older_than_agents_last_word(
    last: LastWord, observed_at: datetime, seen: datetime, now: datetime
) -> bool:
    """Whether a word is older than the last one of its agent."""
    if observed_at >= last.at:
        return False
    # The agent's clock may have been set back since. The word is then new in spite of its time.
    was_ahead = last.at > now + MAX_LAG and observed_at <= now + MAX_LAG
    is_behind = seen > last.seen + CLOCK_TOLERANCE and last.at <= now + MAX_LAG
    return not (was_ahead or is_behind)


def _has_returned(history: EventHistory, last: LastWord | None, seen: datetime) -> bool:
    """Whether a live word after the end says that the event is there again."""
    if history.ended_at is None:
        return False
    if last is not None and last.says_gone and seen > history.ended_at - CLOCK_TOLERANCE:
        return True
    return seen > history.ended_at + MAX_LAG


def _apply_live_event(
    history: EventHistory,
    agent: str,
    event: ScheduledEvent,
    observed_at: datetime,
    seen: datetime,
    now: datetime,
    fresh: IsFresh,
) -> MergeResult:
    state = state_digest(event)
    last = history.words.get(agent)
    if (
        history.ended_at is not None
        or state == history.last_told_state
        or _is_about_earlier_occurrence(history, last, state, seen)
    ):
        return _note_live(history, agent, state, observed_at, seen)
    showing = {
        name: word
        for name, word in history.words.items()
        if name != agent and word.state == history.last_told_state
    }
    shown = max([history.path[-1].seen, *(word.seen for word in showing.values())])
    is_overdue = seen > shown + MAX_LAG and not any(map(fresh, showing))
    if history.started and not event.is_started:
        if not is_overdue:
            return _note_live(history, agent, state, observed_at, seen)
        word = LastWord(state=None, place=0, at=observed_at, seen=seen, gap=True)
        return _end_history(replace(history, words={**history.words, agent: word}), now)
    is_ahead = _find_state_index_on_path(history, last, state, seen) is not None
    is_overtaken = shown > seen + CLOCK_TOLERANCE
    if not is_overdue and (is_ahead or is_overtaken):
        return _note_live(history, agent, state, observed_at, seen)
    path = (*history.path, PublishedState(state, seen))
    history = replace(history, path=path, started=history.started or event.is_started)
    after, _ = _note_live(history, agent, state, observed_at, seen, place=len(path) - 1)
    return MergeResult(after, EventChanged(event, seen))


def _note_live(
    history: EventHistory,
    agent: str,
    state: str,
    observed_at: datetime,
    seen: datetime,
    place: int | None = None,
) -> MergeResult:
    """Take down a live word. ``place`` is known if it is news."""
    if place is None:
        place = _agent_place_on_state_path(history, history.words.get(agent), state, seen)
    word = LastWord(state=state, place=place, at=observed_at, seen=seen)
    history = replace(history, words={**history.words, agent: word})
    if history.is_ending and _still_shows_event(word, _newest_gone_time(history)):
        history = replace(history, first_gone_at=None)
    return MergeResult(history, None)


def _agent_place_on_state_path(
    history: EventHistory, last: LastWord | None, state: str, seen: datetime
) -> int:
    """Return the place of an agent after a live word that is no news."""
    place = NO_PLACE if last is None else last.place
    if _is_about_earlier_occurrence(history, last, state, seen):
        return place
    found = _find_state_index_on_path(history, last, state, seen)
    return place if found is None else found


def _find_state_index_on_path(
    history: EventHistory, last: LastWord | None, state: str, seen: datetime
) -> int | None:
    """Return where a state is on the path after the place of an agent; None: nowhere.

    For a state that the agent repeats, its own place counts, too. If the state is there several
    times, this is the first that was not over long before the agent saw it.
    """
    first = 0
    if last is not None and last.place != NO_PLACE:
        first = last.place if last.state == state else last.place + 1
    path = history.path
    found = [index for index in range(first, len(path)) if path[index].state == state]
    for index in found[:-1]:
        if seen <= path[index + 1].seen + MAX_LAG:
            return index
    return found[-1] if found else None


def _is_about_earlier_occurrence(
    history: EventHistory, last: LastWord | None, state: str, seen: datetime
) -> bool:
    """Whether a live word is about an earlier occurrence of the event."""
    if not history.returned or (last is not None and last.place != NO_PLACE):
        return False
    began = history.path[0].seen
    is_repeated = last is not None and last.state == state
    return seen <= began + MAX_LAG if is_repeated else seen < began - CLOCK_TOLERANCE


def _apply_gone_from_document(
    history: EventHistory,
    agent: str,
    gone: GoneFromDocument,
    observed_at: datetime,
    seen: datetime,
    now: datetime,
    fresh: IsFresh,
) -> MergeResult:
    last = history.words.get(agent)
    place = NO_PLACE if last is None else last.place
    if place == NO_PLACE and (
        not history.returned or seen > history.path[0].seen + CLOCK_TOLERANCE
    ):
        place = 0
    is_repeated = last is not None and last.says_gone
    word = LastWord(
        state=None,
        place=place,
        at=observed_at,
        seen=seen,
        rebooted=gone.rebooted or (is_repeated and last is not None and last.rebooted),
        gap=gone.gap and (not is_repeated or last is None or last.gap),
    )
    was_orphaned = history.is_orphaned
    history = replace(history, words={**history.words, agent: word})
    if history.ended_at is not None or not word.says_gone:
        return MergeResult(history, None)
    newest = _newest_gone_time(history)
    if _was_seen_after_gone(history, newest):
        return MergeResult(history, None)
    live = [(name, word) for name, word in history.words.items() if word.state is not None]
    if not (was_orphaned or any(fresh(name) for name, _ in live)):
        return _end_history(history, now)
    must_wait = not is_repeated or not any(_still_shows_event(word, newest) for _, word in live)
    if must_wait and history.first_gone_at is None:
        history = replace(history, first_gone_at=now)
    return MergeResult(history, None)


def _end_history(history: EventHistory, now: datetime) -> MergeResult:
    gone = [word for word in history.words.values() if word.says_gone]
    news = EventEnded(
        rebooted=any(word.rebooted for word in gone),
        gap=all(word.gap for word in gone),
        seen=max((word.seen for word in gone), default=now),
    )
    return MergeResult(replace(history, ended_at=news.seen, first_gone_at=None), news)


def _newest_gone_time(history: EventHistory) -> datetime:
    """Return when an agent last saw that the event was gone; `_NEVER` if no agent says so."""
    return max((word.seen for word in history.words.values() if word.says_gone), default=_NEVER)


def _was_seen_after_gone(history: EventHistory, newest_gone: datetime) -> bool:
    """Whether any agent, a forgotten one too, saw the event later than anybody saw it gone."""
    shown = (word.seen for word in history.words.values() if word.state is not None)
    return max([history.path[-1].seen, *shown]) > newest_gone + CLOCK_TOLERANCE


def _still_shows_event(word: LastWord, newest_gone: datetime) -> bool:
    """Whether a last word shows the event still, and is not much older than the newest gone."""
    return word.state is not None and word.seen + MAX_LAG >= newest_gone
