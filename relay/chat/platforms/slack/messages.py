"""Posts, edits and replies in one Slack channel: Block Kit and the notification's text.

Other people write parts of the texts: Azure, resource names, reasons. Rich text and plain text have
no markup, so such a part cannot mention anybody or add a link. Only the notification's text is
markup; it is escaped as https://docs.slack.dev/messaging/formatting-message-text describes.
Source of the limits: https://docs.slack.dev/reference/block-kit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import count
from typing import Any

import orjson

from relay.chat import MessageGone
from relay.chat.cards.card import Button, Card, cut, longest_fitting, on_one_line, one_line
from relay.chat.cards.wording import Tone
from relay.chat.platforms.slack.api import Settings, WebApi
from relay.errors import Deferred
from relay.sentences import PrincipalRef, Text, join_texts, render, utc_time

LINK_ACTION_PREFIX = "link-"
"""Starts the action_id of a button that opens a page. Slack reports its clicks, too."""
MAX_BLOCKS_BYTES = 40_000
"""Slack refuses a message that is too long, and does not say how long one may be."""
_TEXT_LENGTHS = (1500, 700, 300, 100)
"""Characters of one text, tried in this order until the message is small enough."""
_MAX_TITLE = 150
_MAX_URL = 3000
_MAX_CONFIRM_TEXT = 300
_MAX_LABEL = 30
# The limits above are Slack's. The limits below are lower than Slack's.
_MAX_FOOTER = 500
_MAX_NOTIFICATION = 1000
_MAX_REPLY_LINE = 500
_DATE_FORMAT = "{time_secs} on {date_short}"
_BOLD = {"bold": True}
_TONE_MARKS: dict[Tone, str] = {
    "waiting": "🟡",
    "held": "🟠",
    "approved": "🟢",
    "running": "🔵",
    "over": "⚪",
}

Json = dict[str, Any]


def card_message(card: Card, team_id: str, *, has_clicks: bool) -> Json:
    """Return a card as a message in a channel of this workspace, as the Web API takes it.

    Notifications, and clients without blocks, show its ``text``. Unless it ``has_clicks``, no click
    reaches the relay. The message then has links in place of buttons: Slack warns about every
    click that no app acknowledges, even if the button only opens a page.
    """
    title = cut(on_one_line(f"{_TONE_MARKS[card.tone]} {card.title}"), _MAX_TITLE)
    text = _notification((f"{title}. ", *card.summary), team_id)
    blocks = longest_fitting(
        lambda limit: list(_card_blocks(card, title, team_id, limit, has_clicks=has_clicks)),
        _TEXT_LENGTHS,
        lambda blocks: len(orjson.dumps(blocks)) <= MAX_BLOCKS_BYTES,
    )
    return {"text": text, "blocks": blocks}


def text_message(lines: Sequence[Text], team_id: str, urls: Sequence[str] = ()) -> Json:
    """Return lines of text as a message in a thread or to one person, each with its URL if any."""
    shown = [one_line(line, _MAX_REPLY_LINE) for line in lines]
    rows = [list(_elements(line, team_id)) for line in shown]
    for row, url in zip(rows, urls, strict=False):
        row += [{"type": "text", "text": "  "}, *_links([("Open", url)])]
    notification = _notification(join_texts(shown, "\n"), team_id)
    return {"text": notification, "blocks": list(_rich_text(rows))}


def _links(urls: Iterable[tuple[str, str]]) -> Iterator[Json]:
    for number, (label, url) in enumerate(urls):
        if number:
            yield {"type": "text", "text": "  ·  "}
        yield {"type": "link", "url": url, "text": on_one_line(label), "style": _BOLD}


def _card_blocks(
    card: Card, title: str, team_id: str, limit: int, *, has_clicks: bool
) -> Iterator[Json]:
    numbers = count(1)

    def shown(text: Text, style: Json | None = None) -> list[Json]:
        return list(_elements(one_line(text, limit), team_id, style))

    yield {"type": "header", "text": _plain_text(title, _MAX_TITLE)}
    yield from _rich_text([shown(card.summary, _BOLD)])
    yield from _rich_text(
        [*shown((label,), _BOLD), *shown((": ", *text))] for label, text in card.facts
    )
    for line in card.lines:
        yield from _rich_text([shown(("• ", *line.text))])
        yield from _actions(line.buttons, numbers, has_clicks=has_clicks)
    yield from _rich_text(map(shown, card.notes))
    yield from _actions(card.buttons, numbers, has_clicks=has_clicks)
    yield from _rich_text(
        [
            {"type": "text", "text": f"Runbook of rule {rule}: "},
            {"type": "link", "url": url, "text": url},
        ]
        for rule, url in card.runbooks
    )
    if card.footer:
        yield {"type": "context", "elements": [_plain_text(card.footer, _MAX_FOOTER)]}


def _actions(
    buttons: Sequence[Button], numbers: Iterator[int], *, has_clicks: bool
) -> Iterator[Json]:
    shown = [button for button in buttons if len(button.url or "") <= _MAX_URL]
    urls = [(button.label, button.url) for button in shown if button.url]
    if has_clicks and shown:
        elements = [_button(button, f"{button.decision}-{next(numbers)}") for button in shown]
        yield {"type": "actions", "elements": elements}
    elif not has_clicks:
        yield from _rich_text([list(_links(urls))])


def _button(button: Button, action_id: str) -> Json:
    label = _plain_text(button.label, _MAX_LABEL)
    element = {"type": "button", "action_id": action_id, "text": label}
    if button.decision == "approve":
        element["style"] = "primary"
    if button.url:
        return {**element, "action_id": f"{LINK_ACTION_PREFIX}{action_id}", "url": button.url}
    question = render(button.question, words=str, person=str)
    return {
        **element,
        "value": button_value(button),
        "confirm": {
            "title": _plain_text(f"{button.label}?", _MAX_LABEL),
            "text": _plain_text(question, _MAX_CONFIRM_TEXT),
            "confirm": label,
            "deny": _plain_text("Cancel", _MAX_LABEL),
        },
    }


def button_value(button: Button) -> str:
    return f"{button.decision} {button.revision} {button.event_id}"


def _rich_text(lines: Iterable[list[Json]]) -> Iterator[Json]:
    """Yield a block with these lines, each of rich text elements; none without elements."""
    elements: list[Json] = []
    for line in lines:
        if elements:
            elements.append({"type": "text", "text": "\n"})
        elements += line
    if elements:
        section = {"type": "rich_text_section", "elements": elements}
        yield {"type": "rich_text", "elements": [section]}


def _elements(text: Text, team_id: str, style: Json | None = None) -> Iterator[Json]:
    """Yield the elements of a text. Members of the workspace are mentioned by id."""
    styled = {"style": style} if style is not None else {}
    for piece in text:
        match piece:
            case datetime():
                yield {
                    "type": "date",
                    "timestamp": int(piece.timestamp()),
                    "format": _DATE_FORMAT,
                    "fallback": utc_time(piece),
                    **styled,
                }
            case PrincipalRef(principal):
                user_id = _member_id(principal, team_id)
                if user_id is not None:
                    yield {"type": "user", "user_id": user_id}
                else:
                    yield {"type": "text", "text": principal, **styled}
            case str() if piece:
                yield {"type": "text", "text": piece, **styled}


def _notification(text: Text, team_id: str) -> str:
    def person(principal: str) -> str:
        user_id = _member_id(principal, team_id)
        return _escape(principal) if user_id is None else f"<@{user_id}>"

    def time(at: datetime) -> str:
        return f"<!date^{int(at.timestamp())}^{_DATE_FORMAT}|{utc_time(at)}>"

    return render(one_line(text, _MAX_NOTIFICATION), words=_escape, person=person, time=time)


def _plain_text(text: str, limit: int) -> Json:
    return {"type": "plain_text", "text": cut(on_one_line(text), limit), "emoji": False}


def _member_id(principal: str, team_id: str) -> str | None:
    user_id = principal.removeprefix(f"slack:{team_id}/")
    is_member = user_id != principal and user_id.isalnum() and user_id.isascii()
    return user_id if is_member else None


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_TIMESTAMP = re.compile(r"[0-9]{1,12}\.[0-9]{1,9}")


class Channel:
    """A message's reference is channel and timestamp: ``C024BE91L/1503435956.0002``."""

    def __init__(self, api: WebApi, settings: Settings) -> None:
        self._api = api
        self._settings = settings

    async def post(self, card: Card) -> str:
        return await self._post(await self._message(card), self._settings.channel)

    async def edit(self, ref: str, card: Card) -> None:
        channel_id, timestamp = _parse_ref(ref)
        message = await self._message(card)
        await self._api.call("chat.update", {"channel": channel_id, "ts": timestamp, **message})

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        channel_id, thread = (self._settings.channel, None) if ref is None else _parse_ref(ref)
        message = text_message(lines, (await self._api.workspace()).team_id)
        await self._post(message, channel_id, thread)

    async def _message(self, card: Card) -> Json:
        team_id = (await self._api.workspace()).team_id
        return card_message(card, team_id, has_clicks=self._settings.uses_socket_mode)

    async def _post(self, message: Json, channel_id: str, thread: str | None = None) -> str:
        fields = {"channel": channel_id, "unfurl_links": False, "unfurl_media": False, **message}
        if thread is not None:
            fields["thread_ts"] = thread
        response = await self._api.call("chat.postMessage", fields)
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
