"""Reads what Slack sends over Socket Mode: a click on a button, or a slash command. Pure.

Sources: https://docs.slack.dev/reference/interaction-payloads/block_actions-payload and
https://docs.slack.dev/interactivity/implementing-slash-commands.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from relay.approvals.request import DecisionKind
from relay.chat.platforms.slack.blocks import LINK_ACTION_PREFIX
from relay.errors import RelayError
from relay.validation import first_error_path_and_message

_ModelType = TypeVar("_ModelType", bound=BaseModel)
_Id = Annotated[str, Field(pattern=r"^[A-Z0-9]{2,32}$")]


class Unreadable(RelayError):
    """What came is neither a click on a button of a relay nor a command."""


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)


class Actor(_Model):
    """Who clicked or typed, and where, as Slack reports it.

    ``team_id`` is the workspace where it happened. ``home_team_id`` is the person's own workspace,
    which differs in a channel that two workspaces share; None if Slack does not say.
    """

    team_id: _Id
    user_id: _Id
    channel_id: _Id
    app_id: _Id = Field(validation_alias="api_app_id")
    home_team_id: _Id | None = None

    @property
    def principal(self) -> str:
        """The principal that rules, groups and people name."""
        return f"slack:{self.team_id}/{self.user_id}"


class ButtonDecision(_Model):
    """The decision that a button stands for."""

    decision: DecisionKind
    revision: str = Field(min_length=1, max_length=128)
    event_id: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")


class Click(Actor):
    """A click on a button of a message. ``trigger_id`` is unique to each click."""

    type: Literal["block_actions"]
    team_id: _Id = Field(validation_alias=AliasPath("team", "id"))
    user_id: _Id = Field(validation_alias=AliasPath("user", "id"))
    home_team_id: _Id | None = Field(None, validation_alias=AliasPath("user", "team_id"))
    channel_id: _Id = Field(validation_alias=AliasPath("channel", "id"))
    place: Literal["message"] = Field(validation_alias=AliasPath("container", "type"))
    shown_in: _Id = Field(validation_alias=AliasPath("container", "channel_id"))
    is_ephemeral: bool = Field(
        default=False, validation_alias=AliasPath("container", "is_ephemeral")
    )
    message_ts: str = Field(
        pattern=r"^[0-9]{1,12}\.[0-9]{1,9}$",
        validation_alias=AliasPath("container", "message_ts"),
    )
    trigger_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")
    actions: list[Any] = Field(min_length=1, max_length=1)
    element: Literal["button"] = Field(validation_alias=AliasPath("actions", 0, "type"))
    action_id: str = Field(max_length=255, validation_alias=AliasPath("actions", 0, "action_id"))
    value: str = Field("", max_length=2000, validation_alias=AliasPath("actions", 0, "value"))

    @property
    def message_ref(self) -> str:
        """The message, as `relay.chat.platforms.slack.channel` identifies it."""
        return f"{self.shown_in}/{self.message_ts}"


class Command(Actor):
    """A slash command. ``text`` is what the person typed behind its name."""

    command: str = Field(pattern=r"^/\S{1,64}$")
    text: str = Field("", max_length=4000)


def parse_click(payload: Any) -> tuple[Click, ButtonDecision] | None:
    """Return a click and its decision; None if the button opens a page. Raises Unreadable."""
    click = _validate(Click, payload)
    if click.action_id.startswith(LINK_ACTION_PREFIX):
        return None
    if click.shown_in != click.channel_id or click.is_ephemeral:
        raise Unreadable("expected a click on a message of the channel, it was on another")
    values = zip(ButtonDecision.model_fields, click.value.split(" ", 2), strict=False)
    return click, _validate(ButtonDecision, dict(values))  # as `blocks.button_value` joins them


def parse_command(payload: Any) -> Command:
    """Return a command. Raises Unreadable."""
    return _validate(Command, payload)


def _validate(model: type[_ModelType], document: Any) -> _ModelType:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        path, message = first_error_path_and_message(error)
        raise Unreadable(f"{path or 'the payload'}: {message}") from None
