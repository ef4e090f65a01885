"""What chat sinks know of the relay: how events stand and what to show of them; and the way of an answer to the gate.

What a message shows follows from the store alone, never from the one event that made it necessary: a message that was
kept from being posted or edited for an hour is right with one call.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from relay.approvals.request import Caller, DecisionAnswer, DecisionKind, DecisionRequest, Rights
from relay.approvals.rules import Quorum, eligible_voters
from relay.approvals.service import ApprovalService
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Card, Link, Text
from relay.chat.cards.grouped_card import grouped_card
from relay.chat.cards.rendering import event_card, event_title, join_names, refresh_time
from relay.chat.cards.timeline import timeline_line
from relay.clock import Clock
from relay.events.cloudevent import CloudEvent
from relay.events.match import matches, matches_any
from relay.events.timestamps import parse_timestamp
from relay.outbox import Occurrence
from relay.outbox.chat_messages import ChatMessage
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction
from relay.sinks import SinkSettings

MAX_SEPARATE_MESSAGES = 5
"""Events that one document brings at once and that still get a message each; more share one."""
MAX_HISTORY_LINES = 20
"""Lines of history that are told at once: of more, the newest."""
MAX_PENDING_MESSAGES = 200
"""Messages that are not shown yet and whose links are remembered for the next try."""
Token = Callable[[int, str], str]
"""The token for a decision about an occurrence."""
_RIGHTS = Rights(frozenset({"read", "approve", "hold"}))


@dataclass(frozen=True, slots=True)
class MessageUpdate:
    """What is to be done about one message. ``card`` None: it shows already what it should.

    ``ref`` names the message; None: it is not posted yet (see ``posted``), or cannot be named. ``news`` are the lines that
    its thread does not tell yet; ``updated``: one of them says that Azure changed an event, so that old buttons are void.
    ``about`` says what the message is about, for lines that stand by themselves.
    """

    message: int
    subject: str
    ref: str | None
    posted: bool
    card: Card | None
    content_hash: str
    refresh_at: datetime | None
    history_lines: tuple[Text, ...]
    updated: bool
    history_position: int


class ChatBoard:
    """One for all chat sinks. Of answers it knows what to do once a gate is attached."""

    def __init__(
        self, store: Store, ledger: ApprovalService, clock: Clock, public_url: str | None
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._clock = clock
        self._public_url = public_url.rstrip("/") if public_url is not None else None
        self._known = _principals(ledger)
        self._submit: Callable[[DecisionRequest], Awaitable[DecisionAnswer]] | None = None
        self._tries: dict[
            int, tuple[str, Token]
        ] = {}  # by message: what is being tried to show, and its tokens

    def attach(self, submit: Callable[[DecisionRequest], Awaitable[DecisionAnswer]]) -> None:
        """From now on answers reach the gate."""
        self._submit = submit

    @property
    def public_url(self) -> str | None:
        """Where others reach this relay, without a slash at its end; None where the configuration does not say."""
        return self._public_url

    def caller(self, principal: str, channel: str) -> Caller | None:
        """Who answers; None for a stranger: one whom no rule, group or person of ``approvals`` names."""
        return Caller(principal, channel, _RIGHTS) if principal in self._known else None

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
        """Hand an answer to the gate; on disk when this returns. ``request_id`` makes the same click known again."""
        if self._submit is None:
            return DecisionAnswer(
                503,
                {
                    "detail": "the relay is starting or stopping: nothing can be decided now, try again"
                },
            )
        asked = "\n".join((event_id.lower(), decision, revision, reason or ""))
        return await self._submit(
            DecisionRequest(
                caller,
                event_id,
                decision,
                revision,
                self._clock.now(),
                reason,
                request_id=request_id,
                digest=hashlib.sha256(asked.encode("utf-8", "surrogateescape")).hexdigest(),
            )
        )

    async def live_statuses(self, sink: SinkSettings) -> list[ApprovalStatus]:
        """How every event of the document stands now that a sink's conditions fit. Raises StoreUnavailable."""
        scope = self._ledger.origin.scope

        def work(tx: Transaction) -> list[ApprovalStatus]:
            return [
                self._standing(tx, one)
                for one in tx.snapshot.live()
                if matches(sink.match, one.data, scope, every=False)
            ]

        return await self._store.read(work)

    async def event_status(
        self, sink: SinkSettings, event_id: str, *, in_chat: bool
    ) -> Card | None:
        """An event of the document as it stands, for one person alone; its links are new ones of the message about it.

        None: it is in the document no more. Raises StoreUnavailable.
        """
        token = _once_each()

        def work(tx: Transaction) -> Card | None:
            occurrence = tx.snapshot.find(event_id.lower())
            if occurrence is None or not occurrence.live:
                return None
            message = tx.messages.showing(sink.name, occurrence.id)
            link = self._link(tx, message, token, in_chat=in_chat)
            return self._card(
                [self._standing(tx, occurrence)], message.code if message is not None else "", link
            )

        return await self._store.transact(work)

    async def shown_in(self, sink: str, ref: str, event_id: str) -> ApprovalStatus | None:
        """How an event stands, if the message that a platform names so is one of this sink and about it. Raises StoreUnavailable."""

        def work(tx: Transaction) -> ApprovalStatus | None:
            occurrence = tx.snapshot.find(event_id.lower())
            if occurrence is None or not tx.messages.shows(sink, ref, occurrence.id):
                return None
            return self._standing(tx, occurrence)

        return await self._store.read(work)

    async def plan_update(
        self, sink: SinkSettings, event: CloudEvent, *, in_chat: bool
    ) -> MessageUpdate | None:
        """What is to be done in a sink about the message that an event belongs to; None: nothing, it shows all there is.

        ``in_chat``: decisions are taken in the chat itself, not behind links. Raises StoreUnavailable.
        """
        code, tries = f"{secrets.randbelow(10**6):06d}", _Try(self._tries)
        return await self._store.transact(
            lambda tx: self._look(tx, sink, event, code, tries, in_chat=in_chat), fail_open=True
        )

    async def mark_shown(self, notice: MessageUpdate, ref: str | None) -> None:
        """The message is over there and shows the notice's card. Raises StoreUnavailable."""

        def work(tx: Transaction) -> None:
            self._tries.pop(notice.message, None)  # here, as the store's thread alone touches them
            tx.messages.mark_shown(notice.message, ref, notice.content_hash)

        await self._store.transact(work, fail_open=True)

    async def mark_history_told(self, notice: MessageUpdate) -> None:
        """The thread tells the notice's news. Raises StoreUnavailable."""
        await self._store.transact(
            lambda tx: tx.messages.mark_history_told(
                notice.message, notice.history_position, notice.refresh_at
            ),
            fail_open=True,
        )

    async def next_refresh(self, sink: str) -> datetime | None:
        """When time alone will change what a message of a sink should show. Raises StoreUnavailable."""
        return parse_timestamp(await self._store.read(lambda tx: tx.messages.next_refresh(sink)))

    async def refresh(self, sink: str) -> None:
        """Have every message of a sink looked at that time alone has changed, through the outbox. Raises StoreUnavailable."""
        now = self._clock.now()

        def work(tx: Transaction) -> None:
            for one in tx.messages.take_due_refreshes(sink, now):
                occurrence = tx.snapshot.by_id(one)
                position = tx.journal.last_change_position(occurrence.key)
                if position is not None:
                    tx.redeliver(position, sink, now)

        await self._store.transact(work, fail_open=True)

    def _look(
        self,
        tx: Transaction,
        sink: SinkSettings,
        event: CloudEvent,
        code: str,
        this: _Try,
        *,
        in_chat: bool,
    ) -> MessageUpdate | None:
        at = parse_timestamp(event.attributes["time"])
        occurrence = tx.snapshot.at((event.subject or "").lower(), at) if at is not None else None
        if occurrence is None:
            return None
        message = tx.messages.showing(sink.name, occurrence.id) or self._begin(
            tx, sink, occurrence, code
        )
        if (
            message.content_hash is not None
            and tx.journal.newest_position(occurrence.key) <= message.history_position
        ):
            return None  # what is delivered now, an earlier delivery has told already
        standings = [
            self._standing(tx, tx.snapshot.by_id(one))
            for one in tx.messages.occurrences(message.id)
        ]

        can_be_answered = in_chat or self._public_url is not None
        looks = _digest(
            self._card(
                standings,
                message.code,
                (lambda _, __: None if in_chat else "") if can_be_answered else None,
            )
        )
        news = self._news(tx, sink, message, [one.occurrence for one in standings])
        return MessageUpdate(
            message.id,
            _about(standings),
            message.ref,
            message.posted,
            self._card(
                standings,
                message.code,
                self._link(tx, message, this.tokens(message.id, looks), in_chat=in_chat),
            )
            if looks != message.content_hash
            else None,
            looks,
            refresh_time(standings),
            _lines(news, len(standings)),
            any(event.name == "event.updated" for _, event in news),
            tx.head().position,
        )

    def _link(
        self, tx: Transaction, message: ChatMessage | None, token: Token, *, in_chat: bool
    ) -> Link | None:
        """Where the buttons of a message lead; None: nothing can be decided from it."""
        if in_chat:
            return lambda _, __: None
        if message is None or self._public_url is None:
            return None

        def link(standing: ApprovalStatus, choice: DecisionKind) -> str:
            made = token(standing.occurrence.id, choice)
            tx.messages.add_link(
                message.id,
                made,
                standing.occurrence.id,
                standing.occurrence.revision,
                choice,
                standing.now,
            )
            return f"{self._public_url}/approve#{made}"

        return link

    def _begin(
        self, tx: Transaction, sink: SinkSettings, occurrence: Occurrence, code: str
    ) -> ChatMessage:
        """A message for an event that has none: with the others of its document, where they are many."""
        together = [
            one
            for one in tx.snapshot.seen_together(occurrence)
            if one.id == occurrence.id
            or (tx.messages.showing(sink.name, one.id) is None and self._wants(sink, one))
        ]
        chosen = together if len(together) > MAX_SEPARATE_MESSAGES else [occurrence]
        began = min(tx.journal.first_position(one.key, one.first_seen) for one in chosen)
        for one in chosen:
            self._finish(tx, sink, one)
        tx.messages.begin(sink.name, [one.id for one in chosen], code, began - 1)
        message = tx.messages.showing(sink.name, occurrence.id)
        assert message is not None  # noqa: S101  # it was just begun
        return message

    def _finish(self, tx: Transaction, sink: SinkSettings, occurrence: Occurrence) -> None:
        """Have the message about an earlier event of this name show its end: what is told now may have taken the place of that."""
        found = tx.messages.previous_occurrence(sink.name, occurrence.key, occurrence.number)
        shown = tx.messages.showing(sink.name, found) if found is not None else None
        if found is None or shown is None or not shown.posted:
            return
        again = tx.snapshot.after(tx.snapshot.by_id(found)) or occurrence
        end = tx.journal.last_change_position(occurrence.key, again.first_seen)
        if end is not None and end > shown.history_position:
            tx.redeliver(end, sink.name, self._clock.now())

    def _wants(self, sink: SinkSettings, occurrence: Occurrence) -> bool:
        return matches_any(sink.events, "event.scheduled") and matches(
            sink.match, occurrence.data, self._ledger.origin.scope, every=False
        )

    def _standing(self, tx: Transaction, occurrence: Occurrence) -> ApprovalStatus:
        return self._ledger.status(tx, occurrence, self._clock.now())

    def _card(self, standings: Sequence[ApprovalStatus], code: str, link: Link | None) -> Card:
        scope = self._ledger.origin.scope
        if len(standings) == 1:
            return event_card(standings[0], scope, link=link, code=code)
        return grouped_card(standings, scope, link=link, code=code)

    def _news(
        self,
        tx: Transaction,
        sink: SinkSettings,
        message: ChatMessage,
        occurrences: Sequence[Occurrence],
    ) -> list[tuple[Occurrence, CloudEvent]]:
        """What its thread does not tell yet. That an event was announced, the message itself tells."""
        by_key, news = {one.key: one for one in occurrences}, []
        for _, event in tx.journal.events_about(list(by_key), message.history_position):
            at, occurrence = (
                parse_timestamp(event.attributes["time"]),
                by_key[(event.subject or "").lower()],
            )
            ours = at is not None and tx.snapshot.at(occurrence.key, at) == occurrence
            if ours and event.name != "event.scheduled" and matches_any(sink.events, event.name):
                news.append((occurrence, event))
        return news


