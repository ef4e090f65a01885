"""Answers clicks and commands: passes decisions to the gate, and lists events with links.

A click is checked in this order: who clicked, whether this sink made the button, and then whether
the gate accepts the decision. A stranger's click therefore has no effect. The command decides
nothing. Full members of the app's workspace may decide. Names are never used to identify anybody,
because everybody can choose any name. Sources:
https://docs.slack.dev/reference/interaction-payloads/block_actions-payload,
https://docs.slack.dev/interactivity/implementing-slash-commands and
https://docs.slack.dev/reference/objects/user-object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from relay.approvals.request import DecisionKind
from relay.chat.cards import event_line, not_before_order
from relay.chat.cards.card import event_page
from relay.chat.context import ChatContext
from relay.chat.platforms.slack.api import Settings, WebApi, Workspace
from relay.chat.platforms.slack.messages import LINK_ACTION_PREFIX, Json, text_message
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError, RelayError, StoreUnavailable
from relay.logs import throttled_sink_log
from relay.sentences import Text
from relay.settings import first_error_path_and_message

LOOKUP_TIMEOUT = 1.5
"""Seconds in which Slack must identify a person: Slack waits three seconds for the relay's answer.
See https://docs.slack.dev/interactivity/handling-user-interaction."""
MAX_LISTED_EVENTS = 15
"""Events that a list names; the rest are counted."""
_INVALID_BUTTON = (
    "These buttons are no longer valid, so nothing was decided. Look at the newest message."
)
_log = logging.getLogger(__name__)
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
        pattern=r"^[0-9]{1,12}\.[0-9]{1,9}$", validation_alias=AliasPath("container", "message_ts")
    )
    trigger_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")
    action_id: str = Field(max_length=255, validation_alias=AliasPath("actions", 0, "action_id"))
    value: str = Field("", max_length=2000, validation_alias=AliasPath("actions", 0, "value"))

    @property
    def message_ref(self) -> str:
        """The message, as `messages.Channel` names it."""
        return f"{self.channel_id}/{self.message_ts}"


class Command(Actor):
    """A slash command. ``text`` is what the person typed behind its name."""

    text: str = Field("", max_length=4000)


def parse_click(payload: Any) -> tuple[Click, ButtonDecision | None]:
    """Return a click and its decision; None if the button opens a page. Raises Unreadable."""
    click = _validate(Click, payload)
    if click.action_id.startswith(LINK_ACTION_PREFIX):
        return click, None
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


@dataclass(frozen=True, slots=True)
class Reply:
    actor: Actor
    message: Json


class Answers:
    def __init__(self, settings: Settings, context: ChatContext, api: WebApi, clock: Clock) -> None:
        self._settings = settings
        self._context = context
        self._api = api
        self._warn = throttled_sink_log(_log, clock, settings.name)

    async def answer(self, envelope: Mapping[str, Any]) -> Reply | None:
        """Do what an envelope asks for. A decision is on disk when this returns."""
        payload, action = envelope.get("payload"), None
        try:
            match envelope.get("type"):
                case "interactive":
                    actor: Click | Command
                    actor, action = parse_click(payload)
                case "slash_commands":
                    actor = parse_command(payload)
                case _:
                    return None
        except Unreadable as error:
            self._warn(f"ignored an unreadable envelope: {error}")
            return None
        try:
            if isinstance(actor, Command):
                return Reply(actor, await self._list(actor))
            problem = await self._decide(actor, action) if action is not None else None
            if problem is None:
                return None  # the message in the channel shows the decision
        except NotAuthorized as error:
            self._warn(f"{actor.principal} was refused: {error}")
            problem = f"Nothing was decided: {error}."
        except DeliveryError as error:
            self._warn(f"Slack cannot identify {actor.principal}: {error.reason}")
            problem = (
                "Slack cannot tell now who you are, so nothing was decided. Try again in a moment."
            )
        except StoreUnavailable:
            problem = (
                "The relay cannot read its records now, so nothing was decided. "
                "Try again in a moment."
            )
        return Reply(actor, text_message([(problem,)], actor.team_id))

    async def _decide(self, click: Click, action: ButtonDecision) -> str | None:
        """Return why nothing was decided. Raises NotAuthorized, DeliveryError, StoreUnavailable."""
        if not self._settings.approve_in_chat:
            raise NotAuthorized("decisions are taken on the page behind the links")
        decisions = self._context.decisions
        caller = decisions.caller(click.principal, self._settings)
        if caller is None:  # Slack is not asked about strangers
            raise NotAuthorized(f"no rule of this relay names you, {click.principal}")
        await self._check_member(click)
        status = await self._context.messages.find_status_of_shown_event(
            self._settings.name, click.message_ref, action.event_id
        )
        if status is None:
            return _INVALID_BUTTON
        answer = await decisions.decide(
            caller,
            event_id=action.event_id,
            decision=action.decision,
            revision=action.revision,
            request_id=f"slack {click.trigger_id}",
        )
        if answer.accepted:
            return None
        return f"Nothing was decided: {answer.body.get('detail') or 'the relay refuses it'}."

    async def _list(self, command: Command) -> Json:
        """Return the live events, or those whose EventIds begin as the person typed."""
        if command.channel_id != self._settings.channel:
            raise NotAuthorized(
                "the command works in the channel in which the relay shows its events"
            )
        await self._check_member(command)
        beginning = command.text.strip().lower()
        beginning = "" if beginning == "list" else beginning
        listed = sorted(
            (
                status
                for status in await self._context.messages.live_statuses(self._settings)
                if status.occurrence.event.event_id.lower().startswith(beginning)
            ),
            key=not_before_order,
        )
        shown = listed[:MAX_LISTED_EVENTS]
        lines: list[Text] = [
            (f"{status.occurrence.event.event_id[:8]}: ", *event_line(status)) for status in shown
        ]
        if len(listed) > MAX_LISTED_EVENTS:
            lines.append((f"… and {len(listed) - MAX_LISTED_EVENTS} more.",))
        elif not listed and beginning:
            lines.append((f"No event of the document begins with {beginning}.",))
        elif not listed:
            lines.append(("Azure has announced nothing.",))
        url = self._context.public_url
        pages = [event_page(url, status) for status in shown] if url is not None else []
        return text_message(lines, command.team_id, pages)

    async def _check_member(self, actor: Actor) -> None:
        """Raise NotAuthorized for who is no full member; DeliveryError if Slack cannot say."""
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                workspace = await self._api.workspace()
                if actor.team_id != workspace.team_id:
                    raise NotAuthorized(_OTHER_WORKSPACE)
                response = await self._api.call("users.info", {"user": actor.user_id})
        except TimeoutError:
            raise Deferred(f"no answer within {LOOKUP_TIMEOUT:g} s") from None
        refusal = membership_refusal(response.get("user"), actor.user_id, workspace)
        if refusal is not None:
            raise NotAuthorized(refusal)
