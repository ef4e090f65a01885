"""The links in a message to the page that confirms a decision, and the tokens in them.

The state file holds the digests of the tokens only (`relay.outbox.chat_messages`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from relay.approvals.request import DecisionKind
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Link
from relay.outbox.chat_messages import ChatMessage
from relay.outbox.transaction import Transaction

MAX_PENDING_MESSAGES = 200
"""Messages whose tokens are kept until they are shown."""

TokenMaker = Callable[[int, DecisionKind], str]
"""Returns the token for a decision about an occurrence, named by its id."""


def token_maker() -> TokenMaker:
    """Return a function that makes one token for each occurrence and decision.

    It returns the same token again, because the store may run a transaction twice.
    """
    tokens: dict[tuple[int, DecisionKind], str] = {}

    def token(occurrence_id: int, decision: DecisionKind) -> str:
        return tokens.setdefault((occurrence_id, decision), secrets.token_urlsafe(32))

    return token


def message_link(
    tx: Transaction,
    message: ChatMessage | None,
    token: TokenMaker,
    *,
    public_url: str | None,
    in_chat: bool,
) -> Link | None:
    """Return where the buttons of a message lead; None if nothing can be decided from it.

    Each URL that the link makes is recorded for the message. ``in_chat``: the chat itself takes
    decisions, so buttons lead nowhere else.
    """
    if in_chat:
        return lambda _status, _decision: None
    if message is None or public_url is None:
        return None

    def link(status: ApprovalStatus, decision: DecisionKind) -> str:
        occurrence = status.occurrence
        link_token = token(occurrence.id, decision)
        tx.messages.add_link(
            message.id, link_token, occurrence.id, occurrence.revision, decision, status.now
        )
        return f"{public_url}/approve#{link_token}"

    return link


class PendingTokens:
    """The tokens of messages that could not be posted or edited yet.

    The next try uses the same tokens if the message should show the same content. Otherwise the
    tokens of tries that fail for hours would displace those that people see. Only the thread of the
    store may use it.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[str, TokenMaker]] = {}

    def begin_try(self) -> Callable[[int, str], TokenMaker]:
        """Return a function that chooses the tokens for a message and its content hash.

        It chooses once: the store may run the transaction of a try again.
        """
        chosen: TokenMaker | None = None

        def choose(message_id: int, content_hash: str) -> TokenMaker:
            nonlocal chosen
            if chosen is None:
                last_hash, last_tokens = self._tokens.get(message_id, ("", token_maker()))
                chosen = last_tokens if last_hash == content_hash else token_maker()
                self._tokens[message_id] = content_hash, chosen
                while len(self._tokens) > MAX_PENDING_MESSAGES:
                    del self._tokens[next(iter(self._tokens))]
            return chosen

        return choose

    def discard(self, message_id: int) -> None:
        """Forget the tokens of a message that is shown."""
        self._tokens.pop(message_id, None)
