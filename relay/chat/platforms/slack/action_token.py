"""Buttons that are shown to one person alone: no message of ours is on record for them, so they bring their own proof. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import datetime

from relay.approvals.request import DecisionKind

GOOD_FOR = 900
"""Seconds."""
_PROOF = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})")


def make_action_token(
    token: str, who: tuple[str, str], what: tuple[DecisionKind, str, str], now: datetime
) -> str:
    """A proof that we showed this person in this channel (``who``) a button for decision, revision and EventId (``what``).

    ``token``: the bot token, from which the key is made.
    """
    until = int(now.timestamp()) + GOOD_FOR
    return f"{until}.{_digest(token, who, what, until)}"


def is_valid_action_token(
    proof: str, token: str, who: tuple[str, str], what: tuple[DecisionKind, str, str], now: datetime
) -> bool:
    """Whether a proof is ours, for just that, and still good."""
    found = _PROOF.fullmatch(proof)
    if found is None or not now.timestamp() <= int(found[1]) <= now.timestamp() + GOOD_FOR:
        return False
    return hmac.compare_digest(found[2], _digest(token, who, what, int(found[1])))


def _digest(
    token: str, who: tuple[str, str], what: tuple[DecisionKind, str, str], until: int
) -> str:
    key = hashlib.sha256(b"imds-relay: buttons for one person\n" + token.encode()).digest()
    return hmac.new(key, "\n".join((*who, *what, str(until))).encode(), hashlib.sha256).hexdigest()
