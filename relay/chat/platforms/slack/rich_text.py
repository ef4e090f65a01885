"""Renders a card's texts for Slack: as rich text elements, and as markup for notifications. Pure.

Other people write parts of these texts: Azure, resource names, reasons. Rich text and plain text
have no markup, so such a part cannot mention anybody or add a link. Only a notification's text is
markup; it is escaped as https://docs.slack.dev/messaging/formatting-message-text describes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from slack_sdk.models.blocks import (
    PlainTextObject,
    RichTextBlock,
    RichTextElement,
    RichTextElementParts,
    RichTextSectionElement,
)

from relay.chat.cards.card import PrincipalRef, Text

BOLD = RichTextElementParts.TextStyle(bold=True)
CODE = RichTextElementParts.TextStyle(code=True)
_DATE_FORMAT = "{time_secs} on {date_short}"
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")
"""Characters that could imitate a line of this relay or change the direction of a text."""


def rich_text_block_from_elements(elements: Iterable[RichTextElement]) -> RichTextBlock:
    """Return a block with one section."""
    return RichTextBlock(elements=[RichTextSectionElement(elements=list(elements))])


def rich_text_elements(
    text: Text, team_id: str, style: RichTextElementParts.TextStyle | None = None
) -> Iterator[RichTextElement]:
    """Yield the elements of a text. Members of the workspace ``team_id`` are mentioned by id."""
    for part in text:
        match part:
            case datetime():
                yield RichTextElementParts.Date(
                    timestamp=int(part.timestamp()),
                    format=_DATE_FORMAT,
                    fallback=_plain_utc_time(part),
                    style=style,
                )
            case PrincipalRef() if (user_id := _user_id_of_principal(part, team_id)) is not None:
                yield RichTextElementParts.User(user_id=user_id)
            case PrincipalRef():
                yield RichTextElementParts.Text(text=part.principal, style=style)
            case str() if part:
                yield RichTextElementParts.Text(text=part, style=style)


def card_text_to_mrkdwn(text: Text, team_id: str, max_length: int) -> str:
    """Return a text in Slack's markup, escaped and truncated."""
    pieces = []
    for part in truncate_card_text_to_single_line(text, max_length):
        match part:
            case datetime():
                pieces.append(
                    f"<!date^{int(part.timestamp())}^{_DATE_FORMAT}|{_plain_utc_time(part)}>"
                )
            case PrincipalRef():
                user_id = _user_id_of_principal(part, team_id)
                pieces.append(_escape(part.principal) if user_id is None else f"<@{user_id}>")
            case str():
                pieces.append(_escape(part))
    return "".join(pieces)


def plain_text_object(text: str, max_length: int) -> PlainTextObject:
    """Return a plain text object without control characters, truncated with an ellipsis."""
    text = replace_control_characters(text)
    if len(text) > max_length:
        text = f"{text[: max_length - 1]}…"
    return PlainTextObject(text=text, emoji=False)


def card_text_to_plain_text(text: Text) -> str:
    """Return a text as one string, with times in UTC and principals as rules name them."""
    pieces = []
    for part in text:
        match part:
            case datetime():
                pieces.append(_plain_utc_time(part))
            case PrincipalRef():
                pieces.append(part.principal)
            case str():
                pieces.append(part)
    return "".join(pieces)


def truncate_card_text_to_single_line(text: Text, max_length: int) -> Text:
    """Return a text on one line with at most ``max_length`` characters of words.

    Times and principals are not counted. An ellipsis ends a text that was longer.
    """
    parts: list[str | datetime | PrincipalRef] = []
    remaining = max_length
    for part in text:
        if not isinstance(part, str):
            parts.append(part)
            continue
        if len(part) > remaining:
            return (*parts, f"{replace_control_characters(part[:remaining])}…")
        parts.append(replace_control_characters(part))
        remaining -= len(part)
    return tuple(parts)


def join_card_text_lines(lines: Iterable[Text]) -> Text:
    """Return the texts as one text, separated by line breaks."""
    parts: list[str | datetime | PrincipalRef] = []
    for line in lines:
        if parts:
            parts.append("\n")
        parts.extend(line)
    return tuple(parts)


def replace_control_characters(text: str) -> str:
    """Return a text with a space in place of each run of control characters."""
    return _CONTROL_CHARACTERS.sub(" ", text)


def _plain_utc_time(time: datetime) -> str:
    """Return a time for readers whose client cannot show it in their own time zone."""
    return f"{time.astimezone(UTC):%H:%M:%S on %Y-%m-%d} UTC"


def _user_id_of_principal(reference: PrincipalRef, team_id: str) -> str | None:
    """Return the Slack user id of a member of the workspace; None for anybody else."""
    user_id = reference.principal.removeprefix(f"slack:{team_id}/")
    is_member = user_id != reference.principal
    return user_id if is_member and user_id.isalnum() and user_id.isascii() else None


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
