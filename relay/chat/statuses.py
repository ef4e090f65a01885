"""Reads the approval status of events for the chats, from the store alone."""

from __future__ import annotations

import secrets

from relay.approvals.service import ApprovalService
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Card
from relay.chat.cards.rendering import event_card
from relay.chat.links import ConfirmationLinks
from relay.clock import Clock
from relay.events.match import matches
from relay.outbox import Occurrence
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction
from relay.sinks import SinkSettings


class EventStatuses:
    """Answers what a platform may ask about events. Its coroutines raise StoreUnavailable."""

    def __init__(
        self, store: Store, approvals: ApprovalService, clock: Clock, links: ConfirmationLinks
    ) -> None:
        self.scope = approvals.origin.scope
        self._store = store
        self._approvals = approvals
        self._clock = clock
        self._links = links

    def read(self, tx: Transaction, occurrence: Occurrence) -> ApprovalStatus:
        """Return the status of an occurrence now."""
        return self._approvals.status(tx, occurrence, self._clock.now())

    async def live_statuses(self, sink: SinkSettings) -> list[ApprovalStatus]:
        """Return the status of every event in the document that matches a sink's conditions."""

        def work(tx: Transaction) -> list[ApprovalStatus]:
            return [
                self.read(tx, occurrence)
                for occurrence in tx.snapshot.live()
                if matches(sink.match, occurrence.data, self.scope, every=False)
            ]

        return await self._store.read(work)

    async def shown_in(self, sink: str, ref: str, event_id: str) -> ApprovalStatus | None:
        """Return the status of an event that a message shows.

        ``ref`` is the platform's name of the message. None if the message is not of this sink or
        not about this event.
        """

        def work(tx: Transaction) -> ApprovalStatus | None:
            occurrence = tx.snapshot.find(event_id.lower())
            if occurrence is None or not tx.messages.shows(sink, ref, occurrence.id):
                return None
            return self.read(tx, occurrence)

        return await self._store.read(work)

    async def private_card(
        self, sink: SinkSettings, event_id: str, *, in_chat: bool
    ) -> Card | None:
        """Return the card of an event for one person, with new links.

        None if the event is not in the document.
        """
        nonce = secrets.token_hex()

        def work(tx: Transaction) -> Card | None:
            occurrence = tx.snapshot.find(event_id.lower())
            if occurrence is None or not occurrence.live:
                return None
            message = tx.messages.find(sink.name, occurrence.id)
            link = self._links.recorded(tx, message, nonce=nonce, in_chat=in_chat)
            code = message.code if message is not None else None
            return event_card(self.read(tx, occurrence), self.scope, link=link, code=code)

        return await self._store.transact(work)
