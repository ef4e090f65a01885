"""Merges what the agents of one scope say about one event into one history. Pure.

Each agent reads the document of its own VM. Agents poll at different times, so each sees some of
the states of an event, in Azure's order. Their messages arrive late, repeatedly, or not at all. The
hub must tell each state once. All times are by the clock of IMDS: agents say when IMDS gave them
the document. So the words of all agents have one order.

A word is the state in which an agent saw the event, or that the event is gone from its document.

1. A word that is no later than the agent's last word is a repeat. It changes nothing.
2. A state that was not told is news, unless somebody saw the last state told `TOLERANCE` later.
3. A state that was told before is news again if no other fresh agent shows the last state told, and
   the agent showed that itself before, or sees this one more than `MAX_LAG` after anybody saw that.
   All others are catching up: they cause no return from B to A. An agent that moves back does.
4. Started is never taken back. If an agent sees another state more than `MAX_LAG` after anybody saw
   the last state told, and no fresh agent shows that, the end of the event was missed: it ends.
5. The event ends when an agent says that it is gone and no fresh agent shows it, or `END_WAIT`
   after an agent first said so, if none has shown it since. If no agent is fresh, nothing ends. If
   somebody saw the event `TOLERANCE` after anybody saw it gone, nothing ends.
6. After the end, a live word is a return if its agent had said gone, or saw the event more than
   `MAX_LAG` after the end. All others are behind. A return begins a new occurrence.

In 3 to 5, what an agent shows is at most `MAX_LAG` older than the word to which it is compared. So
an agent that cannot read its document keeps no state and no event alive.

The hub forgets an agent whose VM was deleted, or that was silent for 24 hours (`forget_agent`). If
it was the only one that showed the event, the event is *orphaned*: it has ended when an agent's
pulse has not listed it, `END_WAIT` has passed, and no agent has shown it. If the scope has no agent
any more, it ends at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from relay.events.build import state_digest
from relay.events.model import ScheduledEvent

END_WAIT = timedelta(seconds=10)
"""How long the other agents may show that an event is still there, after one said gone."""
MAX_LAG = timedelta(seconds=150)
"""A fresh agent says at least this often what it sees. Nothing that is older is current."""
TOLERANCE = timedelta(seconds=5)
"""How far the times of two agents may be wrong to each other."""
_NEVER = datetime.min.replace(tzinfo=UTC)

IsFresh: TypeAlias = Callable[[str], bool]
"""Whether the hub has heard of an agent of the scope lately. The agent is named by its word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneFromDocument:
    """The event is gone from an agent's document.

    ``gap``: the agent may have missed a state before. ``rebooted``: see `determine_outcome`.
    """

    rebooted: bool = False
    gap: bool = True


Word: TypeAlias = ScheduledEvent | GoneFromDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """What an agent said last about the event: the digest of a state; None: gone.

    ``earlier``: about an earlier occurrence of the event.
    """

    state: str | None
    seen: datetime
    earlier: bool = False
    rebooted: bool = False
    gap: bool = False

    @property
    def says_gone(self) -> bool:
        """Whether it says that this occurrence of the event is gone."""
        return self.state is None and not self.earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class EventHistory:
    """What the hub knows about one occurrence of an event in one scope.

    ``told`` holds the states that were told, the last one last. ``told_at`` is when the agent that
    reported that one saw it. ``started``: one of them is Started. ``returned_at`` is when this
    occurrence began; None: it is the first that is known. ``ended_at`` is when the agents saw that
    it was gone. ``words`` holds the last word of each agent, also about an earlier occurrence.
    ``end_due_at`` is set while agents disagree whether the event is gone, and the hub waits for
    those that show it: when `end_if_still_gone` is due, by the clock of the hub.
    """

    told: tuple[str, ...]
    told_at: datetime
    started: bool
    returned_at: datetime | None = None
    ended_at: datetime | None = None
    words: Mapping[str, LastWord] = field(default_factory=dict)
    end_due_at: datetime | None = None

    @property
    def is_orphaned(self) -> bool:
        """Whether the agents that showed the event are forgotten, and it has not ended."""
        return self.ended_at is None and all(word.state is None for word in self.words.values())

    @property
    def newest_gone(self) -> datetime:
        """When an agent last saw that the event was gone; in the distant past: none says so."""
        return max((word.seen for word in self.words.values() if word.says_gone), default=_NEVER)

    @property
    def was_seen_after_gone(self) -> bool:
        """Whether any agent, a forgotten one too, saw the event later than anybody saw it gone."""
        shown = (word.seen for word in self.words.values() if word.state is not None)
        return max([self.told_at, *shown]) > self.newest_gone + TOLERANCE

    def is_shown_by(self, word: LastWord) -> bool:
        """Whether a word shows the event still, and is not much older than the newest gone."""
        return word.state is not None and word.seen + MAX_LAG >= self.newest_gone


