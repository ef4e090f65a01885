"""Posts, edits and replies in one Slack channel: a `relay.chat.live_message.ChatPlatform`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from relay.chat import MessageGone
from relay.chat.cards.card import Card, Text
from relay.chat.platforms.slack.blocks import SlackMessage, card_message, text_message
from relay.chat.platforms.slack.requests import format_button_value
from relay.chat.platforms.slack.web import WebApi
from relay.errors import Deferred

_TIMESTAMP = re.compile(r"[0-9]{1,12}\.[0-9]{1,9}")


class Channel:
    """A channel. A message's reference is channel and timestamp: ``C024BE91L/1503435956.000247``.

    ``fetch_team_id`` returns the id of the workspace, whose members a message can mention.
    ``has_interactions`` says whether Slack sends clicks to the relay.
    """

    def __init__(
        self,
        api: WebApi,
        channel_id: str,
        fetch_team_id: Callable[[], Awaitable[str]],
        *,
        has_interactions: bool,
    ) -> None:
        self._api = api
        self._channel_id = channel_id
        self._fetch_team_id = fetch_team_id
        self._button_value = format_button_value if has_interactions else None

    async def post(self, card: Card) -> str:
        """Post a message and return its reference. Raises Deferred, Rejected."""
        message = card_message(card, await self._fetch_team_id(), self._button_value)
        return await self._post(message, self._channel_id)

    async def edit(self, ref: str, card: Card) -> None:
        """Replace a message by this card. Raises MessageGone, Deferred, Rejected."""
        channel_id, timestamp = _parse_ref(ref)
        message = card_message(card, await self._fetch_team_id(), self._button_value)
        await self._api.call(
            self._api.methods.chat_update,
            refers_to_message=True,
            channel=channel_id,
            ts=timestamp,
            text=message.text,
            blocks=message.blocks,
        )

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        """Post lines in a message's thread, or in the channel if ``ref`` is None.

        Raises MessageGone, Deferred, Rejected.
        """
        channel_id, thread = (self._channel_id, None) if ref is None else _parse_ref(ref)
        message = text_message(lines, await self._fetch_team_id())
        await self._post(message, channel_id, thread)

    async def _post(self, message: SlackMessage, channel_id: str, thread: str | None = None) -> str:
        response = await self._api.call(
            self._api.methods.chat_postMessage,
            refers_to_message=thread is not None,
            channel=channel_id,
            text=message.text,
            blocks=message.blocks,
            thread_ts=thread,
            unfurl_links=False,
            unfurl_media=False,
        )
        return _ref_of_posted_message(response)


def _parse_ref(ref: str) -> tuple[str, str]:
    """Return channel and timestamp. Raises MessageGone if another kind of sink made the ref."""
    channel_id, _, timestamp = ref.partition("/")
    if _TIMESTAMP.fullmatch(timestamp) is None:
        raise MessageGone("the message was posted by a sink of another kind")
    return channel_id, timestamp


def _ref_of_posted_message(response: Mapping[str, Any]) -> str:
    channel_id, timestamp = response.get("channel"), response.get("ts")
    if (
        not isinstance(timestamp, str)
        or _TIMESTAMP.fullmatch(timestamp) is None
        or not isinstance(channel_id, str)
        or not channel_id.isalnum()
    ):
        raise Deferred(
            "expected channel and ts of the posted message in Slack's response, they are missing: "
            "is api_url Slack's Web API?"
        )
    return f"{channel_id}/{timestamp}"
