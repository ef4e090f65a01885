"""Renders a card's texts in the Markdown of Adaptive Cards, and as plain text. Pure.

Other people write parts of these texts: Azure, resource names, reasons. Their parts are escaped.
Source: https://learn.microsoft.com/adaptive-cards/authoring-cards/text-features.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from relay.chat.cards.card import PrincipalRef, Text

_GAP = "\N{ZERO WIDTH SPACE}"
_LIST_OR_HEADING = re.compile(r"^(\s*)([-+#>=]|\d+[.)])")
_MARKDOWN_CHARACTER = re.compile(r"([\\*_\[\]`~])")
_AUTOLINK_OR_TAG = re.compile(
    r"(?<=[<@{$&])(?=\S)|(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=mailto)(?=:)", re.IGNORECASE
)
"""Places where a gap keeps clients from making a tag, mention, function or link."""


def render_markdown(text: Text, max_length: int) -> str:
    """Return a text as Markdown, with at most ``max_length`` characters of words.

    Each reader sees times in their own time zone. Times are not counted.
    """
    markdown = ""
    remaining = max_length
    for part in text:
        if isinstance(part, datetime):
            markdown += format_time(part)
        elif remaining > 0:
            words = _single_line(part)
            markdown += escape_markdown(_truncate(words, remaining))
            remaining -= len(words)
    return _LIST_OR_HEADING.sub(rf"\1{_GAP}\2", markdown)


def fallback_text(text: Text, max_length: int) -> str:
    """Return a text for clients that show no cards, with times in UTC."""
    pieces = [
        f"{part.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        if isinstance(part, datetime)
        else _single_line(part)
        for part in text
    ]
    return _truncate("".join(pieces), max_length)


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


def _single_line(part: str | PrincipalRef) -> str:
    text = part.principal if isinstance(part, PrincipalRef) else part
    return re.sub(r"\s+", " ", text)


def _truncate(words: str, max_length: int) -> str:
    """Return at most ``max_length`` characters. The end stays: it may say how many more exist."""
    if len(words) <= max_length:
        return words
    end_length = max_length // 4
    end_start = len(words) - end_length
    return f"{words[: max_length - end_length - 1]}…{words[end_start:]}"
