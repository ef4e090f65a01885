"""Looks up the names of Mattermost users, which messages show instead of their ids.

Names are for readers only. They never identify anybody: `identity` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from relay.chat.platforms.mattermost.api import MattermostApi
from relay.clock import Clock
from relay.errors import Deferred

NAME_CACHE_LIFETIME = 3600.0
"""Seconds for which a name is shown before it is looked up again."""
MAX_CACHED_NAMES = 1000
_MAX_USERS_PER_CALL = 30
"""The response must fit into the 64 KiB of a body that are read."""
_PRINCIPAL = re.compile(r"mattermost:[a-z0-9]{26}/([a-z0-9]{26})")


class UserNames:
    """Finds names, and caches them. A message waits ``lookup_timeout`` seconds for them."""

    def __init__(self, api: MattermostApi, clock: Clock, *, lookup_timeout: float) -> None:
        self._api = api
        self._clock = clock
        self._lookup_timeout = lookup_timeout
        self._cache: dict[str, tuple[str, float]] = {}
        """The name by user id, empty if the server knows none, and when to look it up again."""

    async def find_names_by_principal(self, principals: Iterable[str]) -> Mapping[str, str]:
        """Return the user names by principal, as far as the server knows them.

        Principals of other kinds are left out. Never raises: a message with ids is better than no
        message.
        """
        user_ids = {}
        for principal in principals:
            match = _PRINCIPAL.fullmatch(principal)
            if match is not None:
                user_ids[principal] = match[1]
        await self._refresh(set(user_ids.values()))
        names = {
            principal: self._cached_name_and_expiry(user_id)[0]
            for principal, user_id in user_ids.items()
        }
        return {principal: name for principal, name in names.items() if name}

    def _cached_name_and_expiry(self, user_id: str) -> tuple[str, float]:
        return self._cache.get(user_id, ("", -1.0))

    async def _refresh(self, user_ids: set[str]) -> None:
        now = self._clock.monotonic()
        outdated = sorted(
            user_id for user_id in user_ids if now >= self._cached_name_and_expiry(user_id)[1]
        )
        outdated = outdated[:_MAX_USERS_PER_CALL]
        names = await self._request_names_by_user_id(outdated) if outdated else None
        if names is None:
            return
        if len(self._cache) >= MAX_CACHED_NAMES:
            self._cache.clear()
        for user_id in outdated:
            self._cache[user_id] = (names.get(user_id, ""), now + NAME_CACHE_LIFETIME)

    async def _request_names_by_user_id(self, user_ids: list[str]) -> dict[str, str] | None:
        """Return names by user id; None if the server does not answer."""
        try:
            response = await self._api.call(
                "POST", "users/ids", user_ids, within=self._lookup_timeout
            )
        except Deferred:
            return None
        if not response.ok or not isinstance(response.json, list):
            return None
        users = [user for user in response.json if isinstance(user, dict)]
        return {
            str(user.get("id")): str(user["username"]) for user in users if user.get("username")
        }
