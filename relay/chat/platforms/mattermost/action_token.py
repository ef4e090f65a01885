"""What a button and a dialog of Mattermost carry to show that this relay made them: a sealed proof of one decision. Pure.

Mattermost signs nothing. A button's proof stays in the server, which gives it to nobody but the relay; a dialog's proof
reaches the one person who is asked, and is good for that person alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import astuple, dataclass
from typing import Literal

import orjson

from relay.approvals.request import DecisionKind
from relay.chat import CallbackRefused

MOST = 4096
"""Characters of a sealed proof."""
_ABOUT = b"imds-relay mattermost 1\n"  # the same key may sign other things: none of them is a proof


@dataclass(frozen=True, slots=True)
class ActionToken:
    """One decision about one state of one event, in one sink and channel. ``expires`` is in seconds since 1970.

    ``nonce`` tells this button of this rendering from all others. Of a dialog, ``post`` is where the button was and
    ``user`` who is asked; both are empty in a button's.
    """

    kind: Literal["button", "dialog"]
    sink: str
    channel: str
    event_id: str
    revision: str
    decision: DecisionKind
    expires: int
    nonce: str
    post: str = ""
    user: str = ""


def seal(key: bytes, proof: ActionToken) -> str:
    """The proof as text: what it says, and HMAC-SHA256 over it."""
    payload = base64.urlsafe_b64encode(orjson.dumps(astuple(proof)))
    return f"{payload.decode()}.{_mac(key, payload)}"


def unseal(key: bytes, text: str, kind: Literal["button", "dialog"]) -> ActionToken:
    """The proof in a text. Raises ChatRefused for what this relay has not sealed, and for a proof of the other kind."""
    payload, _, mac = text.partition(".")
    if len(text) > MOST or not hmac.compare_digest(
        _mac(key, payload.encode("utf-8", "surrogateescape")).encode(),
        mac.encode("utf-8", "surrogateescape"),
    ):
        raise CallbackRefused(
            f"expected a {kind} that this relay made, the proof in it does not hold"
        )
    proof = ActionToken(*orjson.loads(base64.urlsafe_b64decode(payload)))
    if proof.kind != kind:
        raise CallbackRefused(f"expected the proof of a {kind}, got that of a {proof.kind}")
    return proof


def _mac(key: bytes, payload: bytes) -> str:
    return hmac.new(key, _ABOUT + payload, hashlib.sha256).hexdigest()
