"""The channel that events are shown in: how Slack posts, edits and tells."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from relay.chat import MessageGone
from relay.chat.cards.card import Card, Text
from relay.chat.platforms.slack.blocks import Message, card_message, text_message
from relay.chat.platforms.slack.payloads import button_value
from relay.chat.platforms.slack.web import WebApi
from relay.errors import Deferred

_STAMP = re.compile(r"[0-9]{1,12}\.[0-9]{1,9}")


class Channel:
    """A `relay.chat.live_message.Platform`. A message is named by channel and timestamp: ``C024BE91L/1503435956.000247``.

    ``team`` gives the workspace's id, so that its people can be named as they are known there; ``heard``: clicks reach us.
    """

    def __init__(
        self, api: WebApi, channel: str, team: Callable[[], Awaitable[str]], *, heard: bool
    ) -> None:
        self._api = api
        self._channel = channel
        self._team = team
        self._value = button_value if heard else None

    async def post(self, card: Card) -> str:
        """Post a message. Raises Deferred, Rejected."""
        return await self._post(card_message(card, await self._team(), self._value))

    async def edit(self, ref: str, card: Card) -> None:
        """Have a message show this card instead. Raises MessageGone, Deferred, Rejected."""
        channel, _, stamp = ref.partition("/")
        if _STAMP.fullmatch(stamp) is None:  # a sink of another kind had this one's name
            raise MessageGone("the message was posted elsewhere")
        message = card_message(card, await self._team(), self._value)
        await self._api.call(
            self._api.methods.chat_update,
            of_message=True,
            channel=channel,
            ts=stamp,
            text=message.text,
            blocks=message.blocks,
        )

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        """Say these lines in a message's thread; without ``ref``, in the channel. Raises MessageGone, Deferred, Rejected."""
        if ref is not None and _STAMP.fullmatch(ref.partition("/")[2]) is None:
            raise MessageGone("the message was posted elsewhere")
        await self._post(text_message(lines, await self._team()), ref)

    async def _post(self, message: Message, below: str | None = None) -> str:
        channel, _, stamp = below.partition("/") if below is not None else (self._channel, "", None)
        answer = await self._api.call(
            self._api.methods.chat_postMessage,
            of_message=below is not None,
            channel=channel,
            text=message.text,
            blocks=message.blocks,
            thread_ts=stamp,
            unfurl_links=False,
            unfurl_media=False,
        )
        return _ref(answer)


def _ref(answer: Mapping[str, Any]) -> str:
    channel, stamp = answer.get("channel"), answer.get("ts")
    if (
        not isinstance(stamp, str)
        or _STAMP.fullmatch(stamp) is None
        or not isinstance(channel, str)
        or not channel.isalnum()
    ):
        raise Deferred(
            "expected Slack to name the message that was posted, it did not: does api_url name Slack's Web API?"
        )
    return f"{channel}/{stamp}"
