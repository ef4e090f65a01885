"""Renders a card as a Mattermost post. Pure.

Texts of others cannot mention anybody, link anywhere or format anything. Everything is in
attachments, and ``message`` stays empty: the server's time limit for edits applies to ``message``
only, and so does the mark "(edited)".

Sources: https://developers.mattermost.com/integrate/reference/message-attachments/ and
https://developers.mattermost.com/integrate/plugins/interactive-messages/
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from relay.chat.cards.card import Button, Card, PrincipalRef, Text, Tone

MAX_MESSAGE_LENGTH = 16383
"""Characters of a post's ``message`` (Mattermost, ``PostMessageMaxRunesV2``)."""
MAX_TITLE_LENGTH = 300
"""Characters of a title or footer, before they are escaped."""
MAX_TEXT_LENGTH = 3000
"""Characters of any other text in an attachment, before they are escaped."""
_MAX_NAME_LENGTH = 64
_MAX_PRINCIPAL_LENGTH = 128
_LINE_LENGTHS = (1500, 500, 150)
"""Characters of each line of a reply. The first length is used at which the reply is accepted."""
_COLORS: dict[Tone, str] = {
    "waiting": "#F0A30A",
    "held": "#8C5BD6",
    "approved": "#2E9E6B",
    "running": "#1C58D9",
    "over": "#8B8FA7",
}
_ZERO_WIDTH_SPACE = "\N{ZERO WIDTH SPACE}"
_ESCAPED = re.compile(r"[\\`*\[\]|$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# The server finds mentions, hashtags, emojis and bare URLs after it has removed backslashes. A
# space without width stops it.
_SEPARATED = re.compile(r"[@#&~<]|:(?=\S)|www(?=\d{0,3}\.)|\.(?=[A-Za-z]{2,}/)", re.IGNORECASE)
_BLOCK_MARKER = re.compile(r"(?=[-+>=]|\d{1,9}[.)])")

IntegrationMaker = Callable[[Button], Mapping[str, Any]]
"""Makes the ``integration`` of a button: what the server calls when somebody clicks."""


def attachments(
    card: Card, names: Mapping[str, str], integration: IntegrationMaker
) -> list[dict[str, Any]]:
    """Return the attachments that show a card. ``names`` are user names by principal."""
    numbers = itertools.count(1)
    paragraphs = [render_text_as_markdown(text, names) for text in (card.summary, *card.notes)]
    paragraphs.append(_decision_links_as_markdown(card.buttons))
    if card.code is not None:
        paragraphs.append(f"The page asks for this code: **{escape_markdown(card.code)}**")
    paragraphs += [
        f"Runbook of rule [{escape_markdown(rule, starts_line=False)}]({url})"
        for rule, url in card.runbooks
    ]
    common = {
        "fallback": _truncate(_to_one_line(card.title), MAX_TITLE_LENGTH),
        "color": _COLORS[card.tone],
    }
    main = {
        **common,
        "title": escape_markdown(_truncate(card.title, MAX_TITLE_LENGTH)),
        "text": _join_paragraphs(paragraphs),
        "fields": [
            {"title": label, "value": render_text_as_markdown(text, names), "short": False}
            for label, text in card.facts
        ],
        "footer": escape_markdown(_truncate(card.footer, MAX_TITLE_LENGTH)),
        "actions": _actions(card.buttons, integration, numbers),
    }
    lines = [
        {
            **common,
            "text": _join_paragraphs(
                [
                    render_text_as_markdown(line.text, names),
                    _decision_links_as_markdown(line.buttons),
                ]
            ),
            "actions": _actions(line.buttons, integration, numbers),
        }
        for line in card.lines
    ]
    return [main, *lines]


def thread_message(lines: Sequence[Text], names: Mapping[str, str]) -> str:
    """Return the message of a reply. Long lines are cut if the reply would be too long."""
    message = ""
    for max_length in _LINE_LENGTHS:
        message = "\n".join(
            render_text_as_markdown(line, names, max_length=max_length) for line in lines
        )
        if len(message) <= MAX_MESSAGE_LENGTH:
            return message
    return message[:MAX_MESSAGE_LENGTH]


def render_text_as_markdown(
    text: Text, names: Mapping[str, str], *, max_length: int = MAX_TEXT_LENGTH
) -> str:
    """Return a text as Markdown, with times in UTC.

    People are shown by name if ``names`` has their principal. Nobody is mentioned.
    """
    rendered = ""
    remaining = max_length
    for part in text:
        if remaining <= 0:
            break
        if isinstance(part, str):
            rendered += escape_markdown(_truncate(part, remaining), starts_line=not rendered)
            remaining -= len(part)
        else:
            shown = (
                _time_text(part)
                if isinstance(part, datetime)
                else _person_name_without_mention(part, names)
            )
            rendered += shown
            remaining -= len(shown)
    return rendered.strip()


def escape_markdown(text: str, *, starts_line: bool = True) -> str:
    """Return Markdown that shows a text literally, on one line."""
    text = _collapse_whitespace(text)
    if starts_line:
        text = text.lstrip()
    text = _ESCAPED.sub(r"\\\g<0>", text)
    text = _SEPARATED.sub(rf"\g<0>{_ZERO_WIDTH_SPACE}", text)
    if starts_line and _BLOCK_MARKER.match(text):
        return _ZERO_WIDTH_SPACE + text
    return text


def _actions(
    buttons: Sequence[Button], integration: IntegrationMaker, numbers: Iterator[int]
) -> list[dict[str, Any]]:
    """Return the buttons that decide in the chat.

    The server requires that ids are unique in a post, and of letters and digits.
    """
    return [
        {
            "id": f"{button.decision}{next(numbers)}",
            "type": "button",
            "name": button.label,
            "style": "primary" if button.decision == "approve" else "default",
            "integration": dict(integration(button)),
        }
        for button in buttons
        if button.url is None
    ]


def _decision_links_as_markdown(buttons: Sequence[Button]) -> str:
    """Return links for the decisions that a page takes: Mattermost's buttons open no pages."""
    return " · ".join(
        f"**[{escape_markdown(button.label)}]({button.url})**"
        for button in buttons
        if button.url is not None
    )


def _time_text(at: datetime) -> str:
    """Return a time with its zone: a post does not know the reader's time zone."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _person_name_without_mention(person: PrincipalRef, names: Mapping[str, str]) -> str:
    name = names.get(person.principal)
    if name:
        return f"**{escape_markdown(_truncate(name, _MAX_NAME_LENGTH))}**"
    return f"`{_truncate(_to_one_line(person.principal), _MAX_PRINCIPAL_LENGTH)}`"


def _to_one_line(text: str) -> str:
    return _collapse_whitespace(text).replace("`", "'").strip()


def _collapse_whitespace(text: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in text)
    return re.sub(r"\s+", " ", printable)


def _join_paragraphs(paragraphs: Sequence[str]) -> str:
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _truncate(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max(max_length - 1, 0)]}…"
