"""What a chat platform may use of the relay: `ChatContext`, the third argument of its ``connect``.

A `MessagePlanner` plans the update of a message from the store, and records what the message shows.
`relay.chat.live_message` asks for a plan at each delivery, calls the platform, and reports what
succeeded. What a message should show follows from the store alone, never from the event that is
delivered. So a message that could not be posted or edited for an hour is correct after one call.

A message shows occurrences: stays of EventIds in Azure's document. Its card is their present state.
Its thread gets what the journal records about them, up to the ``history_position`` of the message.
Methods that write use ``fail_open``: a message must reach people while the state file cannot be
written.

A platform proves who decided. It asks `ChatDecisionSubmitter.caller` for the caller of that
principal, and passes the caller to `decide`. The gate authorizes the decision like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain

from relay.approvals import ApprovalsSettings
from relay.approvals.engine import ApprovalEngine
from relay.approvals.principals import is_chat_principal
from relay.approvals.request import (
    Caller,
    DecisionAnswer,
    DecisionKind,
    DecisionRequest,
    Right,
    Rights,
)
from relay.approvals.rules import Quorum, clients_of_same_person
from relay.approvals.status import ApprovalStatus
from relay.chat import AnswerableChatSettings
from relay.chat.cards import event_card, grouped_card
from relay.chat.cards.card import Buttons, Card
from relay.chat.cards.wording import (
    follow_up_subject,
    history_lines,
    next_refresh_time,
    voting_closed_lines,
)
from relay.clock import Clock
from relay.events.cloudevent import CloudEvent
from relay.events.data_types import NO_REMARKS
from relay.events.match import matches, matches_any_pattern
from relay.events.timestamps import parse_timestamp
from relay.sentences import Text, missing_votes_reminder_text
from relay.sinks import SinkSettings
from relay.store import TrackedEvent
from relay.store.chat_messages import ChatMessage
from relay.store.rows import PageLimit
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

Submit = Callable[[DecisionRequest], Awaitable[DecisionAnswer]]
MAX_SEPARATE_MESSAGES = 5
"""Events that appear in the document together and get a message each; more share a message."""
MAX_UNPOSTED_EVENTS = 200
"""Events that are read for one reply in a thread, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageUpdate:
    """What to do about one message.

    ``message`` is as it was. Its ``ref`` is None before it is posted, or if it cannot be edited.
    ``history_lines`` are what happened and the thread does not tell yet, oldest first. ``subject``
    is their heading where there is no thread. ``is_event_changed``: Azure changed an event since
    the thread was told, so that older buttons are void; it can have, if the history is too long to
    be read.
    """

    message: ChatMessage
    card: Card | None
    content_hash: str
    refresh_at: datetime | None
    subject: str
    history_lines: tuple[Text, ...]
    history_position: int
    is_event_changed: bool


