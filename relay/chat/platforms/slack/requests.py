"""Reads the requests that Slack sends: their signature, and the click or command in them. Pure.

An HTTP request proves itself by its signature (`verify_signature`), and the connection of Socket
Mode has proved itself before. `parse_click_or_command_http_body`, `parse_button_interaction` and
`parse_slash_command_fields` return a `Call`. The value of a button says which decision it stands
for. On an ephemeral card, which Slack shows to one person only, it also has an action token: the
store has no record of such a message, and the token proves that this sink offered this person this
decision. Sources: https://docs.slack.dev/authentication/verifying-requests-from-slack,
https://docs.slack.dev/reference/interaction-payloads/block_actions-payload and
https://docs.slack.dev/interactivity/implementing-slash-commands. The SDK's verifier is not used: it
raises on malformed headers and bodies (docs/decisions/0017-own-slack-socket.md).
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
from relay.validation import first_error_path_and_message

MAX_SIGNATURE_AGE = 300
"""Seconds between a signature's timestamp and this machine's time, in either direction."""
ACTION_TOKEN_LIFETIME = 900
"""Seconds."""
LINK_ACTION_PREFIX = "link-"
"""Starts the action_id of a button that opens a page. Slack reports its clicks, too."""
_TIMESTAMP = re.compile(r"[0-9]{1,12}")
_ACTION_TOKEN = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})")
_MAX_FORM_FIELDS = 60
_NO_ACTION_TOKEN = "-"  # noqa: S105  # a placeholder
_ModelType = TypeVar("_ModelType", bound=BaseModel)
_Id = Annotated[str, Field(pattern=r"^[A-Z0-9]{2,32}$")]
_TriggerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")]
_ResponseUrl = Annotated[str, Field(max_length=2000)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who clicked or typed, and where, as Slack reports it.

    ``team_id`` is the workspace where it happened. ``home_team_id`` is the person's own workspace,
    which differs in a channel that two workspaces share. ``trigger_id`` is unique to each click
    and command.
    """

    team_id: str
    home_team_id: str
    user_id: str
    app_id: str
    channel_id: str
    trigger_id: str
    response_url: str

    @property
    def principal(self) -> str:
        """The principal that rules, groups and people name."""
        return f"slack:{self.team_id}/{self.user_id}"

    @property
    def request_id(self) -> str:
        """Identifies this click or command, so that it counts once even if Slack repeats it."""
        return f"slack {self.trigger_id}"


class ButtonDecision(_Model):
    """The decision that a button stands for.

    ``action_token`` is set for a button of an ephemeral card only.
    """

    decision: DecisionKind
    revision: str = Field(min_length=1, max_length=128)
    event_id: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")
    action_token: str | None = Field(default=None, max_length=200)


@dataclass(frozen=True, slots=True, kw_only=True)
class ButtonClick:
    """A click on a decision button. ``message_ref`` identifies the message as `channel` does."""

    actor: Actor
    message_ref: str
    is_ephemeral: bool
    action: ButtonDecision


class SlashCommand(_Model):
    """A slash command. ``text`` is what the person typed behind its name."""

    command: str = Field(pattern=r"^/\S{1,64}$")
    text: str = Field(default="", max_length=4000)
    team_id: _Id
    user_id: _Id
    channel_id: _Id
    api_app_id: _Id
    trigger_id: _TriggerId
    response_url: _ResponseUrl = ""

    @property
    def actor(self) -> Actor:
        """Who typed the command."""
        return Actor(
            team_id=self.team_id,
            home_team_id=self.team_id,
            user_id=self.user_id,
            app_id=self.api_app_id,
            channel_id=self.channel_id,
            trigger_id=self.trigger_id,
            response_url=self.response_url,
        )


class UrlVerification(_Model):
    """Slack checks the request URL and expects the challenge as the answer."""

    type: Literal["url_verification"]
    challenge: str = Field(max_length=1000)


@dataclass(frozen=True, slots=True)
class IgnoredCall:
    """A request to acknowledge and to do nothing about."""


Call = ButtonClick | SlashCommand | UrlVerification | IgnoredCall


