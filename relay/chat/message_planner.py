"""Plans the update of a chat message from the store, and records what the message shows.

`relay.chat.live_message` asks for a plan at each delivery, calls the platform, and reports what
succeeded. What a message should show follows from the store alone, never from the event that is
delivered. So a message that could not be posted or edited for an hour is correct after one call.

A message shows occurrences: stays of EventIds in Azure's document. Its card is their present state.
Its thread gets what the journal records about them, up to the ``history_position`` of the message.
Methods that write use ``fail_open``: a message must reach people while the state file cannot be
written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from relay.approvals.engine import ApprovalEngine
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Buttons, Card
from relay.chat.cards.event_card import event_card, grouped_card
from relay.chat.cards.wording import (
    follow_up_subject,
    history_lines,
    next_refresh_time,
    voting_closed_lines,
)
from relay.clock import Clock
from relay.events.cloudevent import CloudEvent
from relay.events.match import matches, matches_any_pattern
from relay.events.timestamps import parse_timestamp
from relay.sentences import Text, missing_votes_reminder_text
from relay.sinks import SinkSettings
from relay.store import TrackedEvent
from relay.store.chat_messages import ChatMessage
from relay.store.rows import PageLimit
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

MAX_SEPARATE_MESSAGES = 5
"""Events that appear in the document together and get a message each; more share a message."""
MAX_UNPOSTED_EVENTS = 200
"""Events that are read for one reply in a thread, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageUpdate:
    """What to do about one message."""

    message: ChatMessage
    """As it was. Its ``ref`` is None before it is posted, or if it cannot be edited."""
    card: Card | None
    content_hash: str
    refresh_at: datetime | None
    subject: str
    """The heading of ``history_lines`` where there is no thread."""
    history_lines: tuple[Text, ...]
    """What happened and the thread does not tell yet, oldest first."""
    history_position: int
    is_event_changed: bool
    """Whether Azure changed an event since the thread was told, so that older buttons are void.

    It can have, if the history is too long to be read.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePlanner:
    """Knows which message of a sink shows which events. Its coroutines raise StoreUnavailable."""

    store: Store
    approvals: ApprovalEngine
    clock: Clock
    public_url: str | None
    """Where links lead, without a slash at its end; None: there are none."""

    async def plan_update(
        self, sink: SinkSettings, event: CloudEvent, *, in_chat: bool
    ) -> MessageUpdate | None:
        """Return the update of the message that an event belongs to.

        None if that message is up to date, or if the store does not know the event any more.
        Creates the message if there is none. ``in_chat`` is that of the sink.
        """

        def work(tx: Transaction) -> MessageUpdate | None:
            occurrence = _find_occurrence_at_event_time(tx, event)
            if occurrence is None:
                return None
            message = tx.messages.find(sink.name, occurrence.id)
            if message is None:
                message = self._create_message_row_for_event(tx, sink, occurrence)
            elif (
                message.is_posted
                and not message.is_due
                and tx.journal.range_about(occurrence.key)[1] <= message.history_position
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
        """Return the status of an event that a message shows.

        ``reference`` is that of a button (`TrackedEvent.reference`). ``ref`` is the platform's name
        of the message. None if the message is not of this sink or not about this event.
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

    def _create_message_row_for_event(
        self, tx: Transaction, sink: SinkSettings, occurrence: TrackedEvent
    ) -> ChatMessage:
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
        occurrence_ids = [other.id for other in shown]
        tx.messages.begin(
            sink.name, occurrence_ids, history_position=min(other.position for other in shown) - 1
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
