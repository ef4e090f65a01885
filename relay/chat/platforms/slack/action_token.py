"""Tokens for the buttons of ephemeral cards, which Slack shows to one person only. Pure.

The store has no record of an ephemeral message. The token proves that this relay offered this
person this decision.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import datetime

from relay.approvals.request import DecisionKind

ACTION_TOKEN_LIFETIME = 900
"""Seconds."""
_ACTION_TOKEN = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTokenClaims:
    """What a token proves: this person in this channel was offered this decision."""

    user_id: str
    channel_id: str
    decision: DecisionKind
    revision: str
    event_id: str


def make_action_token(claims: ActionTokenClaims, bot_token: str, now: datetime) -> str:
    """Return a token for these claims. Its key is derived from the bot token."""
    expires = int(now.timestamp()) + ACTION_TOKEN_LIFETIME
    return f"{expires}.{_mac(claims, bot_token, expires)}"


def is_valid_action_token(
    action_token: str, claims: ActionTokenClaims, bot_token: str, now: datetime
) -> bool:
    """Return whether this relay made the token for exactly these claims and it has not expired."""
    match = _ACTION_TOKEN.fullmatch(action_token)
    if match is None:
        return False
    expires = int(match[1])
    if not now.timestamp() <= expires <= now.timestamp() + ACTION_TOKEN_LIFETIME:
        return False
    return hmac.compare_digest(match[2], _mac(claims, bot_token, expires))


def _mac(claims: ActionTokenClaims, bot_token: str, expires: int) -> str:
    key = hashlib.sha256(b"imds-relay: buttons for one person\n" + bot_token.encode()).digest()
    fields = (
        claims.user_id,
        claims.channel_id,
        claims.decision,
        claims.revision,
        claims.event_id,
        str(expires),
    )
    return hmac.new(key, "\n".join(fields).encode(), hashlib.sha256).hexdigest()
