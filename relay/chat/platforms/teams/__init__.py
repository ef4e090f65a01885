"""Microsoft Teams: posts cards through a workflow's webhook; people answer with links.

Power Automate answers 202 when it has taken the request. What the workflow then does with it, no
caller learns. Messages cannot be edited. The URL is a secret: whoever has its ``sig`` can post.
`relay.chat.platforms.teams.card` renders cards.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import aiohttp
import orjson
from pydantic import SecretStr, model_validator
from yarl import URL

from relay.chat import ChatSettings, MessageGone, raise_deferred_if_secret_unusable
from relay.chat.cards.card import Card
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.chat.platforms.teams.card import Json, card_message, follow_up_message
from relay.clock import Clock
from relay.logs import Finding
from relay.net.connectivity import check_connectivity
from relay.net.egress import parse_receiver_url
from relay.net.http import Request, Response, interpret_response, open_session, post
from relay.sentences import Text

CREATE_WORKFLOW = (
    "create a workflow from “Send webhook alerts to a channel” in the Workflows app, "
    "and configure its URL"
)
"""What to do if there is no usable workflow."""
_MICROSOFT_HOST = re.compile(r"\.(logic\.azure|api\.powerplatform)\.(com|us|cn)$")
_RETIRED_CONNECTOR_HOST = ".webhook.office.com"


class Settings(ChatSettings):
    """A channel or chat of Microsoft Teams, through a workflow."""

    kind: Literal["teams"]
    url: SecretStr | None = None
    """The workflow's webhook URL. It is a secret: whoever has it can post."""
    url_file: Path | None = None
    """A file that holds the URL, instead of url."""
    allow_http: bool = False
    """Allow a URL with http, for tests."""

    @model_validator(mode="after")
    def _check_values(self) -> Settings:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        self.run_field_checks({"url": self.webhook_url})
        return self

    def webhook_url(self) -> URL:
        """Return the URL, unchanged: its parts are signed. Raises ValueError if unusable."""
        text = self.reveal("url") or ""
        url = parse_receiver_url(text, allow_http=self.allow_http)
        host = url.raw_host or ""
        if host.endswith(_RETIRED_CONNECTOR_HOST):
            raise ValueError(
                "expected the URL of a workflow, got the URL of a connector, "
                f"which Microsoft has retired: {CREATE_WORKFLOW}"
            )
        if _MICROSOFT_HOST.search(host) is not None and not url.query.get("sig"):
            raise ValueError(
                "expected a URL that ends in sig= and its signature: "
                "copy all of it, and let “Anyone” trigger the flow"
            )
        return URL(text, encoded=True)


_TURNED_OFF = (
    "the workflow is turned off or was deleted: turn it on in the Workflows app, or "
    + CREATE_WORKFLOW
)
_WRONG_URL = (
    "the workflow refused the URL: copy all of it again, to the end of sig=, "
    "and let “Anyone” trigger the flow"
)
_NO_WORKFLOW = f"there is no such workflow: if it was deleted, {CREATE_WORKFLOW}"
_REMEDIES_BY_STATUS = {
    400: f"the workflow does not take Adaptive Cards: {CREATE_WORKFLOW}",
    401: _WRONG_URL,
    403: _WRONG_URL,
    404: _NO_WORKFLOW,
    410: f"the workflow was deleted: {CREATE_WORKFLOW}, then `imds-relay sink resume` this sink",
    413: "the message is too large for the workflow; please report this as a bug of the relay",
}
_REMEDIES_BY_CODE = {
    "WorkflowTriggerIsNotEnabled": _TURNED_OFF,  # with status 400
    "WorkflowNotFound": _NO_WORKFLOW,
    "DirectApiAuthorizationRequired": _WRONG_URL,
}
"""By ``error.code`` of the response, which is more precise than its status."""


class WorkflowWebhook:
    """Posts messages. Implements `relay.chat.live_message.ChatPlatform`, without editing."""

    def __init__(self, settings: Settings, clock: Clock, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._clock = clock
        self._session = session

    async def post(self, card: Card) -> str | None:
        await self._send(card_message(card))
        return None

    async def edit(self, ref: str, card: Card) -> None:  # noqa: ARG002  # nothing can be edited
        """Raise MessageGone: a sink of another kind, which had this sink's name, posted it."""
        raise MessageGone("the message was posted by a sink of another kind")

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:  # noqa: ARG002  # always None
        await self._send(follow_up_message(lines))

    async def _send(self, message: Json) -> None:
        with raise_deferred_if_secret_unusable("url"):
            url = self._settings.webhook_url()
        body = orjson.dumps(message)
        request = Request(
            url=url,
            headers={"Content-Type": "application/json"},
            body=body,
            # The workflow can repeat them in its answer.
            secrets=(url.query.get("sig", ""),),
        )
        response = await post(self._session, request, seconds=self._settings.timeout)
        error = interpret_response(response, self._clock.now())
        if error is None:
            return
        remedy = _REMEDIES_BY_CODE.get(_error_code(response)) or _REMEDIES_BY_STATUS.get(
            response.status
        )
        if remedy is not None:
            error.reason = f"expected 202 Accepted, got {response.status}: {remedy}"
        raise error


def _error_code(response: Response) -> str:
    try:
        return str(response.json()["error"]["code"])
    except (KeyError, TypeError):
        return ""


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[LiveMessageSink]:
    async with open_session() as session:
        webhook = WorkflowWebhook(settings, clock, session)
        sink = LiveMessageSink(settings, context, webhook, clock)
        async with sink.refreshing():
            yield sink


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature of all sinks
    subject, url = f"sink {settings.name}", settings.webhook_url()
    return [await check_connectivity(subject, url, tls=None, now=clock.now())]
