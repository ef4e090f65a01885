"""Checks with the Mattermost server who somebody is, before that person decides anything.

A call of Mattermost proves nothing about its user. Guests, bots, deactivated accounts and people of
other servers must not decide, whatever the rules say.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from relay.approvals.request import Caller
from relay.chat.context import ChatDecisionSubmitter
from relay.chat.platforms.mattermost import api as mattermost_api
from relay.chat.platforms.mattermost.api import MattermostApi
from relay.chat.platforms.mattermost.settings import Settings
from relay.clock import Clock
from relay.errors import Deferred, RelayError

CHECK_LIFETIME = 30.0
"""Seconds for which a successful check of a person is reused."""
MAX_CHECKED = 1000
_TEAM_ID = re.compile(r"[a-z0-9]{26}")


class NotDecided(RelayError):
    """Why nothing was decided. Only the person who clicked sees it."""


class NotEligible(NotDecided):
    """The person must not decide."""


class Members:
    """Knows the members of a sink's channel, and remembers who may decide."""

    def __init__(self, api: MattermostApi, settings: Settings, clock: Clock) -> None:
        self._api = api
        self._settings = settings
        self._clock = clock
        self._team: tuple[str, float] = ("", 0.0)
        """The team of the channel, and until when to believe it."""
        self._eligible_until: dict[str, float] = {}

    async def caller(self, user_id: str, decisions: ChatDecisionSubmitter) -> Caller:
        """Return the caller that may submit decisions for a person.

        The server is not asked about a person whom no rule names. Raises NotEligible, and Deferred
        if the server does not answer.
        """
        seconds = mattermost_api.LOOKUP_TIMEOUT
        try:
            async with asyncio.timeout(seconds):
                principal = f"mattermost:{await self._team_id()}/{user_id}"
                caller = decisions.caller(principal, self._settings)
                if caller is None:
                    raise NotEligible(
                        "You are not among those who decide here: nothing was decided. "
                        f"Your principal is `{principal}`."
                    )
                await self._check(user_id)
        except TimeoutError:
            raise Deferred(
                f"expected Mattermost to identify a person within {seconds:g} s, it did not answer"
            ) from None
        return caller

    async def _team_id(self) -> str:
        team_id, expires_at = self._team
        now = self._clock.monotonic()
        if team_id and now < expires_at:
            return team_id
        found = (await self._fetch(f"channels/{self._settings.channel}")).get("team_id")
        if not isinstance(found, str) or _TEAM_ID.fullmatch(found) is None:
            raise NotEligible(
                "Nobody can decide here: this channel belongs to no team, as direct messages do "
                "not, and a vote names a team."
            )
        self._team = (found, now + CHECK_LIFETIME)
        return found

    async def _check(self, user_id: str) -> None:
        now = self._clock.monotonic()
        if now < self._eligible_until.get(user_id, now):
            return
        channel_id = self._settings.channel
        user = await self._fetch(f"users/{user_id}")
        member = await self._fetch(f"channels/{channel_id}/members/{user_id}")
        problem = eligibility_problem(user, member, user_id=user_id, channel_id=channel_id)
        if problem is not None:
            raise NotEligible(f"{problem}: nothing was decided.")
        if len(self._eligible_until) >= MAX_CHECKED:
            self._eligible_until.clear()
        self._eligible_until[user_id] = now + CHECK_LIFETIME

    async def _fetch(self, path: str) -> Mapping[str, Any]:
        """Return an object of the API; an empty one if it does not exist. Raises Deferred."""
        response = await self._api.call("GET", path)
        if response.ok and isinstance(response.json, dict):
            return response.json
        if response.http.status == 404:  # HTTP
            return {}
        raise self._api.delivery_error(response)


def eligibility_problem(
    user: Mapping[str, Any], member: Mapping[str, Any], *, user_id: str, channel_id: str
) -> str | None:
    """Return why a person must not decide; None for an eligible person. Pure.

    ``user`` and ``member`` are the objects that the server returned for the user and for the
    membership in the channel. A missing or unclear field counts against the person, except for
    ``is_bot``, ``remote_id`` and ``scheme_guest``, which the server may omit.
    """
    if user.get("id") != user_id or user.get("delete_at") != 0:
        return "Your account is not an active one of this server"
    if user.get("is_bot", False) is not False or user.get("remote_id"):
        return "Only people of this server can decide, no bots and nobody of another server"
    roles = user.get("roles")
    if not isinstance(roles, str) or "system_guest" in roles.split():
        return "Guests cannot decide"
    if member.get("user_id") != user_id or member.get("channel_id") != channel_id:
        return "You are not a member of this channel"
    channel_roles = str(member.get("roles")).split()
    if member.get("scheme_guest", False) is not False or "channel_guest" in channel_roles:
        return "Guests cannot decide"
    return None
