"""The hub: it reads what agents publish, and hands it to the parts that merge and decide.

`HubLink` hands over the messages of agents (`take_messages_except_pulses`, `take_pulses`). Each is
checked first: who may have sent it, and whether it can be read. Reports, which are events that an
agent recorded, become an `AgentWordAboutEvent` each, and `EventMerger` merges and records them. A
report is acknowledged when it is on disk. Pulses go through `PulseMerger`, votes to `MachineVotes`,
and results of start orders to the handler that was attached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from aiormq.abc import DeliveredMessage

from relay.amqp.message_verification import UnusableMessage
from relay.clock import Clock
from relay.errors import DeliveryError, StoreUnavailable
from relay.events.build import Origin, RecordRelayEvent
from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent
from relay.fleet.hub.connection_health import FleetSourceHealth
from relay.fleet.hub.histories import EventHistoryCache, EventName
from relay.fleet.hub.link import CumulativeAcknowledger, HubLink
from relay.fleet.hub.merge import GoneFromDocument, Word, agent_time_to_hub_time
from relay.fleet.hub.merger import AgentWordAboutEvent, EventMerger
from relay.fleet.hub.pulses import PulseMerger
from relay.fleet.hub.roster import Agent
from relay.fleet.hub.roster_keeper import RosterKeeper
from relay.fleet.hub.votes import MachineVotes
from relay.fleet.message_reader import ReceivedMessage, read_message
from relay.fleet.messages import (
    MAX_ASKED,
    Pulse,
    PulseRequest,
    StartResult,
    VoteAnswer,
    VoteMessage,
)
from relay.fleet.routing import (
    AuthorizedSender,
    command_key,
    scope_key,
    verify_message_from_agent,
)
from relay.fleet.settings import HubSettings, TrustDomain
from relay.fleet.topology import agent_publish_exchange_name
from relay.store import EventKeyFormat
from relay.store.sqlite import Store

ASK_INTERVAL = 0.5
"""Seconds between two requests to a scope in which much ends. Each goes to all of its agents."""
COMPLAINT_INTERVAL = 60.0
"""Seconds between two events about unusable messages of one agent."""
MAX_VOTES_AT_ONCE = 200
"""Votes that are decided at the same time. The others wait in the queue."""
MAX_COMPLAINTS = 10_000
"""Agents whose last such event is remembered."""

_KEYS = EventKeyFormat(with_scope=True)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Report:
    """An event that an agent recorded, and the delivery tag of its message."""

    tag: int
    sender: AuthorizedSender
    received: ReceivedMessage
    event: CloudEvent

    @property
    def is_about_relay(self) -> bool:
        """Whether it is a ``relay.*``, about the agent itself."""
        return self.event.name.startswith("relay.")


class Hub:
    """The `MessageHandler` of a hub, with all parts that its messages need.

    Call `load` first, then `attach_handlers`, whose parts need the store with its
    sinks, then `run`.
    """

    def __init__(
        self,
        settings: HubSettings,
        origin: Origin,
        store: Store,
        clock: Clock,
        report: RecordRelayEvent,
        on_unusable: Callable[[str | None, str], None],
    ) -> None:
        """``on_unusable`` counts and logs a message: its RabbitMQ user, and why it is unusable."""
        self.link = HubLink(settings, origin, self, clock)
        self.source = FleetSourceHealth(clock, report)
        self.reports = 0
        """Reports about events that were read, copies included."""
        self.pulses = 0
        """Pulses that were read."""
        self._keeper = RosterKeeper(
            origin,
            store,
            clock,
            on_upkeep=self._mark_listening,
            forget=self.forget,
        )
        self.roster = self._keeper.roster
        """The agents."""
        self._histories = EventHistoryCache()
        self._merger = EventMerger(
            origin,
            store,
            _KEYS,
            clock,
            self._histories,
            freshness=self.roster.make_hearing_check,
            listens=self.roster.has_hub_listened_without_pause,
            ask_scope=self._ask_scope_soon,
            on_ended=lambda name: self._spawn(
                self._forget_agents_of_terminated_vms(name), "hub: terminated agents"
            ),
        )
        self._pulse_merger = PulseMerger(
            self._histories,
            self._merger,
            clock,
            has_waiting_reports=self.link.ask_broker_if_reports_wait,
        )
        self._exchange = agent_publish_exchange_name(settings.exchange)
        self._domains: Sequence[TrustDomain] = settings.domains
        self._origin = origin
        self._store = store
        self._clock = clock
        self._report = report
        self._on_unusable = on_unusable
        self._on_result: Callable[[AuthorizedSender, StartResult], None] | None = None
        self._votes: MachineVotes | None = None
        self._vote_slots = asyncio.Semaphore(MAX_VOTES_AT_ONCE)
        self._tasks: asyncio.TaskGroup | None = None
        self._scopes_to_ask: set[str] = set()
        self._must_ask = asyncio.Event()
        self._complained_at: dict[tuple[str, str], float] = {}
        self._unsaved: list[tuple[CumulativeAcknowledger, int]] = []
        """Messages whose content is only in memory: the state file cannot be written."""
        store.listeners.write_error_changed.append(self._acknowledge_recorded)

    def use_trust_domains(self, domains: Sequence[TrustDomain]) -> None:
        """Accept messages of these trust domains from now on."""
        self._domains = domains

    @property
    def redundant_reports(self) -> int:
        """Reports that said nothing new: other agents had said it before."""
        return self._merger.copies

    def attach_handlers(
        self,
        on_result: Callable[[AuthorizedSender, StartResult], None],
        votes: MachineVotes,
        on_agents_changed: Callable[[], None],
    ) -> None:
        """From now on results and votes can be handled.

        ``on_agents_changed`` is called a few seconds after agents came or went.
        """
        self._on_result = on_result
        self._votes = votes
        self._keeper.on_agents_changed = on_agents_changed

    def agents_seeing_current_state(self, scope: str, event_key: str) -> frozenset[str]:
        """Return the agents whose last word is the current state of an event."""
        history = self._histories.histories_in_memory_of_scope(scope).get(
            _KEYS.event_id_of_key(event_key)
        )
        return history.agents_seeing_told_state if history is not None else frozenset()

    async def load(self) -> None:
        """Read what the state file knows. Do this once, before `run`."""
        await self._keeper.load()
        await self._merger.load()

    async def run(self) -> None:
        """Stay connected, merge, and keep the roster until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            group.create_task(self.link.run(), name="hub: link")
            group.create_task(self.source.watch_connection(), name="hub: source")
            group.create_task(self._merger.end_events_when_due(), name="hub: ends of events")
            group.create_task(self._ask_scopes(), name="hub: pulse requests")
            group.create_task(self._keeper.run(), name="hub: roster")
            group.create_task(
                self._pulse_merger.merge_postponed_words_when_due(), name="hub: postponed pulses"
            )

    def save_roster(self) -> None:
        """Have the store write what is known about agents. Do this at the end."""
        self._keeper.save()

    async def forget(self, agent: Agent) -> None:
        """Remove an agent that is gone for good."""
        relays = {each.relay for each in self.roster.agents_of_scope(agent.scope)}
        await self._merger.forget_agent(
            agent.scope,
            agent.relay,
            lambda: self._keeper.forget_in_memory(agent),
            is_last=relays <= {agent.relay},
        )

    async def _forget_agents_of_terminated_vms(self, name: EventName) -> None:
        """Forget the agents whose VMs Azure has deleted. One that is heard again comes back."""
        scope, event_id = name
        key = _KEYS.make_key(scope, event_id)
        try:
            ended = await self._store.read(lambda tx: tx.occurrences.find_newest_occurrence(key))
        except StoreUnavailable:
            return  # the agents are forgotten after they were silent for long
        if ended is not None and ended.outcome == "completed":
            for agent in self.roster.agents_terminated_by(scope, ended.event):
                await self.forget(agent)

    def _ask_scope_soon(self, scope: str) -> None:
        self._scopes_to_ask.add(scope)
        self._must_ask.set()

    async def _ask_scopes(self) -> NoReturn:
        """Ask the agents of each scope whether events that may have ended are still there."""
        while True:
            await self._must_ask.wait()
            self._must_ask.clear()
            scopes, self._scopes_to_ask = self._scopes_to_ask, set()
            for scope in scopes:
                if event_ids := self._histories.ending_event_ids(scope)[:MAX_ASKED]:
                    request = PulseRequest(event_ids=tuple(event_ids))
                    event = request.to_event(self._origin, self._clock.now())
                    self.link.send_transient(scope_key(scope), event)
            await self._clock.sleep(ASK_INTERVAL)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            if self._tasks is not None:
                self._tasks.create_task(work, name=name)
                return
        except RuntimeError:  # the hub stops: the message comes again, and the rest can wait
            pass
        work.close()

    # --- messages of agents

    def on_broker_connected(self) -> None:
        """The hub hears its agents from now on."""
        self.source.on_broker_connected()
        self._mark_listening()

    def on_broker_disconnected(self) -> None:
        """The hub does not hear its agents any more."""
        self.source.on_broker_disconnected()
        self.roster.note_hub_connection_lost()

    def on_broker_connection_failed(self) -> None:
        """The connection could not be made, or was lost."""
        self.source.on_broker_connection_failed()

    def _mark_listening(self) -> None:
        """Note that the hub listens; after a pause, let agents that disagree have their time."""
        if self.link.is_connected and self.roster.record_hub_listening_until_now(self._clock.now()):
            self._merger.restart_end_waits()

    async def take_messages_except_pulses(
        self, messages: Sequence[DeliveredMessage], settlements: CumulativeAcknowledger
    ) -> None:
        """Merge and record what agents report. Hand on votes and results."""
        reports: list[_Report] = []
        votes: list[tuple[int, AuthorizedSender, VoteMessage]] = []
        for message in messages:
            tag = message.delivery_tag or 0
            read = self._parse_agent_message(message)
            if read is None:
                settlements.dead_letter(tag)
                continue
            sender, received = read
            if isinstance(received.content, CloudEvent):
                reports.append(_Report(tag, sender, received, received.content))
            elif isinstance(received.content, VoteMessage):
                votes.append((tag, sender, received.content))
            else:
                if isinstance(received.content, StartResult) and self._on_result is not None:
                    self._on_result(sender, received.content)
                settlements.acknowledge(tag)
        if reports:
            await self._merge_batch(reports)
            self._acknowledge_when_saved(reports, settlements)
        if self._votes is not None:
            for tag, sender, vote in votes:  # the event that it is about is recorded now
                await self._vote_slots.acquire()
                work = self._answer_vote(self._votes, sender, vote, tag, settlements)
                self._spawn(work, "hub: vote")

    async def _answer_vote(
        self,
        votes: MachineVotes,
        sender: AuthorizedSender,
        vote: VoteMessage,
        tag: int,
        settlements: CumulativeAcknowledger,
    ) -> None:
        """Acknowledge a vote when it is decided, and send the answer to its agent."""
        try:
            answer = await votes.answer(sender, vote)
        except Exception:  # noqa: BLE001  # one vote must not stop the hub
            _log.exception("internal error: a vote was dead-lettered")
            settlements.dead_letter(tag)
        else:
            settlements.acknowledge(tag)
            settlements.flush()
            if answer is not None:
                await self._send_answer(sender, answer)
        finally:
            self._vote_slots.release()

    async def _send_answer(self, sender: AuthorizedSender, answer: VoteAnswer) -> None:
        event = answer.to_event(self._origin, self._clock.now())
        try:
            await self.link.send(command_key(sender.scope, sender.relay), event)
        except DeliveryError as error:
            _log.warning(
                "the answer to a vote of agent %s of scope %s was not sent: %s",
                sender.relay,
                sender.scope,
                error.reason,
            )

    async def _merge_batch(self, reports: Sequence[_Report]) -> None:
        about_relays = [report.event for report in reports if report.is_about_relay]
        heard = [
            self._build_received_word_from_report(report)
            for report in reports
            if not report.is_about_relay
        ]
        self.reports += len(heard)
        await self._merger.merge_received(heard, about_relays)

    def _build_received_word_from_report(self, report: _Report) -> AgentWordAboutEvent:
        """Return the word that a reported change stands for."""
        sender, data = report.sender, report.event.data
        agent = self.roster.agent(sender.scope, sender.relay)
        offset = agent.clock_offset if agent is not None else None
        scheduled = ScheduledEvent.from_cloudevent_data(data)
        word: Word = scheduled
        if report.event.name == "event.ended":
            word = GoneFromDocument(
                rebooted=data["evidence"] == "rebooted", gap=data["outcome"] == "unknown"
            )
        at = report.received.at
        return AgentWordAboutEvent(
            name=(sender.scope, scheduled.lowercase_event_id),
            relay=sender.relay,
            word=word,
            observed_at=at,
            seen=agent_time_to_hub_time(at, self._clock.now(), offset),
            incarnation=data["documentIncarnation"],
            is_report=True,
        )

    def _acknowledge_when_saved(
        self, reports: Sequence[_Report], settlements: CumulativeAcknowledger
    ) -> None:
        """Acknowledge what is on disk. The rest stays in the queue until it is."""
        for report in reports:
            if self._store.write_error is None:
                settlements.acknowledge(report.tag)
            else:
                self._unsaved.append((settlements, report.tag))

    def _acknowledge_recorded(self, reason: str | None) -> None:
        """Acknowledge what was only in memory, once the state file has it."""
        if reason is not None:
            return
        unsaved, self._unsaved = self._unsaved, []
        for settlements, tag in unsaved:
            settlements.acknowledge(tag)
        for settlements in {settlements for settlements, _ in unsaved}:
            settlements.flush()

    async def take_pulses(self, messages: Sequence[DeliveredMessage]) -> None:
        """Note who is alive, and merge what they see."""
        now = self._clock.now()
        heard: list[AgentWordAboutEvent] = []
        for message in messages:
            read = self._parse_agent_message(message)
            if read is None:
                continue
            sender, received = read
            if not isinstance(received.content, Pulse):
                continue
            self.pulses += 1
            agent = self.roster.note_pulse(sender, received.origin.relay, received.content, now)
            self._keeper.mark_agent_unsaved(agent)
            heard += self._pulse_merger.words_of_pulse(sender, received, received.content)
        await self._pulse_merger.merge_repeats(heard)

    def _parse_agent_message(
        self, message: DeliveredMessage
    ) -> tuple[AuthorizedSender, ReceivedMessage] | None:
        """Return a message and who sent it; None if it is unusable, which is reported.

        The roster notes all messages here but pulses, which `take_pulses` notes with what they say.
        """
        sender: AuthorizedSender | None = None
        try:
            key, sender = verify_message_from_agent(message, self._exchange, self._domains)
            received = read_message(message.body)
            received.require_matching_key(key)
            self._refuse_own_origin(received)
        except UnusableMessage as error:
            self._on_unusable(message.header.properties.user_id, str(error))
            if sender is not None:
                self._tell_of_dead_letter(sender, str(error))
            return None
        except Exception:  # noqa: BLE001  # one message must not stop the others
            _log.exception("internal error: a message of an agent could not be read")
            return None
        self.source.polls += 1
        if not isinstance(received.content, Pulse):
            now = self._clock.now()
            agent = self.roster.note_message_except_pulse(sender, received.origin.relay, now)
            self._keeper.mark_agent_unsaved(agent)
        return sender, received

    def _refuse_own_origin(self, received: ReceivedMessage) -> None:
        """Raise UnusableMessage if what an agent reports would look like the hub's own events."""
        if received.origin == self._origin:
            raise UnusableMessage("it names the hub itself as its sender")

    def _tell_of_dead_letter(self, sender: AuthorizedSender, reason: str) -> None:
        """Report an unusable message of a known agent, at most once a minute for each agent."""
        name, now = (sender.scope, sender.relay), self._clock.monotonic()
        before = self._complained_at.get(name)
        if self.roster.agent(*name) is None:
            return
        if before is None or now - before >= COMPLAINT_INTERVAL:
            self._complained_at[name] = now
            if len(self._complained_at) > MAX_COMPLAINTS:
                del self._complained_at[next(iter(self._complained_at))]
            self._report(
                "relay.dead-lettered",
                f"a message of agent {sender.relay} of scope {sender.scope} cannot be used: "
                f"{reason}",
            )
