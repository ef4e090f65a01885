"""The platform: posts, edits and tells in one channel."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relay.chat.cards.card import Button, Card, PrincipalRef, Text
from relay.chat.platforms.mattermost.api import Api
from relay.chat.platforms.mattermost.identity import MemberDirectory
from relay.chat.platforms.mattermost.interactions import Interactions
from relay.chat.platforms.mattermost.post import attachments, thread_reply
from relay.errors import Deferred


class Channel:
    """One channel. ``answers`` None: nobody answers there. ``life``: a text that no other sink has, nor this one after a restart."""

    def __init__(
        self, api: Api, people: MemberDirectory, answers: Interactions | None, life: str
    ) -> None:
        self._api = api
        self._people = people
        self._answers = answers
        self._life = life

    async def post(self, card: Card) -> str:
        """Post the card; a try that was answered too late for us is not posted twice."""
        return await self._api.create(
            {
                "message": "",
                "props": await self._props(card),
                "pending_post_id": self._pending(card),
            }
        )

    async def edit(self, ref: str, card: Card) -> None:
        """Have a post show this card instead. Raises MessageGone."""
        await self._api.patch(ref, {"props": await self._props(card)})

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        """Reply in the post's thread; without one, post to the channel. Raises MessageGone."""
        names = await self._people.names(_principals(lines))
        await self._api.create(
            {
                "message": thread_reply(lines, names),
                "root_id": ref or "",
                "pending_post_id": self._pending((ref, *lines)),
            }
        )

    async def _props(self, card: Card) -> Mapping[str, Any]:
        texts = [
            card.summary,
            *(text for _, text in card.facts),
            *card.notes,
            *(line.text for line in card.lines),
        ]
        return {
            "attachments": attachments(
                card, await self._people.names(_principals(texts)), self._integration
            )
        }

    def _pending(self, shown: object) -> str:
        """By which the server knows the same post again, for half a minute, whatever channel it is for."""
        return hashlib.sha256(f"{self._life}\n{shown!r}".encode()).hexdigest()

    def _integration(self, button: Button) -> Mapping[str, Any]:
        assert self._answers is not None  # noqa: S101  # without them, every button has a link
        try:
            return self._answers.integration(button)
        except ValueError as error:
            raise Deferred(
                f"the secret of this sink cannot be used any more: {error}", failure="slow"
            ) from None


def _principals(texts: Iterable[Text]) -> set[str]:
    return {piece.principal for text in texts for piece in text if isinstance(piece, PrincipalRef)}
