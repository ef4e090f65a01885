"""What the relay hands to each chat platform: `ChatContext`.

A platform proves who decided. `ChatDecisionSubmitter.caller` accepts only principals that a rule,
group or person names, with the rights that the sink and the person's clients leave. The gate then
authorizes the decision like any other.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
from relay.approvals.rules import Quorum, client_principals_of_same_person
from relay.approvals.status import ApprovalStatus
from relay.chat import AnswerableChatSettings
from relay.chat.cards.buttons import keep_usable_buttons
from relay.chat.cards.card import Card
from relay.chat.cards.event_card import event_card
from relay.chat.links import ConfirmationLinks
from relay.chat.message_planner import MessagePlanner
from relay.clock import Clock
from relay.events.match import matches
from relay.outbox import TrackedEvent
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction
from relay.sinks import SinkSettings

Submit = Callable[[DecisionRequest], Awaitable[DecisionAnswer]]


class ChatDecisionSubmitter:
    """Takes decisions from all chats. It answers 503 until a gate is attached."""

    def __init__(
        self, settings: ApprovalsSettings, clock: Clock, rights_by_client: Mapping[str, Rights]
    ) -> None:
        self._clock = clock
        self._submit: Submit | None = None
        self._issued: dict[Caller, AnswerableChatSettings] = {}
        """Every caller that was returned, with its sink: no more than there are principals."""
        self._outdated: frozenset[Caller] = frozenset()
        """Those that would be others by the settings of now."""
        self.use_callers(settings, rights_by_client)

    def use_callers(
        self, settings: ApprovalsSettings, rights_by_client: Mapping[str, Rights]
    ) -> None:
        """Take callers and their rights from these settings from now on."""
        self._people = settings.people
        self._rights_by_client = rights_by_client
        self._principals = _named_chat_principals(settings)
        self._outdated = frozenset(
            caller
            for caller, sink in self._issued.items()
            if self._make_caller(caller.principal, sink) != caller
        )

    def attach_gate(self, submit: Submit) -> None:
        """From now on decisions reach the gate."""
        self._submit = submit

    def detach_gate(self) -> None:
        """From now on nothing is decided: the sink leaves."""
        self._submit = None

    def caller(self, principal: str, sink: AnswerableChatSettings) -> Caller | None:
        """Return the caller for a principal that a chat vouches for.

        None if no rule, group or person of ``approvals`` names it, or if it is not of a form that
        a chat platform declared.
        """
        caller = self._make_caller(principal, sink)
        if caller is not None:
            self._issued[caller] = sink
        return caller

    def _make_caller(self, principal: str, sink: AnswerableChatSettings) -> Caller | None:
        if principal not in self._principals:
            return None
        return Caller(principal, sink.kind, self._limited_rights(principal, sink))

    def _limited_rights(self, principal: str, sink: AnswerableChatSettings) -> Rights:
        """Return what the sink and every client of the person allow."""
        of_clients = [
            self._rights_by_client[client]
            for client in client_principals_of_same_person(principal, self._people)
        ]
        can = frozenset[Right](sink.can).intersection(*(rights.can for rights in of_clients))
        resources = {rights.resources for rights in of_clients if rights.resources is not None}
        limits = {sink.resources} if sink.resources is not None else set()
        if len(resources) == 1:
            return Rights(can, resources.pop(), tuple(limits))
        return Rights(can, limits=tuple(resources | limits))

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

        ``request_id`` identifies the click, so that a repeated call counts once.
        """
        if self._submit is None:
            detail = "the relay is starting or stopping: nothing can be decided now, try again"
            return DecisionAnswer(503, {"detail": detail})
        if caller in self._outdated:
            detail = "the configuration has just changed: nothing was decided, try again"
            return DecisionAnswer(503, {"detail": detail})
        content = "\n".join((event_id.lower(), decision, revision, reason or ""))
        request = DecisionRequest(
            caller=caller,
            event_id=event_id,
            decision=decision,
            revision=revision,
            at=self._clock.now(),
            reason=reason,
            request_id=request_id,
            digest=hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest(),
        )
        return await self._submit(request)


def _named_chat_principals(settings: ApprovalsSettings) -> frozenset[str]:
    """Return every chat principal that a rule, a group or a person names."""
    voters = [rule.approve.from_ for rule in settings.rules if isinstance(rule.approve, Quorum)]
    return frozenset(
        principal
        for principals in (*voters, *settings.groups.values(), *settings.people.values())
        for principal in principals
        if is_chat_principal(principal)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStatusReader:
    """Answers what a platform may ask about events. Its coroutines raise StoreUnavailable."""

    store: Store
    approvals: ApprovalEngine
    clock: Clock
    links: ConfirmationLinks

    async def live_statuses(self, sink: SinkSettings) -> list[ApprovalStatus]:
        """Return the status of every event in the document that matches a sink's conditions."""

        def work(tx: Transaction) -> list[ApprovalStatus]:
            now = self.clock.now()
            return [
                self.approvals.status(tx, occurrence, now)
                for occurrence in tx.snapshot.live_occurrences()
                if matches(sink.match, occurrence.data, occurrence.scope, every_resource=False)
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
            for occurrence in tx.snapshot.find_occurrences_by_reference(reference):
                if tx.messages.shows_occurrence(sink, ref, occurrence.id):
                    return self._read_status(tx, occurrence)
            return None

        return await self.store.read(work)

    async def make_private_card(
        self, sink: SinkSettings, reference: str, *, in_chat: bool
    ) -> Card | None:
        """Return the card of an event for one person, with new links.

        None if the event is not in the document.
        """
        nonce = secrets.token_hex()

        def work(tx: Transaction) -> Card | None:
            occurrences = tx.snapshot.find_occurrences_by_reference(reference)
            if len(occurrences) != 1 or not occurrences[0].live:
                return None
            occurrence = occurrences[0]
            message = tx.messages.find(sink.name, occurrence.id)
            link = self.links.make_recorded(tx, message, nonce=nonce, in_chat=in_chat)
            code = self.links.confirmation_code(message) if message is not None else None
            card = event_card(self._read_status(tx, occurrence), link=link, code=code)
            return keep_usable_buttons(sink, card, in_chat=in_chat)

        return await self.store.transact(work)

    def _read_status(self, tx: Transaction, occurrence: TrackedEvent) -> ApprovalStatus:
        return self.approvals.status(tx, occurrence, self.clock.now())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatContext:
    """What a chat platform may use of the relay. All platforms share it.

    ``messages`` plans what messages show, ``statuses`` reads how events stand, ``decisions`` takes
    what people answer. ``public_url`` is where others reach this relay, without a slash at its end;
    None if the configuration does not say.
    """

    messages: MessagePlanner
    statuses: EventStatusReader
    decisions: ChatDecisionSubmitter
    public_url: str | None


def make_chat_context(
    store: Store,
    approvals: ApprovalEngine,
    clock: Clock,
    public_url: str | None,
    rights_by_client: Mapping[str, Rights] = MappingProxyType({}),
) -> ChatContext:
    """Return the context over a store. Its decisions need a gate: `attach_gate`.

    ``rights_by_client`` are the rights of the clients, by their principals.
    """
    url = public_url.rstrip("/") if public_url is not None else None
    links = ConfirmationLinks(url)
    return ChatContext(
        messages=MessagePlanner(store=store, approvals=approvals, clock=clock, links=links),
        statuses=EventStatusReader(store=store, approvals=approvals, clock=clock, links=links),
        decisions=ChatDecisionSubmitter(approvals.settings, clock, rights_by_client),
        public_url=url,
    )
