"""Tokens for the buttons of ephemeral cards, which Slack shows to one person only. Pure.

The store has no record of an ephemeral message. The token proves that this sink offered this
person this decision.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import datetime

from relay.chat.cards.card import Button
from relay.chat.platforms.slack.payloads import Actor, ButtonDecision

ACTION_TOKEN_LIFETIME = 900
"""Seconds."""
_ACTION_TOKEN = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})")


def make_action_token(
    sink_name: str, actor: Actor, button: Button, bot_token: str, now: datetime
) -> str:
    """Return a token for a button that only the actor sees. Its key is derived from the bot token.

    It proves that this sink offered this decision to this person in this channel. Another sink can
    have the same bot token, and other rights.
    """
    expires = int(now.timestamp()) + ACTION_TOKEN_LIFETIME
    return f"{expires}.{_mac(sink_name, actor, button, bot_token, expires)}"


def is_action_token_valid(
    sink_name: str, actor: Actor, action: ButtonDecision, bot_token: str, now: datetime
) -> bool:
    """Return whether this sink offered the actor this action, and its token has not expired."""
    match = _ACTION_TOKEN.fullmatch(action.action_token or "")
    if match is None:
        return False
    expires = int(match[1])
    if not now.timestamp() <= expires <= now.timestamp() + ACTION_TOKEN_LIFETIME:
        return False
    return hmac.compare_digest(match[2], _mac(sink_name, actor, action, bot_token, expires))


def _mac(
    sink_name: str, actor: Actor, action: Button | ButtonDecision, bot_token: str, expires: int
) -> str:
    key = hashlib.sha256(b"imds-relay: buttons for one person\n" + bot_token.encode()).digest()
    fields = (
        sink_name,
        actor.user_id,
        actor.channel_id,
        action.decision,
        action.revision,
        action.event_id,
        str(expires),
    )
    return hmac.new(key, "\n".join(fields).encode(), hashlib.sha256).hexdigest()