def _about(standings: Sequence[ApprovalStatus]) -> str:
    """A heading that tells events of the same machines apart."""
    if len(standings) > 1:
        return f"{len(standings)} maintenance events"
    return f"{event_title(standings[0])} ({standings[0].occurrence.event.event_id[:8]})"


def _lines(news: Sequence[tuple[Occurrence, CloudEvent]], events: int) -> tuple[Text, ...]:
    """As the thread has them; of a burst, each says which event it is about."""
    lines: list[Text] = []
    for occurrence, event in news[-MAX_HISTORY_LINES:]:
        about = (f"{join_names(occurrence.event.resources, most=3)}: ",) if events > 1 else ()
        lines.append((*about, *timeline_line(event)))
    before = len(news) - len(lines)
    return (
        ((f"… {before} more happened before: “imds-relay show” tells all.",), *lines)
        if before
        else tuple(lines)
    )


def _principals(ledger: ApprovalService) -> frozenset[str]:
    """Everybody whom rules, groups and people name."""
    settings = ledger.settings
    asked = [rule.approve for rule in settings.rules if isinstance(rule.approve, Quorum)]
    named_ = {
        one for asks in asked for one in eligible_voters(asks, settings.groups, settings.people)
    }
    members = {
        one for group in settings.groups.values() for one in group if not one.startswith("person:")
    }
    return frozenset(
        named_ | members | {one for principals in settings.people.values() for one in principals}
    )


class _Try:
    """The tokens of one look.

    What is tried again as it was has the same links: else those of tries that fail for hours would push out the ones that
    people see. And the store may run the work again, on the file what was done in memory.
    """

    def __init__(self, tries: dict[int, tuple[str, Token]]) -> None:
        self._tries = tries
        self._token: Token | None = None

    def tokens(self, message: int, looks: str) -> Token:
        """Makes the tokens of a message that is to look like that."""
        if self._token is None:
            before = self._tries.get(message)
            self._token = before[1] if before is not None and before[0] == looks else _once_each()
            self._tries[message] = looks, self._token
            while len(self._tries) > MAX_PENDING_MESSAGES:
                del self._tries[next(iter(self._tries))]
        return self._token


def _once_each() -> Token:
    """Makes a token for each event and decision: the same again, should the store run the work again."""
    made: dict[tuple[int, str], str] = {}

    def token(occurrence: int, decision: str) -> str:
        return made.setdefault((occurrence, decision), secrets.token_urlsafe(32))

    return token


def _digest(card: Card) -> str:
    return hashlib.sha256(repr(card).encode()).hexdigest()