MergeResult: TypeAlias = tuple[EventHistory, Word | None]
"""The new history, and the word that is to be told, which was seen at `told_at` or `ended_at`."""


# --- what agents say


def not_in_future(seen: datetime, now: datetime) -> datetime:
    """Return the time of an agent, but none that is much later than the clock of the hub.

    So an agent whose time is wrong does not silence the others. The clock of the hub can be behind
    by `TOLERANCE` and changes no time, and so not the order of words.
    """
    return min(seen, now + TOLERANCE)


def apply_word(
    history: EventHistory | None,
    agent: str,
    word: Word,
    seen: datetime,
    now: datetime,
    fresh: IsFresh,
) -> tuple[EventHistory | None, Word | None]:
    """Apply a word of an agent, from a report or a pulse. The agent itself counts as fresh.

    ``seen`` is the time of the agent, bounded by `not_in_future`.
    """
    last = history.words.get(agent) if history is not None else None
    if history is None:
        return (None, None) if isinstance(word, GoneFromDocument) else _begin(agent, word, seen, {})
    if last is not None and seen <= last.seen:
        return history, None
    if isinstance(word, GoneFromDocument):
        return _apply_gone(history, agent, word, seen, now, fresh)
    if history.ended_at is not None:
        says_gone = last is not None and last.says_gone
        if seen > history.ended_at + (-TOLERANCE if says_gone else MAX_LAG):
            return _begin(agent, word, seen, history.words, returned_at=seen)
        return _note_live(history, agent, state_digest(word), seen)
    return _apply_live(history, agent, word, seen, now, fresh)


def words_of_pulse(
    agent: str, shown: Mapping[str, Word], histories: Mapping[str, EventHistory]
) -> Mapping[str, Word]:
    """Return the words that a pulse stands for. All keys are EventIds in lower case.

    ``shown`` are the events in the document of the agent. ``histories`` holds at least those in
    which the agent has a last word. An event that the agent knew, or that is orphaned, and that is
    not in its document is gone.
    """
    gone: dict[str, Word] = {}
    for key, history in histories.items():
        last = history.words.get(agent)
        if last is None and not history.is_orphaned:
            continue
        if history.ended_at is None or (last is not None and last.state is not None):
            gone[key] = GoneFromDocument()
    return {**gone, **shown}


def forget_agent(history: EventHistory, agent: str, now: datetime, *, is_last: bool) -> MergeResult:
    """Remove an agent that is gone for good. The event ends if it was the last of its scope."""
    words = {name: word for name, word in history.words.items() if name != agent}
    after = replace(history, words=words)
    if is_last and history.ended_at is None:
        return _end(after, now)
    return after, None


# --- what time alone does


def end_if_still_gone(
    history: EventHistory, now: datetime, fresh: IsFresh, unheard: IsFresh = lambda _: False
) -> MergeResult:
    """End the event if nobody has shown it for `END_WAIT` since an agent said that it is gone.

    Only a hub that listens may call this (`Roster.has_listened`): agents may say what it does not
    hear. It waits for agents that showed the event and are ``unheard`` since it listens.
    """
    if history.end_due_at is None or now < history.end_due_at:
        return history, None
    gone = [agent for agent, word in history.words.items() if word.says_gone]
    if not any(map(fresh, gone)) or history.was_seen_after_gone:
        return replace(history, end_due_at=None), None
    if any(unheard(agent) for agent, word in history.words.items() if word.state is not None):
        return replace(history, end_due_at=now + END_WAIT), None
    return _end(history, now)


def wait_again(history: EventHistory, now: datetime) -> EventHistory:
    """Wait once more for the agents that show the event, if others say that it is gone.

    Do this after each time without a connection to the broker: they could not say so then.
    """
    says_gone = any(word.says_gone for word in history.words.values())
    is_disputed = says_gone and history.ended_at is None
    return replace(history, end_due_at=now + END_WAIT if is_disputed else None)


# --- from rows


