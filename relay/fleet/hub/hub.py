"""The hub: it merges what agents say, records what is new, and tells each scope what it knows.

Merging and recording happen one batch after the other. A batch changes the memory only after the
state file has it, and only then are its messages acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn, Protocol

from aiormq.abc import DeliveredMessage

from relay.amqp.approval_message import UnusableMessage
from relay.clock import Clock, wait_for_event
from relay.errors import DeliveryError, StoreUnavailable
from relay.events.build import Origin, ReportRelayEvent, relay_event
from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent
from relay.fleet.hub.histories import (
    EventName,
    Histories,
    changed_words,
    live_names,
    read_histories,
    sighting_row,
)
from relay.fleet.hub.link import HubLink, Settlements
from relay.fleet.hub.merge import (
    Ended,
    EventHistory,
    Gone,
    News,
    Word,
    apply_report,
    apply_timer,
    estimate_seen,
    forget_agent,
    next_timer,
    pulse_words,
    restart_wait,
)
from relay.fleet.hub.roster import FRESH_FOR, Agent, Roster
from relay.fleet.hub.source import FleetSource
from relay.fleet.messages import (
    MAX_TOLD,
    HubState,
    Pulse,
    ReceivedMessage,
    StartResult,
    VoteAnswer,
    VoteMessage,
    read_message,
)
from relay.fleet.routing import Sender, check_report, command_key, state_key
from relay.fleet.settings import HubSettings
from relay.fleet.topology import fleet_exchange
from relay.ingest.recorder import EventDeparture, EventNews, EventSighting, Recorder
from relay.outbox import RecordedEvent
from relay.outbox.event_keys import EventKeys
from relay.outbox.fleet import AgentRow, SightingRow
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction

STATE_INTERVAL = 60.0
"""Seconds between two states of a scope in which nothing happens."""
MIN_STATE_INTERVAL = 0.1
"""Seconds between two states of a scope in which much happens."""
TOLD_FOR = 60.0
"""Seconds for which a state names the id of an event. Agents wait at most three for it."""
UPKEEP_INTERVAL = 5.0
"""Seconds between two looks at the roster."""
RETRY_DELAY = 1.0
"""Seconds until work is tried again that the state file refused."""
MAX_VOTES_AT_ONCE = 200
"""Votes that are decided at the same time. The others wait in the queue."""
COMPLAINT_INTERVAL = 60.0
"""Seconds between two events about unusable messages of an agent."""

_HUB_KEYS = EventKeys(with_scope=True)
_log = logging.getLogger(__name__)


class StartResultHandler(Protocol):
    """Who waits for the results of start orders, and for signs of life."""

    def on_result(self, sender: Sender, result: StartResult) -> None:
        """An agent has answered a start order."""

    def on_heard(self, scope: str, relay: str) -> None:
        """What an agent said has been merged and recorded."""


class VoteHandler(Protocol):
    """Who decides the votes of machines."""

    async def answer(self, sender: Sender, vote: VoteMessage) -> VoteAnswer:
        """Decide a vote; return the answer for the local program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """A word of an agent about an event. ``incarnation`` is that of the agent's document."""

    name: EventName
    relay: str
    word: Word
    observed_at: datetime
    seen: datetime
    incarnation: int | None = None


@dataclass(slots=True)
class _Batch:
    """What the messages of a batch say, and what is to be recorded for it."""

    heard: list[_Heard] = field(default_factory=list)
    relay_events: list[CloudEvent] = field(default_factory=list)
    histories: dict[EventName, EventHistory | None] = field(default_factory=dict)
    news: list[EventNews] = field(default_factory=list)


