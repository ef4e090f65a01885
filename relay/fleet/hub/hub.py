"""The hub: it reads what agents publish, and hands it to the parts that merge and decide.

`HubLink` hands over the messages of agents (`Hub.take`). Each is checked first: who may have sent
it, and whether it can be read. `EventMerger` merges and records what reports and pulses say. Then
votes go to `MachineVotes`, and results of start orders to the `OrderPort`. A message is
acknowledged when what it said is on disk; a vote when it is taken, because the program that gave it
tries again without an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import NoReturn

from aiormq.abc import DeliveredMessage

from relay.amqp.connection import UnusableMessage
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.clock import Clock, TokenBuckets
from relay.errors import DeliveryError
from relay.events.build import Origin, RecordRelayEvent
from relay.events.cloudevent import CloudEvent
from relay.fleet.hub.link import HubLink
from relay.fleet.hub.merge import GoneFromDocument, Word, not_in_future
from relay.fleet.hub.merger import EventMerger, Heard
from relay.fleet.hub.roster import Agent, Roster
from relay.fleet.hub.start_orders import OrderPort
from relay.fleet.messages import (
    ChangeData,
    EndedData,
    Pulse,
    ReceivedMessage,
    StartResult,
    VoteMessage,
    read_message,
)
from relay.fleet.routing import (
    AuthorizedSender,
    agent_publish_exchange_name,
    command_key,
    verify_message_from_agent,
)
from relay.fleet.settings import HubSettings, TrustDomain
from relay.fleet.votes import MachineVotes
from relay.store.sqlite import Store

UPKEEP_INTERVAL = 5.0
"""Seconds between two looks at the agents."""
MAX_VOTES_AT_ONCE = 200
"""Votes that are decided at the same time. The others wait in the queue."""

_log = logging.getLogger(__name__)


class Hub:
    """What a hub does with the messages of its agents, with all parts that this needs.

    Call `load`, then `run`. ``submit`` is that of the gate. ``on_unusable`` counts and logs a
    message: its RabbitMQ user, and why it is unusable. ``on_agents_changed`` is called a few
    seconds after agents came or went.
    """

    def __init__(
        self,
        settings: HubSettings,
        origin: Origin,
        store: Store,
        clock: Clock,
        report: RecordRelayEvent,
        on_unusable: Callable[[str | None, str], None],
        submit: Callable[[DecisionRequest], Awaitable[DecisionAnswer]],
        on_agents_changed: Callable[[], None],
    ) -> None:
        self.reports = 0
        self.pulses = 0
        self.roster = Roster()
        self.link = HubLink(
            settings,
            origin,
            clock,
            report,
            self.take,
            is_saved=lambda: store.write_error is None,
            on_lost=self.roster.note_connection_lost,
        )
        self.merger = EventMerger(origin, store, clock, self.roster, self.link)
        self.orders = OrderPort(store, self.roster, self.merger, self.link, origin, clock)
        self._exchange = agent_publish_exchange_name(settings.exchange)
        self.domains: Sequence[TrustDomain] = settings.domains
        self._origin = origin
        self._store = store
        self._clock = clock
        self._began_at, self._began_monotonic = clock.now(), clock.monotonic()
        self._report = report
        self._on_unusable = on_unusable
        self._complaints = TokenBuckets(1 / 60, 1)
        self._on_agents_changed = on_agents_changed
        self._votes = MachineVotes(submit, clock)
        self._vote_slots = asyncio.Semaphore(MAX_VOTES_AT_ONCE)
        self._tasks: asyncio.TaskGroup

    async def load(self) -> None:
        for row in await self._store.read(lambda tx: tx.fleet.agents()):
            self.roster.put(Agent(**{name: getattr(row, name) for name in row.__slots__}))
        await self.merger.load()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            group.create_task(self.link.run(), name="hub: link")
            group.create_task(self.link.watch(), name="hub: source")
            group.create_task(self.merger.end_events_when_due(), name="hub: ends of events")
            group.create_task(self._keep_up(), name="hub: roster")

    # --- agents that come and go

    async def _keep_up(self) -> NoReturn:
        known: frozenset[tuple[str, str]] = frozenset()
        while True:
            await self._clock.sleep(UPKEEP_INTERVAL)
            await self._look_after()
            agents = frozenset((agent.scope, agent.relay) for agent in self.roster)
            if agents != known:
                known = agents
                self._on_agents_changed()

    async def _look_after(self) -> None:
        await self.link.acknowledge()  # what was only in memory may be on disk now
        now = self._clock.now()
        if await self.link.has_read_all() and self.roster.note_listening(now):
            self.merger.restart_end_waits()  # agents that disagree may have said what nobody heard
        completed, self.merger.completed = self.merger.completed, []
        # Azure has deleted the VMs of a Terminate. An agent that is heard again comes back.
        for event in completed:
            for agent in self.roster.agents_terminated_by(event.scope, event.event):
                await self.merger.forget_agent(agent)
        now = self._clock.now()
        for name, scope, reason, count in self.roster.news(now):
            self._report(name, reason, count=count, scope=scope)
        for agent in self.roster.agents_to_forget(now):
            await self.merger.forget_agent(agent)
        self.save_agents()

    def save_agents(self) -> None:
        if agents := self.roster.take_unsaved():
            done = self._store.submit(lambda tx: tx.fleet.save_agents(agents), fail_open=True)
            # asyncio logs an exception that nobody retrieves; the store has reported this one.
            done.add_done_callback(lambda done: done.cancelled() or done.exception())

    # --- messages of agents

    async def take(self, messages: Sequence[DeliveredMessage]) -> set[int]:
        """Merge and record. Return the delivery tags of messages that cannot be used."""
        heard: list[Heard] = []
        about_relays: list[CloudEvent] = []
        votes: list[tuple[AuthorizedSender, VoteMessage]] = []
        # A clock that is set back must not change the order of what agents say.
        elapsed = timedelta(seconds=self._clock.monotonic() - self._began_monotonic)
        now = max(self._clock.now(), self._began_at + elapsed)
        read = [(message.delivery_tag or 0, self._read(message)) for message in messages]
        for sender, received in (each for _, each in read if each is not None):
            match received.content:
                case CloudEvent() as event:
                    about_relays.append(event)
                case Pulse() | ChangeData() as content:
                    self.pulses += isinstance(content, Pulse)
                    self.reports += isinstance(content, ChangeData)
                    heard += _heard(sender, content, received.at, now)
                case VoteMessage() as vote:
                    votes.append((sender, vote))
                case StartResult() as result:
                    self.orders.on_result(sender, result)
        if heard or about_relays:
            await self.merger.merge(heard, about_relays)
        self.roster.note_documents(  # not before: what was before them in the queue can come again
            (each.scope, each.relay, each.seen) for each in heard if each.is_document
        )
        for sender, vote in votes:  # the event that it is about is recorded now
            await self._vote_slots.acquire()
            self._tasks.create_task(self._answer(sender, vote), name="hub: vote")
        return {tag for tag, each in read if each is None}

    async def _answer(self, sender: AuthorizedSender, vote: VoteMessage) -> None:
        try:
            answer = await self._votes.answer(sender, vote)
            if answer is not None:
                event = answer.to_event(self._origin, self._clock.now())
                await self.link.send(command_key(sender.scope, sender.relay), event)
        except DeliveryError as error:
            _log.warning(
                "whether agent %s of scope %s got the answer to its vote is not known: %s",
                sender.relay,
                sender.scope,
                error.reason,
            )
        except Exception:  # noqa: BLE001  # one vote must not stop the hub
            _log.exception("internal error: a vote was dropped")
        finally:
            self._vote_slots.release()

    def _read(self, message: DeliveredMessage) -> tuple[AuthorizedSender, ReceivedMessage] | None:
        sender: AuthorizedSender | None = None
        try:
            kind, sender = verify_message_from_agent(message, self._exchange, self.domains)
            received = read_message(message.body)
            received.require_sent_by(sender, kind, self._origin)
        except UnusableMessage as error:
            self._on_unusable(message.header.properties.user_id, str(error))
            if sender is not None:
                self._tell_of_dead_letter(sender, str(error))
            return None
        self.link.polls += 1
        pulse = received.content if isinstance(received.content, Pulse) else None
        self.roster.note_message(sender, received.origin.relay, self._clock.now(), pulse)
        return sender, received

    def _tell_of_dead_letter(self, sender: AuthorizedSender, reason: str) -> None:
        """Report an unusable message of a known agent, at most once a minute for each agent."""
        name = f"{sender.scope}/{sender.relay}"
        if self.roster.agent(sender.scope, sender.relay) is not None and not self._complaints.take(
            name, self._clock.monotonic()
        ):
            self._report(
                "relay.dead-lettered",
                f"a message of agent {sender.relay} of scope {sender.scope} cannot be used: "
                f"{reason}",
            )


def _heard(
    sender: AuthorizedSender, content: Pulse | ChangeData, at: datetime, now: datetime
) -> Iterator[Heard]:
    """Yield what it says of events: a pulse before its agent has read a document, nothing."""
    name = {"scope": sender.scope, "relay": sender.relay}
    if isinstance(content, Pulse):
        if content.live is None or content.poll_age is None:
            return
        events = [event.to_scheduled_event() for event in content.live]
        yield Heard(
            **name,
            seen=not_in_future(at - timedelta(seconds=content.poll_age), now),
            words={event.lowercase_event_id: event for event in events},
            is_document=True,
            incarnation=content.live[0].documentIncarnation if content.live else None,
        )
        return
    event = content.to_scheduled_event()
    word: Word = event
    if isinstance(content, EndedData):
        word = GoneFromDocument(
            rebooted=content.evidence == "rebooted", gap=content.outcome == "unknown"
        )
    yield Heard(
        **name,
        seen=not_in_future(at, now),
        words={event.lowercase_event_id: word},
        is_document=False,
        incarnation=content.documentIncarnation,
    )