def restore_history(
    steps: Iterable[tuple[ScheduledEvent, datetime] | datetime], words: Mapping[str, LastWord]
) -> EventHistory | None:
    """Make the history from what the state file holds. Return None if it holds nothing.

    ``steps`` are the ``event.*`` about the EventId in the journal, oldest first: the state and its
    time, or for ``event.ended`` the time alone. ``end_due_at`` is only in memory: `wait_again` sets
    it anew.
    """
    history: EventHistory | None = None
    for step in steps:
        if isinstance(step, datetime):
            history = None if history is None else replace(history, ended_at=step)
            continue
        event, seen = step
        if history is None:
            history, _ = _begin("", event, seen, {})
        elif history.ended_at is not None:
            history, _ = _begin("", event, seen, {}, returned_at=seen)
        else:
            history = _tell(history, event, seen)
    return None if history is None else replace(history, words=dict(words))


# --- the rules


def _begin(
    agent: str,
    event: ScheduledEvent,
    seen: datetime,
    words: Mapping[str, LastWord],
    returned_at: datetime | None = None,
) -> MergeResult:
    state = state_digest(event)
    history = EventHistory(
        told=(state,),
        told_at=seen,
        started=event.is_started,
        returned_at=returned_at,
        words={
            **{name: replace(word, earlier=True) for name, word in words.items()},
            agent: LastWord(state=state, seen=seen),
        },
    )
    return history, event


def _tell(history: EventHistory, event: ScheduledEvent, seen: datetime) -> EventHistory:
    return replace(
        history,
        told=(*history.told, state_digest(event)),
        told_at=seen,
        started=history.started or event.is_started,
    )


def _note_live(
    history: EventHistory, agent: str, state: str, seen: datetime, *, earlier: bool = False
) -> MergeResult:
    word = LastWord(state=state, seen=seen, earlier=earlier)
    history = replace(history, words={**history.words, agent: word})
    if history.is_shown_by(word):
        history = replace(history, end_due_at=None)
    return history, None


def _apply_live(
    history: EventHistory,
    agent: str,
    event: ScheduledEvent,
    seen: datetime,
    now: datetime,
    fresh: IsFresh,
) -> MergeResult:
    state, last = state_digest(event), history.words.get(agent)
    earlier = history.returned_at is not None and seen < history.returned_at - TOLERANCE
    if state == history.told[-1] or earlier:
        return _note_live(history, agent, state, seen, earlier=earlier)
    showing = {
        name: word
        for name, word in history.words.items()
        if name != agent and word.state == history.told[-1]
    }
    shown = max([history.told_at, *(word.seen for word in showing.values())])
    is_shown = any(fresh(name) and seen <= word.seen + MAX_LAG for name, word in showing.items())
    is_overdue = seen > shown + MAX_LAG and not is_shown
    if history.started and not event.is_started:
        if not is_overdue:
            return _note_live(history, agent, state, seen)
        word = LastWord(state=None, seen=seen, gap=True)
        return _end(replace(history, words={**history.words, agent: word}), now)
    moves_back = last is not None and last.state == history.told[-1] and not is_shown
    is_news = state not in history.told or moves_back
    if is_overdue or (is_news and shown <= seen + TOLERANCE):
        return _note_live(_tell(history, event, seen), agent, state, seen)[0], event
    return _note_live(history, agent, state, seen)


def _apply_gone(
    history: EventHistory,
    agent: str,
    gone: GoneFromDocument,
    seen: datetime,
    now: datetime,
    fresh: IsFresh,
) -> MergeResult:
    last = history.words.get(agent)
    repeated = last if last is not None and last.says_gone else None
    word = LastWord(
        state=None,
        seen=seen,
        earlier=(last is None or last.earlier)
        and history.returned_at is not None
        and seen <= history.returned_at + TOLERANCE,
        rebooted=gone.rebooted or (repeated is not None and repeated.rebooted),
        gap=gone.gap and (repeated is None or repeated.gap),
    )
    was_orphaned = history.is_orphaned
    history = replace(history, words={**history.words, agent: word})
    if history.ended_at is not None or not word.says_gone or history.was_seen_after_gone:
        return history, None
    live = {name: word for name, word in history.words.items() if word.state is not None}
    if not (was_orphaned or any(map(fresh, live))):
        return _end(history, now)
    must_wait = repeated is None or not any(map(history.is_shown_by, live.values()))
    if must_wait and history.end_due_at is None:
        history = replace(history, end_due_at=now + END_WAIT)
    return history, None


def _end(history: EventHistory, now: datetime) -> MergeResult:
    gone = [word for word in history.words.values() if word.says_gone]
    ended_at = max((word.seen for word in gone), default=now)
    told = GoneFromDocument(
        rebooted=any(word.rebooted for word in gone), gap=all(word.gap for word in gone)
    )
    return replace(history, ended_at=ended_at, end_due_at=None), told
