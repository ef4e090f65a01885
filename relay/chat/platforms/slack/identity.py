"""Decides who may use the buttons and the slash command: full members of the app's workspace.

Source: https://docs.slack.dev/reference/objects/user-object. Names are never used to identify
anybody, because everybody can choose any name.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from relay.approvals.request import Caller
from relay.chat.context import ChatDecisionSubmitter
from relay.chat.platforms.slack.requests import Actor
from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.web import WebApi
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError, RelayError

LOOKUP_TIMEOUT = 1.5
"""Seconds in which Slack must identify a person: Slack waits three seconds for the relay's answer.
See https://docs.slack.dev/interactivity/handling-user-interaction."""
MEMBER_CACHE_LIFETIME = 60.0
"""Seconds for which a successful membership check is reused."""
MAX_CACHED_MEMBERS = 500
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


class IdentityUnavailable(RelayError):
    """Slack cannot say now who a person is. The text is for the log."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the app is installed. ``bot_id`` is the app's bot there."""

    team_id: str
    enterprise_id: str | None
    bot_id: str


class MemberVerifier:
    """Looks up the workspace, the app and members, and caches what Slack says.

    ``lookup_timeout`` limits the calls that decide about a person, in seconds.
    """

    def __init__(self, api: WebApi, clock: Clock, *, lookup_timeout: float) -> None:
        self._api = api
        self._clock = clock
        self._lookup_timeout = lookup_timeout
        self._workspace_by_token: tuple[str, Workspace] | None = None
        self._app_id_by_bot: tuple[str, str] | None = None
        self._checked_at: OrderedDict[tuple[str, str], float] = OrderedDict()
        # Simultaneous clicks share one call: whoever waits for a lock finds the cached result.
        self._workspace_lock = asyncio.Lock()
        self._member_locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = (
            WeakValueDictionary()
        )

    async def team_id(self) -> str:
        """Return the id of the workspace. Raises Deferred."""
        return (await self._fetch_workspace()).team_id

    async def app_id(self) -> str:
        """Return the id of the app that the bot token belongs to. Raises Deferred."""
        bot_id = (await self._fetch_workspace()).bot_id
        async with self._workspace_lock:
            if self._app_id_by_bot is None or self._app_id_by_bot[0] != bot_id:
                response = await self._api.call(self._api.methods.bots_info, bot=bot_id)
                bot = response.get("bot")
                app_id = _required_id(bot if isinstance(bot, dict) else {}, "app_id")
                self._app_id_by_bot = (bot_id, app_id)
            return self._app_id_by_bot[1]

    async def check_full_member(self, actor: Actor) -> None:
        """Return if the actor is a full member of the workspace.

        Raises NotAuthorized, IdentityUnavailable.
        """
        async with self._lookup_failures_as_unavailable():
            await self._require_own_workspace_and_app(actor)
            await self._check_member_unless_cached(actor)

    async def require_caller(
        self, actor: Actor, decisions: ChatDecisionSubmitter, sink: Settings
    ) -> Caller:
        """Return the caller that may submit decisions for the actor.

        Does not ask Slack about a person whom no rule names. Raises NotAuthorized,
        IdentityUnavailable.
        """
        async with self._lookup_failures_as_unavailable():
            await self._require_own_workspace_and_app(actor)
            caller = decisions.caller(actor.principal, sink)
            if caller is None:
                raise NotAuthorized(f"no rule of this relay names you, {actor.principal}")
            await self._check_member_unless_cached(actor)
        return caller

    @asynccontextmanager
    async def _lookup_failures_as_unavailable(self) -> AsyncIterator[None]:
        """Raise IdentityUnavailable if a call of Slack fails, or all together take too long."""
        try:
            async with asyncio.timeout(self._lookup_timeout):
                yield
        except TimeoutError:
            raise IdentityUnavailable(f"no answer within {self._lookup_timeout:g} s") from None
        except DeliveryError as error:
            raise IdentityUnavailable(error.reason) from None

    async def _require_own_workspace_and_app(self, actor: Actor) -> None:
        """Return if the call came from the app's own workspace and is for this app."""
        workspace = await self._fetch_workspace()
        app_id = await self.app_id()
        # In an enterprise, a person's home can be another workspace of the same enterprise.
        # `_check_member` finds out whether the person belongs to this workspace, too.
        is_foreign = actor.home_team_id != workspace.team_id and workspace.enterprise_id is None
        if actor.team_id != workspace.team_id or is_foreign:
            raise NotAuthorized(_OTHER_WORKSPACE)
        if actor.app_id != app_id:
            raise IdentityUnavailable(
                f"the call is for the app {actor.app_id}, but the token belongs to the app "
                f"{app_id}: take all secrets from one app"
            )

    async def _check_member_unless_cached(self, actor: Actor) -> None:
        key = (actor.team_id, actor.user_id)
        async with self._member_locks.setdefault(key, asyncio.Lock()):
            checked_at = self._checked_at.get(key)
            now = self._clock.monotonic()
            if checked_at is not None and now - checked_at < MEMBER_CACHE_LIFETIME:
                return
            await self._check_member(actor)
            self._checked_at[key] = self._clock.monotonic()
            while len(self._checked_at) > MAX_CACHED_MEMBERS:
                self._checked_at.popitem(last=False)

    async def _check_member(self, actor: Actor) -> None:
        workspace = await self._fetch_workspace()
        response = await self._api.call(self._api.methods.users_info, user=actor.user_id)
        refusal = membership_refusal(response.get("user"), actor.user_id, workspace)
        if refusal is not None:
            raise NotAuthorized(refusal)

    async def _fetch_workspace(self) -> Workspace:
        async with self._workspace_lock:
            token = self._api.token()
            if self._workspace_by_token is None or self._workspace_by_token[0] != token:
                response = await self._api.call(self._api.methods.auth_test)
                enterprise_id = response.get("enterprise_id")
                workspace = Workspace(
                    team_id=_required_id(response, "team_id"),
                    enterprise_id=enterprise_id if isinstance(enterprise_id, str) else None,
                    bot_id=_required_id(response, "bot_id"),
                )
                self._workspace_by_token = (token, workspace)
            return self._workspace_by_token[1]


def membership_refusal(user: Any, user_id: str, workspace: Workspace) -> str | None:
    """Return why a user must not decide; None for a full member of the workspace. Pure.

    ``user`` is the user object that Slack returned for ``user_id``.
    """
    if not isinstance(user, dict) or user.get("id") != user_id:
        return "Slack does not know you"
    for flag, reason in _REQUIRED_FLAGS.items():
        if user.get(flag) is not False:
            return reason
    for flag, reason in _OPTIONAL_FLAGS.items():
        if user.get(flag, False) is not False:
            return reason
    if user.get("team_id") != workspace.team_id and not _is_enterprise_user_in_workspace(
        user, workspace
    ):
        return _OTHER_WORKSPACE
    return None


def _is_enterprise_user_in_workspace(user: Mapping[str, Any], workspace: Workspace) -> bool:
    """Return whether a user of the same enterprise belongs to this workspace, too."""
    membership = user.get("enterprise_user")
    if workspace.enterprise_id is None or not isinstance(membership, dict):
        return False
    teams = membership.get("teams")
    return (
        membership.get("enterprise_id") == workspace.enterprise_id
        and isinstance(teams, list)
        and workspace.team_id in teams
    )


def _required_id(response: Mapping[str, Any], name: str) -> str:
    value = response.get(name)
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise Deferred(
            f"expected {name} in Slack's answer, it is missing: "
            "is token a bot token, and api_url Slack's Web API?"
        )
    return value
