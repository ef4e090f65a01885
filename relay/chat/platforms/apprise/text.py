"""Renders a card as plain text, for services of any kind. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from relay.chat.cards.card import Card, PrincipalRef, Text

_ZERO_WIDTH_SPACE = "\N{ZERO WIDTH SPACE}"
_MENTION_OR_LINK = re.compile(
    r"(?<=[@<])(?=\S)|(?<=:)(?=//)|(?<=\])(?=\()|(?<=\bwww)(?=\.)", re.IGNORECASE
)


def card_text(card: Card) -> str:
    """Return a card as plain text. The most important part comes first: some services cut it."""
    facts = "\n".join(f"{label}: {plain_text_with_utc_times(text)}" for label, text in card.facts)
    lines = "\n".join(f"- {plain_text_with_utc_times(line.text)}" for line in card.lines)
    notes = [plain_text_with_utc_times(note) for note in card.notes]
    runbooks = "\n".join(f"Runbook of rule {rule}: {url}" for rule, url in card.runbooks)
    paragraphs = [plain_text_with_utc_times(card.summary), facts, lines, *notes, runbooks]
    paragraphs.append(_decision_command(card))
    paragraphs.append(neutralize_markup(card.footer))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def plain_text_with_utc_times(text: Text) -> str:
    """Return a text with times in UTC, because the readers' time zone is not known."""
    return "".join(_render_part(part) for part in text)


def neutralize_markup(text: str) -> str:
    """Return a text that mentions nobody and links nowhere.

    Many services find mentions and links in plain text. A space without width stops them. The
    library escapes each service's own markup.
    """
    return _MENTION_OR_LINK.sub(_ZERO_WIDTH_SPACE, re.sub(r"\s+", " ", text))


def _render_part(part: str | datetime | PrincipalRef) -> str:
    if isinstance(part, datetime):
        return f"{part.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return neutralize_markup(part.principal if isinstance(part, PrincipalRef) else part)


def _decision_command(card: Card) -> str:
    """Return how to decide on the command line; empty if nothing can be decided."""
    buttons = [*card.buttons, *(button for line in card.lines for button in line.buttons)]
    if not buttons:
        return ""
    decisions = " | ".join(dict.fromkeys(button.decision for button in buttons))
    event_id = card.buttons[0].event_id if card.buttons else "EVENT"
    return f"To answer, on a machine of this scope: imds-relay {decisions} {event_id}"
