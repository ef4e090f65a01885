"""Posts, edits and replies in one channel of Mattermost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relay.chat import raise_deferred_if_secret_unusable
from relay.chat.cards.card import Button, Card, PrincipalRef, Text
from relay.chat.platforms.mattermost.api import MattermostApi
from relay.chat.platforms.mattermost.interactions import Interactions
from relay.chat.platforms.mattermost.post_rendering import attachments, thread_message
from relay.chat.platforms.mattermost.user_names import UserNames


class Channel:
    """The `relay.chat.live_message.ChatPlatform` of one channel.

    ``interactions`` is None if nobody decides in the chat. ``session_id`` is a text that no other
    sink has, and that this sink does not have again after a restart.
    """

    def __init__(
        self,
        api: MattermostApi,
        user_names: UserNames,
        interactions: Interactions | None,
        *,
        session_id: str,
    ) -> None:
        self._api = api
        self._user_names = user_names
        self._interactions = interactions
        self._session_id = session_id

    async def post(self, card: Card) -> str:
        """Post a card and return the post's id. Raises Deferred.

        A repeat after a lost answer does not make a second post.
        """
        return await self._api.create_post(
            {
                "message": "",
                "props": await self._post_props(card),
                "pending_post_id": self._make_pending_post_id(card),
            }
        )

    async def edit(self, ref: str, card: Card) -> None:
        """Replace the card of a post. Raises MessageGone, Deferred."""
        await self._api.patch_post(ref, {"props": await self._post_props(card)})

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        """Reply to a post; post to the channel if ``ref`` is None. Raises MessageGone, Deferred."""
        names = await self._user_names.find_names_by_principal(_mentioned_principals(lines))
        await self._api.create_post(
            {
                "message": thread_message(lines, names),
                "root_id": ref or "",
                "pending_post_id": self._make_pending_post_id((ref, *lines)),
            }
        )

    async def _post_props(self, card: Card) -> Mapping[str, Any]:
        texts = [card.summary, *card.notes]
        texts += [text for _, text in card.facts]
        texts += [line.text for line in card.lines]
        names = await self._user_names.find_names_by_principal(_mentioned_principals(texts))
        return {"attachments": attachments(card, names, self._integration)}

    def _make_pending_post_id(self, content: object) -> str:
        """Return the id by which the server recognizes a repeated post for half a minute.

        The server compares it across channels, so it depends on the session.
        """
        return hashlib.sha256(f"{self._session_id}\n{content!r}".encode()).hexdigest()

    def _integration(self, button: Button) -> Mapping[str, Any]:
        assert self._interactions is not None  # noqa: S101  # otherwise every button has a link
        with raise_deferred_if_secret_unusable("secret"):
            return self._interactions.build_integration(button)


def _mentioned_principals(texts: Iterable[Text]) -> set[str]:
    return {part.principal for text in texts for part in text if isinstance(part, PrincipalRef)}
