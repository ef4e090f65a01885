"""Who somebody is, by Slack's own word: the workspace that the app is installed in, and its full members.

Source: https://docs.slack.dev/reference/objects/user-object. Names are never looked at: anybody can take any.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from relay.chat.platforms.slack.payloads import Actor
from relay.chat.platforms.slack.web import WebApi
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError, RelayError

PATIENCE = 1.5
"""Seconds that Slack may take to say who somebody is: it waits three for our answer itself."""
BELIEVED = 60.0
"""Seconds that a full member is believed to be one still."""
_MOST = 500
_ID = re.compile(r"[A-Z0-9]{2,32}")
_MUST_BE_FALSE = {
    "deleted": "your account is deactivated",
    "is_bot": "an app cannot decide",
    "is_restricted": "guests cannot decide",
    "is_ultra_restricted": "guests cannot decide",
}
"""What Slack says of every member, and why it is refused where it is true."""
_MAY_BE_FALSE = {
    "is_stranger": "people of other workspaces cannot decide",
    "is_app_user": "an app cannot decide",
    "is_workflow_bot": "a workflow cannot decide",
    "is_connector_bot": "an app cannot decide",
}
"""What it leaves out for most."""


class NotAuthorized(RelayError):
    """Somebody who must not decide; the text is for them."""


class IdentityUnavailable(RelayError):
    """It cannot be found out now who it is. The text is for our log."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the app is installed, and as whom."""

    team: str
    enterprise: str | None
    bot: str


class MemberDirectory:
    """Asks Slack, and remembers for a moment."""

    def __init__(self, api: WebApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._here: tuple[str, Workspace] | None = None
        self._app: tuple[str, str] | None = None
        self._members: OrderedDict[tuple[str, str], float] = OrderedDict()
        # Many clicks at once are one question: whoever waits for it finds its answer remembered.
        self._asking = asyncio.Lock()
        self._asking_about: WeakValueDictionary[tuple[str, str], asyncio.Lock] = (
            WeakValueDictionary()
        )

    async def team(self) -> str:
        """The id of the workspace. Raises Deferred."""
        return (await self._workspace(None)).team

    async def app(self) -> str:
        """The id of the app that the token is of. Raises Deferred."""
        bot = (await self._workspace(None)).bot
        async with self._asking:
            if self._app is None or self._app[0] != bot:
                answer = await self._api.call(self._api.methods.bots_info, bot=bot)
                found = answer.get("bot")
                self._app = (bot, _id(found if isinstance(found, dict) else {}, "app_id"))
            return self._app[1]

    async def prefetch(self, by: Actor) -> str:
        """The workspace, where the call came from it and for this app. Raises Unwelcome, NotKnown."""
        try:
            here = await self._workspace(PATIENCE)
            app = await self.app()
        except DeliveryError as error:
            raise IdentityUnavailable(error.reason) from None
        # In an organisation somebody's home can be another of its workspaces; whether they belong to this one, `vouch` finds out.
        if by.team != here.team or (by.home != here.team and here.enterprise is None):
            raise NotAuthorized("people of other workspaces cannot decide")
        if by.app != app:
            raise IdentityUnavailable(
                f"the call is for the app {by.app}, the token is of {app}: take all secrets from one app"
            )
        return here.team

    async def require_member(self, by: Actor) -> None:
        """Return if it is a full member of the workspace. Raises Unwelcome, NotKnown."""
        key = (by.team, by.user)
        async with self._asking_about.setdefault(key, asyncio.Lock()):
            if self._clock.monotonic() - self._members.get(key, -BELIEVED) >= BELIEVED:
                await self._ask(by)
                self._members[key] = self._clock.monotonic()
                while len(self._members) > _MOST:
                    self._members.popitem(last=False)

    async def _ask(self, by: Actor) -> None:
        try:
            here = await self._workspace(PATIENCE)
            answer = await self._api.call(
                self._api.methods.users_info, seconds=PATIENCE, user=by.user
            )
        except DeliveryError as error:
            raise IdentityUnavailable(error.reason) from None
        refusal = membership_refusal(answer.get("user"), by.user, here)
        if refusal is not None:
            raise NotAuthorized(refusal)

    async def _workspace(self, seconds: float | None) -> Workspace:
        async with self._asking:
            token = self._api.token()
            if self._here is None or self._here[0] != token:
                answer = await self._api.call(self._api.methods.auth_test, seconds=seconds)
                enterprise = answer.get("enterprise_id")
                found = Workspace(
                    _id(answer, "team_id"),
                    enterprise if isinstance(enterprise, str) else None,
                    _id(answer, "bot_id"),
                )
                self._here = (token, found)
            return self._here[1]


def membership_refusal(user: Any, asked: str, here: Workspace) -> str | None:
    """Why somebody must not decide, by Slack's own record of them; None for a full member of the workspace. Pure."""
    if not isinstance(user, dict) or user.get("id") != asked:
        return "Slack does not know you"
    for name, reason in _MUST_BE_FALSE.items():
        if user.get(name) is not False:
            return reason
    for name, reason in _MAY_BE_FALSE.items():
        if user.get(name, False) is not False:
            return reason
    if user.get("team_id") != here.team and not _in_same_enterprise(user, here):
        return "people of other workspaces cannot decide"
    return None


def _in_same_enterprise(user: Mapping[str, Any], here: Workspace) -> bool:
    """Whether somebody of the same organisation belongs to this workspace too."""
    found = user.get("enterprise_user")
    if (
        here.enterprise is None
        or not isinstance(found, dict)
        or found.get("enterprise_id") != here.enterprise
    ):
        return False
    teams = found.get("teams")
    return isinstance(teams, list) and here.team in teams


def _id(answer: Mapping[str, Any], name: str) -> str:
    found = answer.get(name)
    if not isinstance(found, str) or _ID.fullmatch(found) is None:
        raise Deferred(
            f"expected {name} in Slack's answer, it was not there: is token a bot token, and api_url Slack's Web API?"
        )
    return found