@dataclass(frozen=True, slots=True)
class MessagePlanner:
    """Knows which message of a sink shows which events. Its coroutines raise StoreUnavailable.

    Links lead to ``public_url``; None: there are none.
    """

    store: Store
    approvals: ApprovalEngine
    clock: Clock
    public_url: str | None

    async def plan_update(
        self, sink: SinkSettings, event: CloudEvent, *, in_chat: bool
    ) -> MessageUpdate | None:
        """Return the update of the message that an event belongs to, which begins if there is none.

        None if it is up to date, or the event is not known any more. ``in_chat``: of the sink.
        """

        def work(tx: Transaction) -> MessageUpdate | None:
            occurrence = _find_occurrence_at_event_time(tx, event)
            if occurrence is None:
                return None
            message = tx.messages.find(sink.name, occurrence.id)
            if message is None:
                message = _begin_message(tx, sink, occurrence)
            elif (
                message.is_posted
                and not message.is_due
                and (tx.journal.last_position_about(occurrence.key) or 0)
                <= message.history_position
            ):  # an earlier delivery told everything that is recorded about the event
                return None
            return self._plan_message(tx, sink, message, in_chat=in_chat)

        return await self.store.transact(work, fail_open=True)

    async def mark_shown(self, update: MessageUpdate, ref: str | None) -> None:
        """Record that the message, ``ref`` now, shows the card. No refresh is due then."""
        await self.store.transact(
            lambda tx: tx.messages.mark_shown(update.message, ref, update.content_hash),
            fail_open=True,
        )

    async def mark_history_told(self, update: MessageUpdate) -> None:
        """Record that the thread has the lines of an update, and when to refresh the message."""
        position, refresh_at = update.history_position, update.refresh_at
        await self.store.transact(
            lambda tx: tx.messages.mark_history_told(update.message, position, refresh_at),
            fail_open=True,
        )

    async def enqueue_due_refreshes(self, sink: str) -> None:
        now = self.clock.now()

        def work(tx: Transaction) -> None:
            for occurrence_id in tx.messages.take_occurrences_due_for_refresh(sink, now):
                occurrence = tx.occurrences.require_occurrence(occurrence_id)
                position = tx.journal.last_change_of(occurrence.key)
                if position is not None:
                    tx.deliver_again(position, sink, now)

        await self.store.transact(work, fail_open=True)

    async def live_statuses(self, sink: SinkSettings) -> list[ApprovalStatus]:
        def work(tx: Transaction) -> list[ApprovalStatus]:
            now = self.clock.now()
            return [
                self.approvals.status(tx, occurrence, now)
                for occurrence in tx.occurrences.live_occurrences()
                if _is_wanted(sink, occurrence)
            ]

        return await self.store.read(work)

    async def find_status_of_shown_event(
        self, sink: str, ref: str, reference: str
    ) -> ApprovalStatus | None:
        """Return the status of an event that a message shows; None if this message does not.

        ``ref`` is the platform's name of the message, ``reference`` that of the event in a button.
        """

        def work(tx: Transaction) -> ApprovalStatus | None:
            for occurrence in tx.occurrences.find_occurrences_by_reference(reference):
                if tx.messages.shows_occurrence(sink, ref, occurrence.id):
                    return self.approvals.status(tx, occurrence, self.clock.now())
            return None

        return await self.store.read(work)

    def _plan_message(
        self, tx: Transaction, sink: SinkSettings, message: ChatMessage, *, in_chat: bool
    ) -> MessageUpdate:
        occurrences = [
            tx.occurrences.require_occurrence(occurrence_id)
            for occurrence_id in tx.messages.occurrences_of_message(message.id)
        ]
        now = self.clock.now()
        statuses = [self.approvals.status(tx, occurrence, now) for occurrence in occurrences]

        buttons = Buttons.of_sink(sink, self.public_url, in_chat=in_chat)
        if len(statuses) == 1:
            shown = event_card(statuses[0], buttons)
        else:
            shown = grouped_card(statuses, buttons)
        content_hash = hashlib.sha256(repr(shown).encode()).hexdigest()
        card = shown if content_hash != message.content_hash else None
        history, is_cut = _untold_history(tx, sink, message, occurrences)
        if card is not None and not message.is_posted:
            card, history = _fold_reminders_into_card(card, history)
        lines = history_lines(history, is_grouped=len(statuses) > 1, is_cut=is_cut)
        # A message that cannot be edited goes on asking for votes after voting has closed.
        tells_of_votes = matches_any_pattern(sink.events, "approval.recorded")
        if tells_of_votes and message.is_posted and message.ref is None and len(statuses) == 1:
            lines += voting_closed_lines(statuses[0], since=message.refresh_at)
        return MessageUpdate(
            message=message,
            subject=follow_up_subject(statuses),
            card=card,
            content_hash=content_hash,
            refresh_at=next_refresh_time(statuses),
            history_lines=lines,
            is_event_changed=is_cut or any(about.name == "event.updated" for _, about in history),
            history_position=tx.head().position,
        )


def _begin_message(tx: Transaction, sink: SinkSettings, occurrence: TrackedEvent) -> ChatMessage:
    """Create the message, also about events that appeared with it and have none, if many."""
    together = [
        other
        for other in tx.occurrences.first_seen_with(occurrence)
        if other.id == occurrence.id
        or (
            matches_any_pattern(sink.events, "event.scheduled")
            and _is_wanted(sink, other)
            and tx.messages.find(sink.name, other.id) is None
        )
    ]
    shown = together if len(together) > MAX_SEPARATE_MESSAGES else [occurrence]
    tx.messages.begin(
        sink.name,
        [other.id for other in shown],
        history_position=min(other.position for other in shown) - 1,
    )
    message = tx.messages.find(sink.name, occurrence.id)
    assert message is not None  # noqa: S101  # it was created just now
    return message


def _is_wanted(sink: SinkSettings, occurrence: TrackedEvent) -> bool:
    return matches(sink.match, occurrence.data, occurrence.scope, every_resource=False)


def _find_occurrence_at_event_time(tx: Transaction, event: CloudEvent) -> TrackedEvent | None:
    at = parse_timestamp(event.attributes["time"])
    key = tx.keys.make_key(event.scope, event.subject or "")
    return tx.occurrences.find_occurrence_at_time(key, at) if at is not None else None


