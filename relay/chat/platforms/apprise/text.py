"""A message as plain text, for services of which nothing is known. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from relay.chat.cards.card import Card, PrincipalRef, Text

_GAP = "\N{ZERO WIDTH SPACE}"


def card_text(card: Card) -> str:
    """What a card says, as plain text; what matters most comes first, as some services cut it."""
    parts = [
        render_text(card.summary),
        "\n".join(f"{label}: {render_text(text)}" for label, text in card.facts),
    ]
    parts += [
        "\n".join(f"- {render_text(line.text)}" for line in card.lines),
        *map(render_text, card.notes),
    ]
    buttons = [*card.buttons, *(button for line in card.lines for button in line.buttons)]
    if buttons:
        choices = " | ".join(dict.fromkeys(button.decision for button in buttons))
        event = card.buttons[0].event_id if card.buttons else "EVENT"
        parts.append(f"To answer, on a machine of this scope: imds-relay {choices} {event}")
    return "\n\n".join(part for part in (*parts, plain(card.footer)) if part)


def render_text(text: Text) -> str:
    """A text with its moments in UTC: which zone its readers live in is not known."""
    return "".join(
        f"{part.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if isinstance(part, datetime) else plain(part)
        for part in text
    )


def plain(part: str | PrincipalRef) -> str:
    """Words that call nobody and lead nowhere, whatever the service makes of them: a gap that nobody sees breaks both.

    The library keeps a service's own markup off; mentions and links are what many find in plain text.
    """
    words = re.sub(r"\s+", " ", part.principal if isinstance(part, PrincipalRef) else part)
    return re.sub(
        r"(?<=[@<])(?=\S)|(?<=:)(?=//)|(?<=\])(?=\()|(?<=\bwww)(?=\.)",
        _GAP,
        words,
        flags=re.IGNORECASE,
    )
