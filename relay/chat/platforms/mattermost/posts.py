"""Posts, edits and replies in one channel of Mattermost, and the names of people in them."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relay.chat import raise_deferred_if_secret_unusable
from relay.chat.cards.card import Button, Card, PrincipalRef, Text
from relay.chat.platforms.mattermost.api import MattermostApi
from relay.chat.platforms.mattermost.clicks import Clicks
from relay.chat.platforms.mattermost.markdown import attachments, thread_message
from relay.clock import Clock
from relay.errors import Deferred

NAME_LIFETIME = 3600.0
"""Seconds for which a name is shown before it is looked up again."""
MAX_NAMES = 1000
_MAX_USERS_PER_CALL = 30
"""The response must fit into the 64 KiB of a body that are read."""
_PRINCIPAL = re.compile(r"mattermost:[a-z0-9]{26}/([a-z0-9]{26})")


class Channel:
    """The `relay.chat.live_message.ChatPlatform` of one channel.

    ``clicks`` is None if nobody decides in the chat.
    """

    def __init__(self, api: MattermostApi, clock: Clock, clicks: Clicks | None) -> None:
        self._api = api
        self._names = UserNames(api, clock)
        self._clicks = clicks
        # The server compares ids of pending posts across channels.
        self._session_id = secrets.token_hex(8)

    async def post(self, card: Card) -> str:
        """Post a card and return the post's id. Raises Deferred.

        A repeat after a lost answer does not make a second post.
        """
        return await self._api.create_post(
            {
                "message": "",
                "props": await self._props(card),
                "pending_post_id": self._pending_post_id(card),
            }
        )

    async def edit(self, ref: str, card: Card) -> None:
        """Replace the card of a post. Raises MessageGone, Deferred."""
        await self._api.patch_post(ref, {"props": await self._props(card)})

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        """Reply to a post; post to the channel if ``ref`` is None. Raises MessageGone, Deferred."""
        await self._api.create_post(
            {
                "message": thread_message(lines, await self._names.find(lines)),
                "root_id": ref or "",
                "pending_post_id": self._pending_post_id((ref, *lines)),
            }
        )

    async def _props(self, card: Card) -> Mapping[str, Any]:
        texts = [card.summary, *card.notes]
        texts += [text for _, text in card.facts]
        texts += [line.text for line in card.lines]
        return {"attachments": attachments(card, await self._names.find(texts), self._integration)}

    def _pending_post_id(self, content: object) -> str:
        """Return the id by which the server recognizes a repeated post for half a minute."""
        return hashlib.sha256(f"{self._session_id}\n{content!r}".encode()).hexdigest()

    def _integration(self, button: Button) -> dict[str, Any]:
        assert self._clicks is not None  # noqa: S101  # otherwise every button has a link
        with raise_deferred_if_secret_unusable("secret"):
            return self._clicks.integration(button)


class UserNames:
    """Finds the names of users, which messages show instead of their ids. They identify nobody."""

    def __init__(self, api: MattermostApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}
        """The name by user id, empty if the server knows none, and when to look it up again."""

    async def find(self, texts: Iterable[Text]) -> Mapping[str, str]:
        """Return the names of people in texts by principal, as far as the server knows them.

        Never raises: a message with ids is better than no message.
        """
        pieces = (piece for text in texts for piece in text)
        principals = {piece.principal for piece in pieces if isinstance(piece, PrincipalRef)}
        matches = map(_PRINCIPAL.fullmatch, principals)
        ids = {match[0]: match[1] for match in matches if match is not None}
        await self._look_up({*ids.values()})
        names = {principal: self._known.get(id_, ("", 0.0))[0] for principal, id_ in ids.items()}
        return {principal: name for principal, name in names.items() if name}

    async def _look_up(self, ids: set[str]) -> None:
        now = self._clock.monotonic()
        outdated = [id_ for id_ in ids if now >= self._known.get(id_, ("", -1.0))[1]]
        outdated = outdated[:_MAX_USERS_PER_CALL]
        if not outdated:
            return
        try:
            response = await self._api.call("POST", "users/ids", outdated, is_brief=True)
        except Deferred:
            return
        if not response.ok or not isinstance(response.json, list):
            return
        if len(self._known) >= MAX_NAMES:
            self._known.clear()
        found = {user.get("id"): user for user in response.json if isinstance(user, dict)}
        for id_ in outdated:
            name = str(found.get(id_, {}).get("username") or "")
            self._known[id_] = (name, now + NAME_LIFETIME)
