"""Replies that Slack shows to one person only.

The reply to a slash command is the answer to Slack's request. The reply to a click goes to the
response URL that came with the click, if that URL is Slack's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from yarl import URL

from relay.approvals.request import DecisionAnswer
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Text
from relay.chat.cards.confirmation_view import decision_outcome_text
from relay.chat.platforms.slack.blocks import SlackMessage, text_message
from relay.chat.platforms.slack.requests import Actor
from relay.chat.platforms.slack.settings import Settings
from relay.errors import Deferred
from relay.net.egress import parse_receiver_url
from relay.net.http import Request, post

MAX_OPEN_REPLIES = 20
"""Replies being sent at once. More are dropped: decisions are recorded and messages show them."""
REPLY_TIMEOUT = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrivateReply:
    """A reply. If ``closes_card``, it replaces the ephemeral card that the person clicked on."""

    message: SlackMessage
    closes_card: bool = True

    def body(self) -> dict[str, Any]:
        """Return the document that Slack expects."""
        return {
            "response_type": "ephemeral",
            "text": self.message.text,
            "blocks": list(self.message.blocks),
        }


def text_reply(*lines: Text, team_id: str, closes_card: bool = True) -> PrivateReply:
    """Return a reply of text lines."""
    return PrivateReply(text_message(lines, team_id), closes_card)


def decision_reply(answer: DecisionAnswer, status: ApprovalStatus, actor: Actor) -> PrivateReply:
    """Return a reply that tells the actor what the gate answered."""
    if answer.accepted:
        outcome = decision_outcome_text(answer.body, dry_run=status.mode == "dry-run", repeat=False)
        return text_reply(outcome, team_id=actor.team_id)
    refusal = answer.body.get("detail") or "the relay refuses it"
    return text_reply((f"Nothing was decided: {refusal}.",), team_id=actor.team_id)


class ResponseUrlSender:
    """Sends replies to response URLs in the background. Each reply is tried once."""

    def __init__(self, session: aiohttp.ClientSession, settings: Settings) -> None:
        self._session = session
        self._api_url = settings.web_api_base_url()
        self._allow_http = settings.allow_http
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, response_url: str, body: Mapping[str, Any]) -> None:
        """Start to send a reply. Never calls a URL that is not Slack's own."""
        url = parse_response_url(response_url, self._api_url, allow_http=self._allow_http)
        if url is None:
            _log.warning(
                "ignored a response URL: expected a URL of %s or hooks.%s",
                self._api_url.host,
                self._api_url.host,
            )
            return
        if len(self._tasks) >= MAX_OPEN_REPLIES:
            return
        request = Request(
            url=url,
            headers={"Content-Type": "application/json"},
            body=orjson.dumps(body),
        )
        task = asyncio.create_task(self._send(request), name="slack: private reply")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @asynccontextmanager
    async def cancel_at_end(self) -> AsyncIterator[None]:
        """Cancel the replies still being sent when this context ends."""
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, request: Request) -> None:
        try:
            response = await post(self._session, request, seconds=REPLY_TIMEOUT)
        except Deferred as error:
            _log.info("Slack did not accept a private reply: %s", error)
            return
        if response.status != 200:  # HTTP
            _log.info("Slack did not accept a private reply: status %d", response.status)


def parse_response_url(text: str, api_url: URL, *, allow_http: bool) -> URL | None:
    """Return the URL if its host is the Web API's host, or that host after ``hooks.``. Pure."""
    try:
        url = parse_receiver_url(text, allow_http=allow_http)
    except ValueError:
        return None
    is_own_host = url.host in (api_url.host, f"hooks.{api_url.host}")
    is_own_origin = is_own_host and (url.scheme, url.port) == (api_url.scheme, api_url.port)
    return url if is_own_origin else None
