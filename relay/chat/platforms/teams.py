"""Microsoft Teams: posts cards through a workflow's webhook; people answer with links.

Power Automate answers 202 when it has taken the request. What the workflow then does with it, no
caller learns. Messages cannot be edited. The URL is a secret: whoever has its ``sig`` can post.

A message is an Adaptive Card in a webhook's envelope. Teams takes Adaptive Cards up to version 1.5,
and messages up to 28 kB. Its texts are Markdown. Other people write parts of them: Azure, resource
names, reasons. Their parts are escaped. Sources:
https://learn.microsoft.com/microsoftteams/platform/webhooks-and-connectors/how-to/connectors-using,
https://adaptivecards.io/explorer,
https://learn.microsoft.com/adaptive-cards/authoring-cards/text-features and
https://learn.microsoft.com/microsoftteams/limits-specifications-teams.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson
from pydantic import SecretStr, model_validator
from yarl import URL

from relay.approvals.request import DecisionKind
from relay.chat import ChatSettings, MessageGone, raise_deferred_if_secret_unusable
from relay.chat.cards.card import Button, Card, longest_fitting, one_line
from relay.chat.cards.wording import Tone
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.clock import Clock
from relay.logs import Finding
from relay.net.connectivity import check_connectivity
from relay.net.egress import parse_receiver_url
from relay.net.http import Request, Response, interpret_response, open_session, post
from relay.sentences import Text, render

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


_WRONG_URL = (
    "the workflow refused the URL: copy all of it again, to the end of sig=, "
    "and let “Anyone” trigger the flow"
)
_NO_WORKFLOW = f"there is no such workflow: if it was deleted, {CREATE_WORKFLOW}"
_REMEDIES: dict[int | str, str] = {
    "WorkflowTriggerIsNotEnabled": "the workflow is turned off or was deleted: "
    f"turn it on in the Workflows app, or {CREATE_WORKFLOW}",
    "WorkflowNotFound": _NO_WORKFLOW,
    "DirectApiAuthorizationRequired": _WRONG_URL,
    400: f"the workflow does not take Adaptive Cards: {CREATE_WORKFLOW}",
    401: _WRONG_URL,
    403: _WRONG_URL,
    404: _NO_WORKFLOW,
    410: f"the workflow was deleted: {CREATE_WORKFLOW}, then `imds-relay sink resume` this sink",
    413: "the message is too large for the workflow; please report this as a bug of the relay",
}
"""By ``error.code`` of the response, or else by its status, which is less precise."""


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
        request = Request(
            url=url,
            headers={"Content-Type": "application/json"},
            body=orjson.dumps(message),
            secrets=(url.query.get("sig", ""),),  # the workflow can repeat it in its answer
        )
        response = await post(self._session, request, seconds=self._settings.timeout)
        error = interpret_response(response, self._clock.now())
        if error is None:
            return
        remedy = _REMEDIES.get(_error_code(response)) or _REMEDIES.get(response.status)
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


# --- cards


MAX_CARD_BYTES = 27_000
"""The limit of `card_size`, below the 28,672 bytes that Teams allows for a message's properties."""
_TEXT_LENGTHS = (1000, 300, 100, 40)
"""Characters of one text, tried in this order until the card is small enough."""
_CONTAINER_STYLES: dict[Tone, str] = {
    "waiting": "warning",
    "held": "attention",
    "approved": "good",
    "running": "accent",
    "over": "emphasis",
}
_ACTION_STYLES: dict[DecisionKind, str] = {
    "approve": "positive",
    "hold": "destructive",
    "release": "default",
}
_GAP = "\N{ZERO WIDTH SPACE}"
_LIST_OR_HEADING = re.compile(r"^(\s*)([-+#>=]|\d+[.)])")
_MARKDOWN_CHARACTER = re.compile(r"([\\*_\[\]`~])")
_AUTOLINK_OR_TAG = re.compile(
    r"(?<=[<@{$&])(?=\S)|(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=mailto)(?=:)", re.IGNORECASE
)
"""Places where a gap keeps clients from making a tag, mention, function or link."""

Json = dict[str, Any]


def card_message(card: Card) -> Json:
    actions = [_open_url_action(button) for button in card.buttons]
    summary = (f"{card.title}. ", *card.summary)
    return _message(lambda limit: list(_body(card, limit)), summary, actions)


def follow_up_message(lines: Sequence[Text]) -> Json:
    """Return a short message of one or more lines. The first of several lines is a heading."""

    def body(limit: int) -> list[Json]:
        first, *rest = (render_markdown(line, limit) for line in lines)
        heading = _text_block(first, weight="Bolder") if rest else _text_block(first)
        return [heading, *(_text_block(line, spacing="Small") for line in rest)]

    return _message(body, lines[0])


