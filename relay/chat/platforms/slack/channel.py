"""Posts, edits and replies in one Slack channel: a `relay.chat.live_message.ChatPlatform`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from relay.chat import MessageGone
from relay.chat.cards.card import Card, Text
from relay.chat.platforms.slack.api import WebApi
from relay.chat.platforms.slack.blocks import SlackMessage, card_message, text_message
from relay.chat.platforms.slack.members import Members
from relay.chat.platforms.slack.settings import Settings
from relay.errors import Deferred

_TIMESTAMP = re.compile(r"[0-9]{1,12}\.[0-9]{1,9}")


class Channel:
    """A channel. A message's reference is channel and timestamp: ``C024BE91L/1503435956.0002``."""

    def __init__(self, api: WebApi, settings: Settings, members: Members) -> None:
        self._api = api
        self._settings = settings
        self._members = members

    async def post(self, card: Card) -> str:
        """Post a message and return its reference. Raises Deferred, Rejected."""
        return await self._post(await self._message(card), self._settings.channel)

    async def edit(self, ref: str, card: Card) -> None:
        """Replace a message by this card. Raises MessageGone, Deferred, Rejected."""
        channel_id, timestamp = _parse_ref(ref)
        message = await self._message(card)
        place = {"channel": channel_id, "ts": timestamp}
        await self._api.write("chat.update", {**place, **message.fields()}, is_known=True)

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        """Post lines in a message's thread, or in the channel if ``ref`` is None.

        Raises MessageGone, Deferred, Rejected.
        """
        channel_id, thread = (self._settings.channel, None) if ref is None else _parse_ref(ref)
        message = text_message(lines, await self._members.team_id())
        await self._post(message, channel_id, thread)

    async def _message(self, card: Card) -> SlackMessage:
        team_id = await self._members.team_id()
        return card_message(card, team_id, has_clicks=self._settings.uses_socket_mode)

    async def _post(self, message: SlackMessage, channel_id: str, thread: str | None = None) -> str:
        fields = {
            "channel": channel_id,
            "unfurl_links": False,
            "unfurl_media": False,
            **message.fields(),
        }
        if thread is not None:
            fields["thread_ts"] = thread
        response = await self._api.write("chat.postMessage", fields, is_known=thread is not None)
        posted_in, timestamp = str(response.get("channel")), str(response.get("ts"))
        if _TIMESTAMP.fullmatch(timestamp) is None or not posted_in.isalnum():
            raise Deferred(
                "expected channel and ts of the posted message in Slack's response, they are "
                "missing: is api_url Slack's Web API?"
            )
        return f"{posted_in}/{timestamp}"


def _parse_ref(ref: str) -> tuple[str, str]:
    """Return channel and timestamp. Raises MessageGone if another kind of sink made the ref."""
    channel_id, _, timestamp = ref.partition("/")
    if _TIMESTAMP.fullmatch(timestamp) is None:
        raise MessageGone("the message was posted by a sink of another kind")
    return channel_id, timestamp
