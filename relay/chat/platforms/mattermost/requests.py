"""Reads what Mattermost sends: clicks on buttons, submissions of dialogs, and their tokens. Pure.

Mattermost does not sign its calls, so nothing in them is trusted before `interactions` has checked
it. The relay puts an action token into each button and dialog: a valid one proves that this relay
offered one decision. The Mattermost server keeps the token of a button to itself and sends it to
the relay only. The token of a dialog reaches only the person whom it names, and it is valid for
that person only. Source:
https://developers.mattermost.com/integrate/plugins/interactive-messages/
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import astuple, dataclass, fields
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relay.approvals.request import DecisionKind
from relay.chat import CallbackRefused

MAX_ACTION_TOKEN_LENGTH = 4096
"""Characters."""
_MAC_PREFIX = b"imds-relay mattermost 1\n"
"""Separates these MACs from those that the same key makes for other purposes."""

TokenKind = Literal["button", "dialog"]

MattermostId = Annotated[str, Field(pattern=r"^[a-z0-9]{26}$")]


class _PayloadBase(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)


class ButtonContext(_PayloadBase):
    """What the relay put into the button."""

    action_token: str = Field(alias="proof")


class Click(_PayloadBase):
    """A click on a button. Channel and post are those of the button."""

    user_id: MattermostId
    channel_id: MattermostId
    post_id: MattermostId
    trigger_id: str = Field(max_length=2048)
    context: ButtonContext


class DialogSubmission(_PayloadBase):
    """A submitted or canceled dialog. ``state`` is what the relay put into the dialog."""

    type: Literal["dialog_submission"]
    user_id: MattermostId
    state: str
    cancelled: bool = False


def parse_payload(body: bytes) -> Click | DialogSubmission:
    """Return the payload in a body. Raises CallbackRefused (400) for anything else."""
    try:
        fields = orjson.loads(body)
        if isinstance(fields, dict) and fields.get("type") == "dialog_submission":
            return DialogSubmission.model_validate(fields)
        return Click.model_validate(fields)
    except (orjson.JSONDecodeError, ValidationError):
        raise CallbackRefused(
            "expected a click or a submission of Mattermost, got something else", status=400
        ) from None


def user_id_from_trigger_id(trigger_id: str) -> str | None:
    """Return the user for whom the server made a trigger id; None if it is malformed.

    The server shows a dialog to that user only. The form is base64 of
    ``<id>:<user>:<milliseconds>:<signature>`` since Mattermost 5.6. The server checks the signature
    when the dialog is opened.
    """
    try:
        parts = base64.b64decode(trigger_id, validate=True).decode().split(":")
    except (binascii.Error, ValueError):
        return None
    return parts[1] if len(parts) == 4 else None


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


def parse_signed_action_token(key: bytes, text: str, kind: TokenKind) -> ActionToken:
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
