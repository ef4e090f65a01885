"""Reads what people send from Slack, and knows who may: full members of the app's workspace.

Names are never used to identify anybody, because everybody can choose any name. Sources:
https://docs.slack.dev/reference/interaction-payloads/block_actions-payload,
https://docs.slack.dev/interactivity/implementing-slash-commands and
https://docs.slack.dev/reference/objects/user-object.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from relay.approvals.request import DecisionKind
from relay.chat.platforms.slack.api import WebApi
from relay.errors import Deferred, RelayError
from relay.settings import first_error_path_and_message

LINK_ACTION_PREFIX = "link-"
"""Starts the action_id of a button that opens a page. Slack reports its clicks, too."""
_ModelType = TypeVar("_ModelType", bound=BaseModel)
_Id = Annotated[str, Field(pattern=r"^[A-Z0-9]{2,32}$")]


class Unreadable(RelayError):
    """What came is neither a click on a button of a relay nor a command."""


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)


class Actor(_Model):
    """Who clicked or typed, and where, as Slack reports it."""

    team_id: _Id
    user_id: _Id
    channel_id: _Id

    @property
    def principal(self) -> str:
        return f"slack:{self.team_id}/{self.user_id}"


class ButtonDecision(_Model):
    decision: DecisionKind
    revision: str = Field(min_length=1, max_length=128)
    event_id: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")


class Click(Actor):
    """A click on a button of a message. ``trigger_id`` is unique to each click."""

    type: Literal["block_actions"]
    team_id: _Id = Field(validation_alias=AliasPath("team", "id"))
    user_id: _Id = Field(validation_alias=AliasPath("user", "id"))
    channel_id: _Id = Field(validation_alias=AliasPath("container", "channel_id"))
    message_ts: str = Field(
        pattern=r"^[0-9]{1,12}\.[0-9]{1,9}$",
        validation_alias=AliasPath("container", "message_ts"),
    )
    trigger_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")
    action_id: str = Field(max_length=255, validation_alias=AliasPath("actions", 0, "action_id"))
    value: str = Field("", max_length=2000, validation_alias=AliasPath("actions", 0, "value"))

    @property
    def message_ref(self) -> str:
        """The message, as `relay.chat.platforms.slack.messages.Channel` names it."""
        return f"{self.channel_id}/{self.message_ts}"


class Command(Actor):
    """A slash command. ``text`` is what the person typed behind its name."""

    command: str = Field(pattern=r"^/\S{1,64}$")
    text: str = Field("", max_length=4000)


def parse_click(payload: Any) -> tuple[Click, ButtonDecision] | None:
    """Return a click and its decision; None if the button opens a page. Raises Unreadable."""
    click = _validate(Click, payload)
    if click.action_id.startswith(LINK_ACTION_PREFIX):
        return None
    values = zip(ButtonDecision.model_fields, click.value.split(" ", 2), strict=False)
    return click, _validate(ButtonDecision, dict(values))  # as `messages.button_value` joins them


def parse_command(payload: Any) -> Command:
    return _validate(Command, payload)


def _validate(model: type[_ModelType], document: Any) -> _ModelType:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        path, message = first_error_path_and_message(error)
        raise Unreadable(f"{path or 'the payload'}: {message}") from None


LOOKUP_TIMEOUT = 1.5
"""Seconds in which Slack must identify a person: Slack waits three seconds for the relay's answer.
See https://docs.slack.dev/interactivity/handling-user-interaction."""
_ID = re.compile(r"[A-Z0-9]{2,32}")
_OTHER_WORKSPACE = "people of other workspaces cannot decide"
_REQUIRED_FLAGS = {
    "deleted": "your account is deactivated",
    "is_bot": "an app cannot decide",
    "is_restricted": "guests cannot decide",
    "is_ultra_restricted": "guests cannot decide",
}
"""Flags that Slack sets for every user, and why a user is refused unless the flag is false."""
_OPTIONAL_FLAGS = {
    "is_stranger": _OTHER_WORKSPACE,
    "is_app_user": "an app cannot decide",
    "is_workflow_bot": "a workflow cannot decide",
    "is_connector_bot": "an app cannot decide",
}
"""Flags that Slack omits for most users. A missing flag counts as false."""


class NotAuthorized(RelayError):
    """A person must not decide. The text is shown to that person."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the app is installed. ``bot_user_id`` is the user that posts for it."""

    team_id: str
    enterprise_id: str | None
    bot_user_id: str


class Members:
    """Looks up members, and the workspace, which it remembers."""

    def __init__(self, api: WebApi) -> None:
        self._api = api
        self._workspace: tuple[str, Workspace] | None = None
        """With the token that it belongs to."""

    async def check(self, actor: Actor) -> None:
        """Return if the actor is a full member of the workspace, and it was asked there.

        Raises NotAuthorized, and DeliveryError if Slack cannot say who that is.
        """
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                workspace = await self.workspace()
                if actor.team_id != workspace.team_id:
                    raise NotAuthorized(_OTHER_WORKSPACE)
                response = await self._api.call("users.info", {"user": actor.user_id})
        except TimeoutError:
            raise Deferred(f"no answer within {LOOKUP_TIMEOUT:g} s") from None
        refusal = membership_refusal(response.get("user"), actor.user_id, workspace)
        if refusal is not None:
            raise NotAuthorized(refusal)

    async def workspace(self) -> Workspace:
        """Return the workspace of the current token. Raises Deferred."""
        token = self._api.token()
        if self._workspace is None or self._workspace[0] != token:
            response = await self._api.call("auth.test", {})
            enterprise_id = response.get("enterprise_id")
            workspace = Workspace(
                team_id=_required_id(response, "team_id"),
                enterprise_id=enterprise_id if isinstance(enterprise_id, str) else None,
                bot_user_id=_required_id(response, "user_id"),
            )
            self._workspace = token, workspace
        return self._workspace[1]


def membership_refusal(user: Any, user_id: str, workspace: Workspace) -> str | None:
    """Return why this user must not decide; None for a full member of the workspace. Pure."""
    if not isinstance(user, dict) or user.get("id") != user_id:
        return "Slack does not know you"
    for flag, reason in _REQUIRED_FLAGS.items():
        if user.get(flag) is not False:
            return reason
    for flag, reason in _OPTIONAL_FLAGS.items():
        if user.get(flag, False) is not False:
            return reason
    if user.get("team_id") == workspace.team_id:
        return None
    # A user of the same enterprise may belong to this workspace, too.
    membership = user.get("enterprise_user")
    if workspace.enterprise_id is None or not isinstance(membership, dict):
        return _OTHER_WORKSPACE
    teams = membership.get("teams")
    is_same = membership.get("enterprise_id") == workspace.enterprise_id
    belongs = is_same and isinstance(teams, list) and workspace.team_id in teams
    return None if belongs else _OTHER_WORKSPACE


def _required_id(response: Mapping[str, Any], name: str) -> str:
    value = response.get(name)
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise Deferred(
            f"expected {name} in Slack's answer, it is missing: "
            "is token a bot token, and api_url Slack's Web API?"
        )
    return value
