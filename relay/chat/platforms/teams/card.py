"""Renders a card as Teams takes it: an Adaptive Card in a webhook's envelope. Pure.

Teams takes Adaptive Cards up to version 1.5, and messages up to 28 kB. Its texts are Markdown.
Other people write parts of them: Azure, resource names, reasons. Their parts are escaped. Sources:
https://learn.microsoft.com/microsoftteams/platform/webhooks-and-connectors/how-to/connectors-using,
https://adaptivecards.io/explorer,
https://learn.microsoft.com/adaptive-cards/authoring-cards/text-features and
https://learn.microsoft.com/microsoftteams/limits-specifications-teams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from relay.approvals.request import DecisionKind
from relay.chat.cards.card import Button, Card, longest_fitting, one_line
from relay.chat.cards.wording import Tone
from relay.sentences import Text, render

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
    def render(max_text: int) -> Json:
        fallback = fallback_text((f"{card.title}. ", *card.summary), max_text)
        actions = [_open_url_action(button) for button in card.buttons]
        return _adaptive_card(list(_body(card, max_text)), actions, fallback)

    return _fitting_message(render)


def follow_up_message(lines: Sequence[Text]) -> Json:
    """Return a short message of one or more lines. The first of several lines is a heading."""

    def render(max_text: int) -> Json:
        first, *rest = (render_markdown(line, max_text) for line in lines)
        heading = _text_block(first, weight="Bolder") if rest else _text_block(first)
        body = [heading, *(_text_block(line, spacing="Small") for line in rest)]
        return _adaptive_card(body, [], fallback_text(lines[0], max_text))

    return _fitting_message(render)


def card_size(card: Json) -> int:
    """Return a card's bytes as Teams seems to count them: JSON within JSON, escaped to ASCII.

    Teams refused a request of 24,453 bytes for 28,897 bytes, after the workflow had answered 202
    (https://github.com/MicrosoftDocs/msteams-docs/issues/11274). No caller gets that refusal.
    """
    return len(json.dumps(json.dumps(card)))


def _body(card: Card, max_text: int) -> Iterator[Json]:
    title = render_markdown((card.title,), max_text)
    yield {
        "type": "Container",
        "style": _CONTAINER_STYLES[card.tone],
        "bleed": True,
        "items": [
            _text_block(title, size="Large", weight="Bolder", style="heading"),
            _text_block(render_markdown(card.summary, max_text)),
        ],
    }
    yield from _fact_elements(card, max_text)
    for line in card.lines:
        items = [_text_block(render_markdown(line.text, max_text))]
        if line.buttons:
            actions = [_open_url_action(button) for button in line.buttons]
            items.append({"type": "ActionSet", "spacing": "Small", "actions": actions})
        yield {"type": "Container", "separator": True, "items": items}
    for note in card.notes:
        yield _text_block(render_markdown(note, max_text))
    for rule, url in card.runbooks:
        yield _text_block(f"Runbook of rule [{render_markdown((rule,), max_text)}]({url})")
    if card.footer:
        yield _text_block(render_markdown((card.footer,), max_text), size="Small", isSubtle=True)


def _fact_elements(card: Card, max_text: int) -> Iterator[Json]:
    """Yield the facts in order: as a FactSet, but facts with times as text.

    Only a TextBlock is documented to show times in the reader's time zone.
    """
    shown: list[Json] = []
    for label, text in card.facts:
        value = render_markdown(text, max_text)
        if any(isinstance(piece, datetime) for piece in text):
            if shown:
                yield {"type": "FactSet", "facts": shown}
            shown = []
            yield _text_block(f"**{label}:** {value}")
        else:
            shown.append({"title": label, "value": value})
    if shown:
        yield {"type": "FactSet", "facts": shown}


def _text_block(text: str, **properties: object) -> Json:
    return {"type": "TextBlock", "text": text, "wrap": True, **properties}


def _open_url_action(button: Button) -> Json:
    return {
        "type": "Action.OpenUrl",
        "title": button.label,
        "style": _ACTION_STYLES[button.decision],
        "url": button.url,
    }


def _adaptive_card(body: list[Json], actions: list[Json], fallback: str) -> Json:
    card: Json = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.5",
        "msteams": {"width": "Full"},
        "fallbackText": fallback,
        "body": body,
    }
    if actions:
        card["actions"] = actions
    return card


def _fitting_message(render: Callable[[int], Json]) -> Json:
    card = longest_fitting(render, _TEXT_LENGTHS, lambda card: card_size(card) <= MAX_CARD_BYTES)
    attachment = {
        "contentType": "application/vnd.microsoft.card.adaptive",
        "contentUrl": None,
        "content": card,
    }
    return {"type": "message", "attachments": [attachment]}


def render_markdown(text: Text, limit: int) -> str:
    """Return a text as Markdown. Each reader sees times in their own time zone."""
    shown = one_line(text, limit)
    markdown = render(shown, words=escape_markdown, person=escape_markdown, time=format_time)
    return _LIST_OR_HEADING.sub(rf"\1{_GAP}\2", markdown)


def fallback_text(text: Text, limit: int) -> str:
    return render(one_line(text, limit), words=str, person=str)


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