def verify_signature(
    headers: Mapping[str, str], body: bytes, signing_secret: bytes, now: datetime
) -> None:
    """Raise CallbackRefused unless Slack signed this body within five minutes of ``now``."""
    timestamp = _require_header(headers, "x-slack-request-timestamp")
    signature = _require_header(headers, "x-slack-signature")
    if _TIMESTAMP.fullmatch(timestamp) is None:
        raise CallbackRefused("expected a number in X-Slack-Request-Timestamp, got none")
    if abs(now.timestamp() - int(timestamp)) > MAX_SIGNATURE_AGE:
        raise CallbackRefused(
            f"expected a signature's timestamp within {MAX_SIGNATURE_AGE} s of this machine's "
            "time, got another: the request is old, or the clock is wrong"
        )
    signed_text = b"v0:" + timestamp.encode() + b":" + body
    expected = "v0=" + hmac.new(signing_secret, signed_text, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogateescape")):
        raise CallbackRefused("expected a signature made with this app's signing_secret")


def _require_header(headers: Mapping[str, str], name: str) -> str:
    values = [value for key, value in headers.items() if key.lower() == name]
    if len(values) != 1:  # a proxy between may have read another one
        raise CallbackRefused(f"expected {name} once, got it {len(values)} times")
    return values[0]


def parse_click_or_command_http_body(body: bytes) -> Call:
    """Parse the body of a verified HTTP request. Raises CallbackRefused with status 400."""
    if body.lstrip().startswith(b"{"):
        return _validate(UrlVerification, _load_json(body))
    try:
        fields = parse_qs(
            body.decode(),
            keep_blank_values=True,
            strict_parsing=True,
            max_num_fields=_MAX_FORM_FIELDS,
            errors="strict",
        )
    except ValueError as error:
        raise CallbackRefused(f"expected a form: {type(error).__name__}", status=400) from None
    form = {name: values[0] for name, values in fields.items() if len(values) == 1}
    if form.get("ssl_check") == "1":
        return IgnoredCall()
    if "payload" in form:
        return parse_button_interaction(_load_json(form["payload"].encode()))
    return parse_slash_command_fields(form)


def parse_button_interaction(payload: Any) -> ButtonClick | IgnoredCall:
    """Parse the payload of an interaction. Raises CallbackRefused with status 400."""
    interaction = _validate(_BlockActionsModel, payload)
    action, container = interaction.actions[0], interaction.container
    if action.action_id.startswith(LINK_ACTION_PREFIX):
        return IgnoredCall()
    if container.channel_id != interaction.channel.id:
        raise CallbackRefused("expected container.channel_id to equal channel.id", status=400)
    return ButtonClick(
        actor=Actor(
            team_id=interaction.team.id,
            home_team_id=interaction.user.team_id or interaction.team.id,
            user_id=interaction.user.id,
            app_id=interaction.api_app_id,
            channel_id=interaction.channel.id,
            trigger_id=interaction.trigger_id,
            response_url=interaction.response_url,
        ),
        message_ref=f"{container.channel_id}/{container.message_ts}",
        is_ephemeral=container.is_ephemeral,
        action=_parse_button_value(action.value),
    )


def parse_slash_command_fields(form: Any) -> SlashCommand:
    """Parse the fields of a slash command. Raises CallbackRefused with status 400."""
    return _validate(SlashCommand, form)


def _parse_button_value(value: str) -> ButtonDecision:
    fields = value.split(" ", 3)  # as `format_button_value` joins them
    if len(fields) != 4:
        raise CallbackRefused(
            "expected the value of a button that this relay made, got another", status=400
        )
    decision, revision, action_token, event_id = fields
    return _validate(
        ButtonDecision,
        {
            "decision": decision,
            "revision": revision,
            "event_id": event_id,
            "action_token": None if action_token == _NO_ACTION_TOKEN else action_token,
        },
    )


def _load_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise CallbackRefused("expected JSON, got something else", status=400) from None


def _validate(model: type[_ModelType], document: Any) -> _ModelType:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        path, message = first_error_path_and_message(error)
        raise CallbackRefused(f"{path or 'the request'}: {message}", status=400) from None


def format_button_value(button: Button, action_token: str | None = None) -> str:
    """Return the value that Slack sends back when somebody clicks the button."""
    fields = (button.decision, button.revision, action_token or _NO_ACTION_TOKEN, button.event_id)
    return " ".join(fields)


def make_action_token(
    sink_name: str, actor: Actor, button: Button, bot_token: str, now: datetime
) -> str:
    """Return a token for a button that only the actor sees. Its key is derived from the bot token.

    It proves that this sink offered this decision to this person in this channel. Another sink can
    have the same bot token, and other rights.
    """
    expires = int(now.timestamp()) + ACTION_TOKEN_LIFETIME
    return f"{expires}.{_action_token_mac(sink_name, actor, button, bot_token, expires)}"


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
    return hmac.compare_digest(
        match[2], _action_token_mac(sink_name, actor, action, bot_token, expires)
    )


def _action_token_mac(
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


class _UserModel(_Model):
    id: _Id
    team_id: _Id | None = None


class _TeamOrChannelModel(_Model):
    id: _Id


class _ContainerModel(_Model):
    type: Literal["message"]
    message_ts: str = Field(pattern=r"^[0-9]{1,12}\.[0-9]{1,9}$")
    channel_id: _Id
    is_ephemeral: bool = False


class _ActionModel(_Model):
    type: Literal["button"]
    action_id: str = Field(max_length=255)
    value: str = Field(default="", max_length=2000)


class _BlockActionsModel(_Model):
    type: Literal["block_actions"]
    user: _UserModel
    team: _TeamOrChannelModel
    channel: _TeamOrChannelModel
    api_app_id: _Id
    container: _ContainerModel
    trigger_id: _TriggerId
    response_url: _ResponseUrl = ""
    actions: list[_ActionModel] = Field(min_length=1, max_length=1)