class Hub:
    """The source of a hub. `attach` gives it the parts that need the store with its sinks."""

    def __init__(
        self,
        settings: HubSettings,
        origin: Origin,
        store: Store,
        clock: Clock,
        report: ReportRelayEvent,
        on_unusable: Callable[[str | None, str], None],
    ) -> None:
        """``on_unusable`` counts and logs a message: its RabbitMQ user, and why it is unusable."""
        self.link = HubLink(settings, origin, self, clock)
        self.source = FleetSource(clock, report)
        self.roster = Roster()
        self._exchange = fleet_exchange(settings.exchange)
        self._domains = settings.domains
        self._origin = origin
        self._store = store
        self._clock = clock
        self._report = report
        self._on_unusable = on_unusable
        self._recorder = Recorder(origin, None, None)
        self._histories = Histories()
        self._merging = asyncio.Lock()
        self._results: StartResultHandler | None = None
        self._votes: VoteHandler | None = None
        self._vote_slots = asyncio.Semaphore(MAX_VOTES_AT_ONCE)
        self._tasks: asyncio.TaskGroup | None = None
        self._told: dict[str, deque[tuple[float, str]]] = {}
        self._states_sent: dict[str, float] = {}
        self._states_due: set[str] = set()
        self._state_wake = asyncio.Event()
        self._timer_wake = asyncio.Event()
        self._unsaved_agents: set[tuple[str, str]] = set()
        self._silent_scopes: frozenset[str] = frozenset()
        self._wrong_clocks: frozenset[tuple[str, str]] = frozenset()
        self._complained_at: dict[tuple[str, str], float] = {}
        self._unsaved: list[tuple[Settlements, int]] = []
        """Messages whose content is only in memory: the state file cannot be written."""
        store.listeners.recorded.append(self._on_recorded)
        store.listeners.write_error_changed.append(self._on_write_error_changed)

    def attach(self, results: StartResultHandler, votes: VoteHandler) -> None:
        """From now on results and votes can be handled."""
        self._results, self._votes = results, votes

    def agents_showing(self, scope: str, event_key: str) -> frozenset[str] | None:
        """Return the agents that see the current state of an event; None if it is not known."""
        history = self._histories.of_scope(scope).get(_HUB_KEYS.event_id(event_key))
        return history.current_agents if history is not None else None

    async def load(self) -> None:
        """Read what the state file knows. Do this once, before `run`."""

        def work(tx: Transaction) -> list[AgentRow]:
            return tx.fleet.agents()

        self.roster = Roster(map(_agent_from_row, await self._store.read(work)))
        stored = await self._store.read(lambda tx: read_histories(tx, live_names(tx)))
        for item in stored:
            self._histories.put(item.name, item.history)

    async def run(self) -> None:
        """Stay connected, merge, and keep the roster until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            group.create_task(self.link.run(), name="hub: link")
            group.create_task(self.source.watch(), name="hub: source")
            group.create_task(self._apply_timers(), name="hub: timers")
            group.create_task(self._send_states(), name="hub: states")
            group.create_task(self._keep_roster(), name="hub: roster")

    async def save(self) -> None:
        """Store what is known about agents. Do this at the end."""
        await self._save_agents()

    # --- messages of agents

    def on_connected(self) -> None:
        """The hub hears its agents from now on."""
        self.source.on_connected()
        self._listen()
        for scope in self.roster.scopes:
            self._request_state(scope)

    def on_disconnected(self) -> None:
        """The hub does not hear its agents any more."""
        self.source.on_disconnected()
        self.roster.stop_listening()

    async def take_reports(
        self, messages: Sequence[DeliveredMessage], settlements: Settlements
    ) -> None:
        """Merge and record what agents report. Hand on votes and results."""
        batch, tags = _Batch(), []
        for message in messages:
            tag = message.delivery_tag or 0
            read = self._read(message)
            if read is None:
                await settlements.reject(tag)
                continue
            sender, received = read
            match received.content:
                case CloudEvent() as event:
                    tags.append(tag)
                    self._add_report(batch, sender, received, event)
                case VoteMessage() as vote:
                    await self._start_vote(sender, vote, tag, settlements)
                case StartResult() as result:
                    if self._results is not None:
                        self._results.on_result(sender, result)
                    settlements.acknowledge(tag)
                case _:
                    settlements.acknowledge(tag)
        if tags:
            await self._record_batch(batch)
        for tag in tags:
            if self._store.write_error is None:
                settlements.acknowledge(tag)
            else:
                self._unsaved.append((settlements, tag))

    async def take_pulses(self, messages: Sequence[DeliveredMessage]) -> None:
        """Note who is alive, and merge what they see."""
        batch, now = _Batch(), self._clock.now()
        heard_of = []
        for message in messages:
            read = self._read(message)
            if read is None or not isinstance(read[1].content, Pulse):
                continue
            (sender, received), pulse = read, read[1].content
            assert isinstance(pulse, Pulse)  # noqa: S101  # checked above
            agent = self.roster.note_pulse(sender, received.origin.relay, pulse, now)
            self._unsaved_agents.add((agent.scope, agent.relay))
            heard_of.append((sender.scope, sender.relay))
            if pulse.events is None:
                continue
            seen = estimate_seen(
                received.at, now, poll_age=pulse.poll_age or 0.0, clock_offset=pulse.clock_offset
            )
            incarnations = {
                event["eventId"].lower(): event["documentIncarnation"] for event in pulse.live or ()
            }
            histories = self._histories.of_scope(sender.scope)
            for event_id, word in pulse_words(sender.relay, pulse.events, histories):
                batch.heard.append(
                    _Heard(
                        name=(sender.scope, event_id),
                        relay=sender.relay,
                        word=word,
                        observed_at=received.at,
                        seen=seen,
                        incarnation=incarnations.get(event_id),
                    )
                )
        if batch.heard:
            await self._record_batch(batch)
        if self._results is not None:
            for scope, relay in heard_of:
                self._results.on_heard(scope, relay)

    def _read(self, message: DeliveredMessage) -> tuple[Sender, ReceivedMessage] | None:
        """Return a message and who sent it; None if it is unusable."""
        sender: Sender | None = None
        try:
            key, sender = check_report(message, self._exchange, self._domains)
            received = read_message(message.body)
            received.require_key(key)
        except UnusableMessage as error:
            self._on_unusable(message.header.properties.user_id, str(error))
            if sender is not None:
                self._complain(sender, str(error))
            return None
        except Exception:  # noqa: BLE001  # one message must not stop the others
            _log.exception("internal error: a message of an agent was dead-lettered")
            return None
        self.source.polls += 1
        if not isinstance(received.content, Pulse):
            now = self._clock.now()
            agent = self.roster.note_report(sender, received.origin.relay, now)
            self._unsaved_agents.add((agent.scope, agent.relay))
        return sender, received

    def _complain(self, sender: Sender, reason: str) -> None:
        """Report an unusable message of a known agent, at most once a minute for each agent."""
        name, now = (sender.scope, sender.relay), self._clock.monotonic()
        before = self._complained_at.get(name)
        if self.roster.agent(*name) is None:
            return
        if before is None or now - before >= COMPLAINT_INTERVAL:
            self._complained_at[name] = now
            self._report(
                "relay.dead-lettered",
                f"a message of agent {sender.relay} of scope {sender.scope} cannot be used and was "
                f"dead-lettered: {reason}",
            )

    def _add_report(
        self, batch: _Batch, sender: Sender, received: ReceivedMessage, event: CloudEvent
    ) -> None:
        if event.name.startswith("relay."):
            batch.relay_events.append(event)
            return
        agent = self.roster.agent(sender.scope, sender.relay)
        offset = agent.clock_offset if agent is not None else None
        data = event.data
        scheduled = ScheduledEvent.from_fields(data)
        word: Word = scheduled
        if event.name == "event.ended":
            word = Gone(rebooted=data["evidence"] == "rebooted", gap=data["outcome"] == "unknown")
        batch.heard.append(
            _Heard(
                name=(sender.scope, scheduled.key),
                relay=sender.relay,
                word=word,
                observed_at=received.at,
                seen=estimate_seen(received.at, self._clock.now(), clock_offset=offset),
                incarnation=data["documentIncarnation"],
            )
        )

    # --- merging and recording

    async def _record_batch(self, batch: _Batch) -> None:
        """Merge what was heard, and record what is new."""
        async with self._merging:
            await self._load_missing({heard.name for heard in batch.heard})
            now = self._clock.now()
            for heard in batch.heard:
                name = heard.name
                before = (
                    batch.histories[name] if name in batch.histories else self._histories.get(name)
                )
                after, news = apply_report(
                    before,
                    heard.relay,
                    heard.word,
                    heard.observed_at,
                    now,
                    self.roster.may_speak(name[0], now),
                    seen=heard.seen,
                )
                batch.histories[name] = after
                self._add_news(batch, name, news, heard.incarnation)
            await self._write(batch)

    def _add_news(
        self, batch: _Batch, name: EventName, news: News | None, incarnation: int | None
    ) -> None:
        if news is None:
            return
        scope, event_id = name
        if isinstance(news, Ended):
            departure = EventDeparture(event_id, news.gap, news.rebooted)
            batch.news.append(EventNews(scope, news.seen, departure))
        else:
            batch.news.append(EventNews(scope, news.seen, EventSighting(news.event, incarnation)))

    async def _write(self, batch: _Batch) -> None:
        """Store the result of a merge, then take it into the memory."""
        sightings = list(self._changed_sightings(batch))
        if sightings or batch.news or batch.relay_events:
            now = self._clock.now()

            def work(tx: Transaction) -> None:
                self._recorder.record_news(tx, batch.news, now)
                for event in batch.relay_events:
                    attributes = {**event.attributes, "journalhead": str(tx.head())}
                    tx.record(CloudEvent.build(attributes, event.data), now)
                tx.fleet.save_sightings(sightings)

            await self._transact(work)
        scopes = {news.scope for news in batch.news}
        for name, history in batch.histories.items():
            was_ending = name in self._histories.ending
            self._histories.put(name, history)
            if was_ending != (name in self._histories.ending):
                scopes.add(name[0])
        for scope in scopes:
            self._request_state(scope)
        if self._histories.ending:
            self._timer_wake.set()

    def _changed_sightings(self, batch: _Batch) -> Iterable[SightingRow]:
        for name, after in batch.histories.items():
            if after is None:
                continue
            before = self._histories.get(name)
            for relay, word in changed_words(before, after).items():
                yield sighting_row(_HUB_KEYS.key(*name), relay, word)

    async def _transact(self, work: Callable[[Transaction], None]) -> None:
        """Run work in the store. What agents report is told even if it cannot be written."""
        while True:
            try:
                await self._store.transact(work, fail_open=True)
            except StoreUnavailable:
                await self._clock.sleep(RETRY_DELAY)
            else:
                return

    async def _load_missing(self, names: set[EventName]) -> None:
        missing = self._histories.missing(names)
        while missing:
            try:
                stored = await self._store.read(lambda tx: read_histories(tx, missing))
            except StoreUnavailable:
                await self._clock.sleep(RETRY_DELAY)
                continue
            for item in stored:
                self._histories.put(item.name, item.history)
            return

    def _on_write_error_changed(self, reason: str | None) -> None:
        """Acknowledge what was only in memory, once the state file has it."""
        if reason is not None:
            return
        unsaved, self._unsaved = self._unsaved, []
        changed = set()
        for settlements, tag in unsaved:
            settlements.acknowledge(tag)
            changed.add(settlements)
        for settlements in changed:
            self._spawn(settlements.flush(), "hub: acknowledge")

    async def _apply_timers(self) -> NoReturn:
        """End the events whose agents agree, or have had their time to disagree."""
        while True:
            self._timer_wake.clear()
            async with self._merging:
                now, batch = self._clock.now(), _Batch()
                due: list[datetime] = []
                for name in list(self._histories.ending):
                    history = self._histories.get(name)
                    if history is None:
                        continue
                    fresh = self.roster.may_speak(name[0], now)
                    after, news = apply_timer(history, now, fresh)
                    if after is not history:
                        batch.histories[name] = after
                        self._add_news(batch, name, news, None)
                    moment = next_timer(after)
                    if moment is not None:
                        due.append(moment)
                if batch.histories:
                    await self._write(batch)
            seconds = None
            if due:
                seconds = max(0.0, (min(due) - self._clock.now()).total_seconds())
            await wait_for_event(self._timer_wake, self._clock, seconds)

    # --- votes

    async def _start_vote(
        self, sender: Sender, vote: VoteMessage, tag: int, settlements: Settlements
    ) -> None:
        """Decide a vote beside the next messages. It is acknowledged once it is decided."""
        await self._vote_slots.acquire()
        self._spawn(self._decide(sender, vote, tag, settlements), "hub: vote")

    async def _decide(
        self, sender: Sender, vote: VoteMessage, tag: int, settlements: Settlements
    ) -> None:
        try:
            if self._votes is None:
                return
            answer = await self._votes.answer(sender, vote)
            settlements.acknowledge(tag)
            await settlements.flush()
            await self.link.send(
                command_key(sender.scope, sender.relay),
                answer.to_event(self._origin, self._clock.now()),
            )
        except DeliveryError as error:
            _log.warning(
                "the answer to a vote of agent %s of scope %s was not sent: %s",
                sender.relay,
                sender.scope,
                error.reason,
            )
        finally:
            self._vote_slots.release()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._tasks is None:
            work.close()
            return
        self._tasks.create_task(work, name=name)

    # --- states

    def _on_recorded(self, events: Sequence[RecordedEvent]) -> None:
        """Remember the ids that were told in each scope."""
        now = self._clock.monotonic()
        for event in events:
            if event.event_key is None or not event.name.startswith("event."):
                continue
            scope = _HUB_KEYS.scope(event.event_key) or ""
            told = self._told.setdefault(scope, deque(maxlen=MAX_TOLD))
            told.append((now, event.id))

    def _request_state(self, scope: str) -> None:
        """Send a state to the agents of a scope soon."""
        sent_at = self._states_sent.get(scope)
        if sent_at is None or self._clock.monotonic() - sent_at >= MIN_STATE_INTERVAL:
            self._send_state(scope)
        else:
            self._states_due.add(scope)
            self._state_wake.set()

    def _send_state(self, scope: str) -> None:
        now = self._clock.monotonic()
        told = self._told.get(scope, deque())
        while told and now - told[0][0] > TOLD_FOR:
            told.popleft()
        if not told:
            self._told.pop(scope, None)
        self._states_sent[scope] = now
        at = self._clock.now()
        state = HubState(
            hub_time=at,
            told=tuple(event_id for _, event_id in told),
            ending=tuple(self._histories.ending_in(scope)),
        )
        self.link.send_transient(state_key(scope), state.to_event(self._origin, at))

    async def _send_states(self) -> NoReturn:
        """Send the states that are due, and each minute a state to every scope."""
        while True:
            self._state_wake.clear()
            due, self._states_due = self._states_due, set()
            for scope in due:
                self._send_state(scope)
            now = self._clock.monotonic()
            scopes = self.roster.scopes
            for scope in scopes:
                if now - self._states_sent.get(scope, -STATE_INTERVAL) >= STATE_INTERVAL:
                    self._send_state(scope)
            for scope in self._states_sent.keys() - scopes:
                del self._states_sent[scope]
            if due:
                await self._clock.sleep(MIN_STATE_INTERVAL)
            else:
                await wait_for_event(self._state_wake, self._clock, MIN_STATE_INTERVAL * 50)

    # --- the roster

    def _listen(self) -> None:
        """Note that the hub listens; after a pause, wait once more for agents that disagree."""
        now = self._clock.now()
        if not self.roster.listen(now):
            return
        for name, history in list(self._histories.live()):
            self._histories.put(name, restart_wait(history, now))
        self._timer_wake.set()

    async def _keep_roster(self) -> NoReturn:
        """Report who is silent and whose clock is wrong, and forget who is gone."""
        while True:
            await self._clock.sleep(UPKEEP_INTERVAL)
            if self.link.is_connected:
                self._listen()
            now = self._clock.now()
            self._report_silence(now)
            self._report_wrong_clocks(now)
            for agent in self.roster.lost(now):
                await self.forget(agent)
            await self._save_agents()

    async def forget(self, agent: Agent) -> None:
        """Remove an agent that is gone for good. Events that only it shows end."""
        _log.info("agent %s of scope %s is forgotten", agent.relay, agent.scope)
        async with self._merging:
            now, batch = self._clock.now(), _Batch()
            for event_id, history in self._histories.of_scope(agent.scope).items():
                if agent.relay not in history.words:
                    continue
                after, news = forget_agent(history, agent.relay, now)
                batch.histories[agent.scope, event_id] = after
                self._add_news(batch, (agent.scope, event_id), news, None)
            self.roster.forget(agent)
            self._unsaved_agents.discard((agent.scope, agent.relay))
            await self._transact(lambda tx: tx.fleet.forget_agent(agent.scope, agent.relay))
            await self._write(batch)

    def _report_silence(self, now: datetime) -> None:
        silent = self.roster.silent_scopes(now)
        for scope in sorted(silent - self._silent_scopes):
            count = len(self.roster.agents_of(scope))
            reason = (
                f"no agent of scope {scope} has been heard of for "
                f"{FRESH_FOR.total_seconds():g} s: none of its events starts or ends, until one is"
            )
            _log.error("%s", reason)
            self._record_about_scope("relay.silent", scope, reason, count, now)
        for scope in sorted(self._silent_scopes - silent):
            reason = f"an agent of scope {scope} is heard of again"
            _log.info("%s", reason)
            self._record_about_scope("relay.source-recovered", scope, reason, 1, now)
        self._silent_scopes = silent

    def _report_wrong_clocks(self, now: datetime) -> None:
        agents = self.roster.with_wrong_clocks(now)
        names = frozenset((agent.scope, agent.relay) for agent in agents)
        for agent in agents:
            if (agent.scope, agent.relay) not in self._wrong_clocks:
                reason = (
                    f"the clock of agent {agent.name} of scope {agent.scope} is wrong by "
                    f"{agent.clock_offset:g} s: it gets no start orders"
                )
                _log.warning("%s", reason)
                self._record_about_scope("relay.clock-skewed", agent.scope, reason, 1, now)
        self._wrong_clocks = names

    def _record_about_scope(
        self, name: str, scope: str, reason: str, count: int, at: datetime
    ) -> None:
        origin = self._origin.in_scope(scope)
        recorded = self._store.submit(
            lambda tx: tx.record(
                relay_event(
                    name, origin, at, sink=None, reason=reason, count=count, head=str(tx.head())
                ),
                at,
            ),
            fail_open=True,
        )
        # asyncio logs an exception that nobody retrieves; the store has reported this one.
        recorded.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _save_agents(self) -> None:
        names, self._unsaved_agents = self._unsaved_agents, set()
        agents = [agent for name in names if (agent := self.roster.agent(*name)) is not None]
        if agents:
            rows = list(map(_row_from_agent, agents))
            await self._transact(lambda tx: tx.fleet.save_agents(rows))


def _agent_from_row(row: AgentRow) -> Agent:
    return Agent(
        scope=row.scope,
        relay=row.relay,
        user=row.user,
        name=row.name,
        first_heard=row.first_heard,
        last_report=row.last_report,
        last_pulse=row.last_pulse,
        vm_id=row.vm_id,
        boot_id=row.boot_id,
        version=row.version,
        zone=row.zone,
        names=frozenset(row.names) or None,
        poll_age=row.poll_age,
        clock_offset=row.clock_offset,
    )


def _row_from_agent(agent: Agent) -> AgentRow:
    return AgentRow(
        scope=agent.scope,
        relay=agent.relay,
        user=agent.user,
        name=agent.name,
        vm_id=agent.vm_id,
        boot_id=agent.boot_id,
        version=agent.version,
        zone=agent.zone,
        names=tuple(sorted(agent.names or ())),
        first_heard=agent.first_heard,
        last_report=agent.last_report,
        last_pulse=agent.last_pulse,
        poll_age=agent.poll_age,
        clock_offset=agent.clock_offset,
    )
