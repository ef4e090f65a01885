"""Who a person of Mattermost is: asked of the server itself, with the bot's token, before anything is decided.

What a call says of its user proves nothing; and of those whom the server knows, not everybody may answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from relay.chat.platforms.mattermost.api import Api
from relay.clock import Clock
from relay.errors import Deferred, RelayError

LOOK_UP = 5.0
"""Seconds that the server has to say who somebody is: whoever clicks is waiting."""
GOOD_FOR = 30.0
"""Seconds for which what the server said of a person holds."""
NAMES_FOR = 3600.0
"""Seconds for which a name is shown before it is looked up again. Names are for readers alone."""
_MOST = 1000  # people that are remembered
_AT_ONCE = 30  # names that are asked for in one call: its answer is read as far as 64 KiB
_Value = TypeVar("_Value")
_PRINCIPAL = re.compile(r"mattermost:[a-z0-9]{26}/([a-z0-9]{26})")


class NotEligible(RelayError):
    """Somebody who cannot answer here, whatever the rules say. The text is for that person."""


class MemberDirectory:
    """What the server says of people, for a moment."""

    def __init__(self, api: Api, channel: str, clock: Clock) -> None:
        self._api = api
        self._channel = channel
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}
        self._names: dict[str, tuple[str | None, float]] = {}

    async def principal(self, user: str) -> str:
        """``mattermost:<team>/<user>``, the team being the channel's. Raises NotHere, and Deferred where the server does not say."""
        known, now = self._known.get(user), self._clock.monotonic()
        if known is not None and now < known[1]:
            return known[0]
        try:
            async with asyncio.timeout(LOOK_UP):
                channel = await self._find(f"channels/{self._channel}")
                person = await self._find(f"users/{user}")
                member = await self._find(f"channels/{self._channel}/members/{user}")
        except TimeoutError:
            raise Deferred(
                f"expected Mattermost to say within {LOOK_UP:g} s who somebody is, it did not"
            ) from None
        principal = f"mattermost:{_team(channel)}/{_person(person, member, user, self._channel)}"
        _remember(self._known, user, (principal, now + GOOD_FOR))
        return principal

    async def names(self, principals: Iterable[str]) -> Mapping[str, str]:
        """The user names of these principals, as far as they are people of Mattermost and the server says them now."""
        users = {
            principal: found[1]
            for principal in principals
            if (found := _PRINCIPAL.fullmatch(principal)) is not None
        }
        now = self._clock.monotonic()
        unknown = sorted(
            {
                user
                for user in users.values()
                if user not in self._names or now >= self._names[user][1]
            }
        )[:_AT_ONCE]
        if unknown:
            found_names = await self._look_up(unknown)
            for user in unknown if found_names is not None else ():
                _remember(self._names, user, ((found_names or {}).get(user), now + NAMES_FOR))
        shown = {
            principal: self._names[user][0]
            for principal, user in users.items()
            if user in self._names
        }
        return {principal: name for principal, name in shown.items() if name}

    async def _look_up(self, users: list[str]) -> dict[str, str] | None:
        try:
            said = await self._api.ask("POST", "users/ids", users, seconds=LOOK_UP)
        except Deferred:
            return None  # a message with ids in place of names is better than none
        if not said.ok or not isinstance(said.found, list):
            return None
        people = [one for one in said.found if isinstance(one, dict)]
        return {str(one.get("id")): str(one["username"]) for one in people if one.get("username")}

    async def _find(self, path: str) -> Mapping[str, Any] | None:
        """What is there; None where nothing is. Raises Deferred where the server does not say."""
        said = await self._api.ask("GET", path, seconds=LOOK_UP)
        if said.ok and isinstance(said.found, dict):
            return said.found
        if said.response.status == 404:  # HTTP
            return None
        raise self._api.delivery_error(said)


def _team(channel: Mapping[str, Any] | None) -> str:
    team = channel.get("team_id") if channel is not None else None
    if not isinstance(team, str) or re.fullmatch(r"[a-z0-9]{26}", team) is None:
        raise NotEligible(
            "Nobody can answer here: this channel belongs to no team, as direct messages do not, and a vote is one of a person in a team."
        )
    return team


def _person(
    person: Mapping[str, Any] | None, member: Mapping[str, Any] | None, user: str, channel: str
) -> str:
    """The user's id, of one who may answer. What is not said clearly counts as refused."""
    if person is None or person.get("id") != user or person.get("delete_at") != 0:
        raise NotEligible("Your account is not an active one of this server: nothing was decided.")
    roles = person.get("roles")
    if person.get("is_bot", False) is not False or person.get("remote_id"):
        raise NotEligible(
            "Only people of this server itself can answer, no bots and nobody of another server: nothing was decided."
        )
    if not isinstance(roles, str) or "system_guest" in roles.split():
        raise NotEligible("Guests cannot answer: nothing was decided.")
    if member is None or member.get("user_id") != user or member.get("channel_id") != channel:
        raise NotEligible("You are not a member of this channel: nothing was decided.")
    if (
        member.get("scheme_guest", False) is not False
        or "channel_guest" in str(member.get("roles")).split()
    ):
        raise NotEligible("Guests cannot answer: nothing was decided.")
    return user


def _remember(table: dict[str, _Value], user: str, value: _Value) -> None:
    if len(table) >= _MOST:
        table.clear()
    table[user] = value
