"""What Mattermost sends to the relay: clicks on buttons, and submissions of dialogs. Pure.

Nothing in a payload is trusted before `interactions` has checked it. Source:
https://developers.mattermost.com/integrate/plugins/interactive-messages/
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relay.chat import CallbackRefused

MattermostId = Annotated[str, Field(pattern=r"^[a-z0-9]{26}$")]


class _Payload(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)


class ButtonContext(_Payload):
    """What the relay put into the button."""

    action_token: str = Field(alias="proof")


class Click(_Payload):
    """A click on a button. Channel and post are those of the button."""

    user_id: MattermostId
    channel_id: MattermostId
    post_id: MattermostId
    trigger_id: str = Field(max_length=2048)
    context: ButtonContext


class DialogSubmission(_Payload):
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


def trigger_user_id(trigger_id: str) -> str | None:
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
