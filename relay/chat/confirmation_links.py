"""The links from a message to the confirm page, and the code that the page asks for.

A link stands for one decision about one revision of an event: that is what its token, behind
``/approve#``, is recorded for. To approve, a person also types the code that the message shows. The
state file holds only digests of tokens and codes (`relay.store.chat_messages`). A `Link` is the
function that gives the buttons of a card their URLs.
"""

from __future__ import annotations

import base64
import hmac
import secrets

from relay.approvals.request import DecisionKind
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Link
from relay.store.chat_messages import ChatMessage
from relay.store.transaction import Transaction


class ConfirmationLinkMaker:
    """Makes the links of messages. There are none without ``public_url``, the relay's own address.

    A token is a MAC with a key that only this process has. So nobody can guess it. It is the same
    again when the store runs a transaction twice, or when a post or an edit failed and is tried
    again. Otherwise the tokens of tries that fail for hours would displace those that people see:
    the store keeps the newest only.
    """

    def __init__(self, public_url: str | None) -> None:
        self._public_url = public_url
        self._key = secrets.token_bytes(32)

    def make_recording_button_url_function(
        self, tx: Transaction, message: ChatMessage | None, *, nonce: str, in_chat: bool
    ) -> Link | None:
        """Return the link for the buttons of a message; None if they have nowhere to lead.

        Each URL that the link makes is recorded for ``message``. The same ``nonce`` makes the same
        URLs. ``in_chat``: the chat itself takes decisions, so the link makes no URLs (None).
        """
        if in_chat or self._public_url is None:
            return self.make_placeholder_button_url_function(in_chat=in_chat)
        if message is None:
            return None
        code = self.six_digit_code_of_message(message)

        def make_and_store_confirmation_url(status: ApprovalStatus, decision: DecisionKind) -> str:
            occurrence = status.occurrence
            revision = occurrence.revision
            mac = self._mac("token", message.id, nonce, occurrence.id, revision, decision)
            token = base64.urlsafe_b64encode(mac).decode().rstrip("=")
            tx.messages.add_confirmation_link(
                message.id, token, code, occurrence.id, revision, decision, status.now
            )
            return f"{self._public_url}/approve#{token}"

        return make_and_store_confirmation_url

    def six_digit_code_of_message(self, message: ChatMessage) -> str:
        """Return the six digits that a message shows; the same until this process ends."""
        return f"{int.from_bytes(self._mac('code', message.id)) % 10**6:06d}"

    def make_placeholder_button_url_function(self, *, in_chat: bool) -> Link | None:
        """Return a function that makes "" or None as the URL of each button.

        The planner hashes a card with it, to see whether the message shows another content.
        `make_recording_button_url_function` makes the URLs that it shows.
        """
        if in_chat:
            return lambda _status, _decision: None
        return (lambda _status, _decision: "") if self._public_url is not None else None

    def _mac(self, *meaning: object) -> bytes:
        return hmac.digest(self._key, repr(meaning).encode(), "sha256")