def _message(
    body: Callable[[int], list[Json]], fallback: Text, actions: Sequence[Json] = ()
) -> Json:
    """Return a message with a card. ``body`` is called with the characters of one text."""

    def adaptive_card(limit: int) -> Json:
        card: Json = {
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
            "type": "AdaptiveCard",
            "version": "1.5",
            "msteams": {"width": "Full"},
            "fallbackText": render(one_line(fallback, limit), words=str, person=str),
            "body": body(limit),
        }
        return {**card, "actions": actions} if actions else card

    attachment = {
        "contentType": "application/vnd.microsoft.card.adaptive",
        "contentUrl": None,
        "content": longest_fitting(
            adaptive_card, _TEXT_LENGTHS, lambda card: card_size(card) <= MAX_CARD_BYTES
        ),
    }
    return {"type": "message", "attachments": [attachment]}


def card_size(card: Json) -> int:
    """Return a card's bytes as Teams seems to count them: JSON within JSON, escaped to ASCII.

    Teams refused a request of 24,453 bytes for 28,897 bytes, after the workflow had answered 202
    (https://github.com/MicrosoftDocs/msteams-docs/issues/11274). No caller gets that refusal.
    """
    return len(json.dumps(json.dumps(card)))


def _body(card: Card, limit: int) -> Iterator[Json]:
    title = render_markdown((card.title,), limit)
    yield {
        "type": "Container",
        "style": _CONTAINER_STYLES[card.tone],
        "bleed": True,
        "items": [
            _text_block(title, size="Large", weight="Bolder", style="heading"),
            _text_block(render_markdown(card.summary, limit)),
        ],
    }
    yield from _fact_elements(card, limit)
    for line in card.lines:
        items = [_text_block(render_markdown(line.text, limit))]
        if line.buttons:
            actions = [_open_url_action(button) for button in line.buttons]
            items.append({"type": "ActionSet", "spacing": "Small", "actions": actions})
        yield {"type": "Container", "separator": True, "items": items}
    for note in card.notes:
        yield _text_block(render_markdown(note, limit))
    for rule, url in card.runbooks:
        yield _text_block(f"Runbook of rule [{render_markdown((rule,), limit)}]({url})")
    if card.footer:
        yield _text_block(render_markdown((card.footer,), limit), size="Small", isSubtle=True)


def _fact_elements(card: Card, limit: int) -> Iterator[Json]:
    """Yield the facts in order: as a FactSet, but facts with times as text.

    Only a TextBlock is documented to show times in the reader's time zone.
    """
    for has_times, facts in groupby(card.facts, key=lambda fact: _has_times(fact[1])):
        shown = [(label, render_markdown(text, limit)) for label, text in facts]
        if has_times:
            yield from (_text_block(f"**{label}:** {value}") for label, value in shown)
        else:
            pairs = [{"title": label, "value": value} for label, value in shown]
            yield {"type": "FactSet", "facts": pairs}


def _has_times(text: Text) -> bool:
    return any(isinstance(piece, datetime) for piece in text)


def _text_block(text: str, **properties: object) -> Json:
    return {"type": "TextBlock", "text": text, "wrap": True, **properties}


def _open_url_action(button: Button) -> Json:
    return {
        "type": "Action.OpenUrl",
        "title": button.label,
        "style": _ACTION_STYLES[button.decision],
        "url": button.url,
    }


def render_markdown(text: Text, limit: int) -> str:
    """Return a text as Markdown. Each reader sees times in their own time zone."""
    shown = one_line(text, limit)
    markdown = render(shown, words=escape_markdown, person=escape_markdown, time=format_time)
    return _LIST_OR_HEADING.sub(rf"\1{_GAP}\2", markdown)


def format_time(time: datetime) -> str:
    """Return functions that show date and time in the reader's time zone.

    Clients show any other notation unchanged: the names must be in capitals, without blanks inside
    the braces, and the time must have whole seconds and a time zone.
    """
    timestamp = f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return f"{{{{DATE({timestamp}, SHORT)}}}} {{{{TIME({timestamp})}}}}"


def escape_markdown(words: str) -> str:
    """Return words that clients show unchanged, without emphasis, link, mention, tag or function.

    A backslash escapes Markdown. An invisible gap breaks what clients recognize outside Markdown.
    """
    return _AUTOLINK_OR_TAG.sub(_GAP, _MARKDOWN_CHARACTER.sub(r"\\\1", words))