def _fold_reminders_into_card(
    card: Card, history: list[tuple[TrackedEvent, CloudEvent]]
) -> tuple[Card, list[tuple[TrackedEvent, CloudEvent]]]:
    """Let a message that is posted now say that it reminds: a pager has no threads."""
    reminders = [event for _, event in history if event.name == "approval.reminder"]
    if not reminders:
        return card, history
    notes = (missing_votes_reminder_text(reminders[-1].data), *card.notes)
    left = [(about, event) for about, event in history if event.name != "approval.reminder"]
    return replace(card, notes=notes), left


def _untold_history(
    tx: Transaction, sink: SinkSettings, message: ChatMessage, occurrences: Sequence[TrackedEvent]
) -> tuple[list[tuple[TrackedEvent, CloudEvent]], bool]:
    """Return the newest events that the thread lacks, but ``event.scheduled``; True: more."""
    history = []
    by_key = {occurrence.key: occurrence for occurrence in occurrences}
    events, is_cut = tx.journal.events_about(
        list(by_key), message.history_position, PageLimit(MAX_UNPOSTED_EVENTS)
    )
    for event in events:
        if event.name == "event.scheduled" or not matches_any_pattern(sink.events, event.name):
            continue
        occurrence = _find_occurrence_at_event_time(tx, event)
        if occurrence is not None and by_key[occurrence.key] == occurrence:
            history.append((occurrence, event))
    return history, is_cut


# --- decisions


class ChatDecisionSubmitter:
    """Takes the decisions of chats, and passes them to ``submit`` of the gate.

    A caller has what ``can`` and ``resources`` of the sink allow. If ``approvals.people`` says that
    the person also has clients (``client:``, ``mtls:``), each of these limits the caller further.
    """

    def __init__(
        self,
        settings: ApprovalsSettings,
        clock: Clock,
        rights_by_client: Mapping[str, Rights],
        submit: Submit,
    ) -> None:
        self._clock = clock
        self._submit = submit
        self._people = settings.people
        self._rights_by_client = rights_by_client
        rules = [rule.approve for rule in settings.rules]
        voters = [approve.from_ for approve in rules if isinstance(approve, Quorum)]
        named = chain(*voters, *settings.groups.values(), *settings.people.values())
        self._principals = frozenset(filter(is_chat_principal, named))
        """Every chat principal that a rule, a group or a person names."""

    def caller(self, principal: str, sink: AnswerableChatSettings) -> Caller | None:
        """Return the caller for a principal that a chat vouches for.

        None if no rule, group or person of ``approvals`` names it, or if it is not of a form that
        a chat platform declared. If all clients of the person have the same patterns, these are
        ``resources`` of the rights: others may cover the rest of the event where the rule says
        ``each_resource``. Every other list of patterns is a limit.
        """
        if principal not in self._principals:
            return None
        of_clients = [
            self._rights_by_client[client]
            for client in clients_of_same_person(principal, self._people)
        ]
        can = frozenset[Right](sink.can).intersection(*(rights.can for rights in of_clients))
        limits = {rights.resources for rights in of_clients if rights.resources is not None}
        resources = limits.pop() if len(limits) == 1 else None
        if sink.resources is not None:
            limits.add(sink.resources)
        return Caller(principal, sink.kind, Rights(can, resources, tuple(limits)))

    async def decide(
        self,
        caller: Caller,
        *,
        event_id: str,
        decision: DecisionKind,
        revision: str,
        request_id: str,
        reason: str | None = None,
    ) -> DecisionAnswer:
        """Submit a decision to the gate. An accepted decision is on disk when this returns.

        ``event_id`` is a `TrackedEvent.reference`, and ``revision`` the state that the person saw.
        ``request_id`` identifies the click, so that a repeated call counts once.
        """
        content = "\n".join((event_id.lower(), decision, revision, reason or ""))
        request = DecisionRequest(
            caller=caller,
            event_id=event_id,
            decision=decision,
            revision=revision,
            at=self._clock.now(),
            remarks={**NO_REMARKS, "reason": reason},
            request_id=request_id,
            digest=hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest(),
        )
        return await self._submit(request)


class ChatContext:
    """What a chat platform may use of the relay. Sinks share it.

    ``public_url`` is where others reach this relay, without a slash at its end; None if unknown.
    """

    def __init__(
        self,
        store: Store,
        approvals: ApprovalEngine,
        clock: Clock,
        public_url: str | None,
        submit: Submit,
        rights_by_client: Mapping[str, Rights],
    ) -> None:
        self.public_url = public_url.rstrip("/") if public_url is not None else None
        self.messages = MessagePlanner(store, approvals, clock, self.public_url)
        self.decisions = ChatDecisionSubmitter(approvals.settings, clock, rights_by_client, submit)
