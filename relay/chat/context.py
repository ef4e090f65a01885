"""What the relay hands to each chat platform: `ChatContext`."""

from __future__ import annotations

from dataclasses import dataclass

from relay.approvals.service import ApprovalService
from relay.chat.decisions import ChatDecisions
from relay.chat.links import ConfirmationLinks
from relay.chat.message_planner import MessagePlanner
from relay.chat.statuses import EventStatuses
from relay.clock import Clock
from relay.outbox.sqlite import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatContext:
    """What a chat platform may use of the relay. All platforms share it.

    ``messages`` plans what messages show, ``statuses`` reads how events stand, ``decisions`` takes
    what people answer. ``public_url`` is where others reach this relay, without a slash at its end;
    None if the configuration does not say.
    """

    messages: MessagePlanner
    statuses: EventStatuses
    decisions: ChatDecisions
    public_url: str | None


def make_chat_context(
    store: Store, approvals: ApprovalService, clock: Clock, public_url: str | None
) -> ChatContext:
    """Return the context over a store; its decisions need a gate (`ChatDecisions.attach`)."""
    url = public_url.rstrip("/") if public_url is not None else None
    links = ConfirmationLinks(url)
    statuses = EventStatuses(store, approvals, clock, links)
    return ChatContext(
        messages=MessagePlanner(store, statuses, clock, links),
        statuses=statuses,
        decisions=ChatDecisions(approvals.settings, clock),
        public_url=url,
    )
