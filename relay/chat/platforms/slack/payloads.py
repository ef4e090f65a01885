"""What Slack calls, proved and read: clicks and slash commands, over HTTP or a socket. Pure.

Sources: https://docs.slack.dev/authentication/verifying-requests-from-slack, …/reference/interaction-payloads/block_actions-payload,
…/interactivity/implementing-slash-commands. The SDK's own verifier raises on what is malformed, and compares text.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relay.approvals.request import DecisionKind
from relay.chat import CallbackRefused
from relay.chat.cards.card import Button
from relay.chat.platforms.slack.blocks import LINK

WINDOW = 300
"""Seconds that a signature is good for, before and after its timestamp."""
_STAMP = re.compile(r"[0-9]{1,12}")
_MOST_FIELDS = 60

_M = TypeVar("_M", bound=BaseModel)

_Id = Annotated[str, Field(pattern=r"^[A-Z0-9]{2,32}$")]
_Trigger = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")]
_Url = Annotated[str, Field(max_length=2000)]


@dataclass(frozen=True, slots=True)
class Actor:
    """Who calls, from where, as Slack says it. ``trigger`` is another one for each click and command.

    ``team`` is the workspace that it happened in, ``home`` the person's own: another one in a channel that two workspaces share.
    """

    team: str
    home: str
    user: str
    app: str
    channel: str
    trigger: str
    response_url: str


@dataclass(frozen=True, slots=True)
class ButtonAction:
    """What a button stands for. ``proof``: of one that was shown to one person alone, see `answers`."""

    decision: DecisionKind
    revision: str
    event_id: str
    proof: str | None = None


@dataclass(frozen=True, slots=True)
class Click:
    """A button was clicked. ``message`` names the message as our references do."""

    by: Actor
    message: str
    alone: bool
    decided: ButtonAction


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command was typed."""

    by: Actor
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Challenge:
    """Slack asks whether we are who we say: the text is to be sent back."""

    text: str


@dataclass(frozen=True, slots=True)
class IgnoredCall:
    """A call from which nothing follows, and that wants to be acknowledged."""


Call = Click | Command | Challenge | IgnoredCall


def button_value(button: Button, proof: str | None = None) -> str:
    """What a button brings back when it is clicked."""
    words = (button.decision, button.revision, proof or "-", button.event_id)
    return " ".join(words)


def verify_signature(headers: Mapping[str, str], body: bytes, secret: bytes, now: datetime) -> None:
    """Raises ChatRefused unless Slack signed this body within five minutes of now."""
    given = {name.lower(): text for name, text in headers.items()}
    stamp, signature = (
        given.get("x-slack-request-timestamp", ""),
        given.get("x-slack-signature", ""),
    )
    if _STAMP.fullmatch(stamp) is None:
        raise CallbackRefused("expected X-Slack-Request-Timestamp, got none or no number")
    if abs(now.timestamp() - int(stamp)) > WINDOW:
        raise CallbackRefused(
            f"the signature is of another time than this machine's, by more than {WINDOW} s"
        )
    expected = (
        "v0=" + hmac.new(secret, b"v0:" + stamp.encode() + b":" + body, hashlib.sha256).hexdigest()
    )
    if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogateescape")):
        raise CallbackRefused("the signature is not that of this app's signing_secret")


def parse_payload(body: bytes) -> Call:
    """What a body says that was proved. Raises ChatRefused with 400 for what cannot be read."""
    if body.lstrip().startswith(b"{"):
        return _challenge(_json(body))
    try:
        fields = parse_qs(
            body.decode(),
            keep_blank_values=True,
            strict_parsing=True,
            max_num_fields=_MOST_FIELDS,
            errors="strict",
        )
    except ValueError as error:
        raise CallbackRefused(f"expected a form: {type(error).__name__}", status=400) from None
    form = {name: texts[0] for name, texts in fields.items() if len(texts) == 1}
    if form.get("ssl_check") == "1":
        return IgnoredCall()
    if "payload" in form:
        return parse_interaction(_json(form["payload"].encode()))
    return parse_command(form)


def parse_interaction(payload: Any) -> Call:
    """What the payload of an interaction says. Raises ChatRefused with 400."""
    found = _checked(_BlockActions, payload)
    action = found.actions[0]
    if action.action_id.startswith(f"{LINK}-"):
        return IgnoredCall()
    if found.container.channel_id != found.channel.id:
        raise CallbackRefused(
            "expected container.channel_id and channel.id to be the same", status=400
        )
    home = found.user.team_id or found.team.id
    by = Actor(
        found.team.id,
        home,
        found.user.id,
        found.api_app_id,
        found.channel.id,
        found.trigger_id,
        found.response_url,
    )
    message = f"{found.container.channel_id}/{found.container.message_ts}"
    return Click(by, message, found.container.is_ephemeral, _decided(action.value))


def parse_command(form: Any) -> Command:
    """What the fields of a slash command say. Raises ChatRefused with 400."""
    found = _checked(_Command, form)
    by = Actor(
        found.team_id,
        found.team_id,
        found.user_id,
        found.api_app_id,
        found.channel_id,
        found.trigger_id,
        found.response_url,
    )
    return Command(by, tuple(found.text.split()))


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)


class _User(_Model):
    id: _Id
    team_id: _Id | None = None


class _Named(_Model):
    id: _Id


class _Container(_Model):
    type: Literal["message"]
    message_ts: str = Field(pattern=r"^[0-9]{1,12}\.[0-9]{1,9}$")
    channel_id: _Id
    is_ephemeral: bool = False


class _Action(_Model):
    type: Literal["button"]
    action_id: str = Field(max_length=255)
    value: str = Field(default="", max_length=2000)


class _BlockActions(_Model):
    type: Literal["block_actions"]
    user: _User
    team: _Named
    channel: _Named
    api_app_id: _Id
    container: _Container
    trigger_id: _Trigger
    response_url: _Url = ""
    actions: list[_Action] = Field(min_length=1, max_length=1)


class _Command(_Model):
    command: str = Field(pattern=r"^/\S{1,64}$")
    text: str = Field(default="", max_length=4000)
    team_id: _Id
    user_id: _Id
    channel_id: _Id
    api_app_id: _Id
    trigger_id: _Trigger
    response_url: _Url = ""


class _Challenge(_Model):
    type: Literal["url_verification"]
    challenge: str = Field(max_length=1000)


class _Decided(_Model):
    decision: DecisionKind
    revision: str = Field(min_length=1, max_length=128)
    proof: str = Field(max_length=200)
    event_id: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")


def _challenge(document: Any) -> Challenge:
    return Challenge(_checked(_Challenge, document).challenge)


def _decided(value: str) -> ButtonAction:
    words = value.split(" ", 3)
    if len(words) != 4:  # as `button_value` makes it
        raise CallbackRefused(
            "expected the value of a button of ours, got something else", status=400
        )
    found = _checked(
        _Decided, dict(zip(("decision", "revision", "proof", "event_id"), words, strict=True))
    )
    return ButtonAction(
        found.decision, found.revision, found.event_id, found.proof if found.proof != "-" else None
    )


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise CallbackRefused("expected JSON, got something else", status=400) from None


def _checked(model: type[_M], document: Any) -> _M:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CallbackRefused(f"{place or 'the call'}: {first['msg']}", status=400) from None
