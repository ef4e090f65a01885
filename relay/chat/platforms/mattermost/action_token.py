"""Signed tokens for the buttons and dialogs of Mattermost. Pure.

Mattermost does not sign its calls. A valid token proves that this relay offered one decision. The
Mattermost server keeps the token of a button to itself and sends it to the relay only. The token of
a dialog reaches only the person whom it names, and it is valid for that person only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import astuple, dataclass, fields
from typing import Literal

import orjson

from relay.approvals.request import DecisionKind
from relay.chat import CallbackRefused

MAX_ACTION_TOKEN_LENGTH = 4096
"""Characters."""
_MAC_PREFIX = b"imds-relay mattermost 1\n"
"""Separates these MACs from those that the same key makes for other purposes."""

TokenKind = Literal["button", "dialog"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionToken:
    """One decision about one state of one event, offered in one channel by one sink.

    ``expires_at`` is in seconds since 1970. ``nonce`` distinguishes this button from all others.
    ``post_id`` and ``user_id`` say for a dialog where its button was and who clicked; they are
    empty for a button. The order of the fields is part of the format: the buttons of older posts
    must stay valid.
    """

    kind: TokenKind
    sink: str
    channel_id: str
    event_id: str
    revision: str
    decision: DecisionKind
    expires_at: int
    nonce: str
    post_id: str = ""
    user_id: str = ""


def sign_action_token(key: bytes, token: ActionToken) -> str:
    """Return the token as text: its fields in base64, a dot, and HMAC-SHA256 over them."""
    payload = base64.urlsafe_b64encode(orjson.dumps(astuple(token)))
    return f"{payload.decode()}.{_mac(key, payload)}"


def verify_action_token(key: bytes, text: str, kind: TokenKind) -> ActionToken:
    """Return the token in a text. The caller checks the expiry, the sink and the channel.

    Raises CallbackRefused if this relay did not sign it, or if it is of the other kind.
    """
    payload, _, mac = text.partition(".")
    expected_mac = _mac(key, payload.encode("utf-8", "surrogateescape"))
    is_valid = hmac.compare_digest(expected_mac.encode(), mac.encode("utf-8", "surrogateescape"))
    if len(text) > MAX_ACTION_TOKEN_LENGTH or not is_valid:
        raise CallbackRefused(
            f"expected the token of a {kind} that this relay made, its signature is invalid"
        )
    values = orjson.loads(base64.urlsafe_b64decode(payload))
    names = (field.name for field in fields(ActionToken))
    token = ActionToken(**dict(zip(names, values, strict=True)))
    if token.kind != kind:
        raise CallbackRefused(f"expected the token of a {kind}, got the token of a {token.kind}")
    return token


def _mac(key: bytes, payload: bytes) -> str:
    return hmac.new(key, _MAC_PREFIX + payload, hashlib.sha256).hexdigest()
