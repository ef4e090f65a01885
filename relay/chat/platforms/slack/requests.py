"""Reads what Slack sends over Socket Mode: a click on a button, or a slash command. Pure.

Sources: https://docs.slack.dev/reference/interaction-payloads/block_actions-payload and
https://docs.slack.dev/interactivity/implementing-slash-commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relay.approvals.request import DecisionKind
from relay.chat.platforms.slack.blocks import LINK_ACTION_PREFIX
from relay.errors import RelayError
from relay.validation import first_error_path_and_message

_ModelType = TypeVar("_ModelType", bound=BaseModel)
_Id = Annotated[str, Field(pattern=r"^[A-Z0-9]{2,32}$")]
_TriggerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")]


class Unreadable(RelayError):
    """What came is neither a click on a button of a relay nor a command."""


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who clicked or typed, and where, as Slack reports it.

    ``team_id`` is the workspace where it happened. ``home_team_id`` is the person's own workspace,
    which differs in a channel that two workspaces share.
    """

    team_id: str
    home_team_id: str
    user_id: str
    app_id: str
    channel_id: str

    @property
    def principal(self) -> str:
        """The principal that rules, groups and people name."""
        return f"slack:{self.team_id}/{self.user_id}"


class ButtonDecision(_Model):
    """The decision that a button stands for."""

    decision: DecisionKind
    revision: str = Field(min_length=1, max_length=128)
    event_id: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Click:
    """A click on a decision button.

    ``message_ref`` identifies the message as `relay.chat.platforms.slack.channel` does.
    ``trigger_id`` is unique to each click.
    """

    actor: Actor
    message_ref: str
    trigger_id: str
    action: ButtonDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A slash command. ``text`` is what the person typed behind its name."""

    actor: Actor
    text: str


def parse_click(payload: Any) -> Click | None:
    """Return a click; None for one on a button that opens a page. Raises Unreadable."""
    interaction = _validate(_BlockActions, payload)
    action, container = interaction.actions[0], interaction.container
    if action.action_id.startswith(LINK_ACTION_PREFIX):
        return None
    if container.channel_id != interaction.channel.id or container.is_ephemeral:
        raise Unreadable("expected a click on a message of the channel, it was on another")
    # As `blocks.button_value` joins them.
    names = ("decision", "revision", "event_id")
    decision = _validate(ButtonDecision, dict(zip(names, action.value.split(" ", 2), strict=False)))
    return Click(
        actor=Actor(
            team_id=interaction.team.id,
            home_team_id=interaction.user.team_id or interaction.team.id,
            user_id=interaction.user.id,
            app_id=interaction.api_app_id,
            channel_id=interaction.channel.id,
        ),
        message_ref=f"{container.channel_id}/{container.message_ts}",
        trigger_id=interaction.trigger_id,
        action=decision,
    )


def parse_command(payload: Any) -> Command:
    """Return a command. Raises Unreadable."""
    command = _validate(_SlashCommand, payload)
    return Command(
        actor=Actor(
            team_id=command.team_id,
            home_team_id=command.team_id,
            user_id=command.user_id,
            app_id=command.api_app_id,
            channel_id=command.channel_id,
        ),
        text=command.text,
    )


def _validate(model: type[_ModelType], document: Any) -> _ModelType:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        path, message = first_error_path_and_message(error)
        raise Unreadable(f"{path or 'the payload'}: {message}") from None


class _User(_Model):
    id: _Id
    team_id: _Id | None = None


class _TeamOrChannel(_Model):
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
    team: _TeamOrChannel
    channel: _TeamOrChannel
    api_app_id: _Id
    container: _Container
    trigger_id: _TriggerId
    actions: list[_Action] = Field(min_length=1, max_length=1)


class _SlashCommand(_Model):
    command: str = Field(pattern=r"^/\S{1,64}$")
    text: str = Field(default="", max_length=4000)
    team_id: _Id
    user_id: _Id
    channel_id: _Id
    api_app_id: _Id
