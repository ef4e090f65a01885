"""A message as Teams takes it: Adaptive Cards in the envelope that a Workflows webhook forwards. Pure.

Sources: https://learn.microsoft.com/microsoftteams/platform/webhooks-and-connectors/how-to/connectors-using (the envelope),
https://adaptivecards.io/explorer (elements; Teams takes version 1.5 and older),
https://learn.microsoft.com/adaptive-cards/authoring-cards/text-features (Markdown, DATE and TIME),
https://learn.microsoft.com/microsoftteams/limits-specifications-teams (28 kB for a message).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from relay.approvals.request import DecisionKind
from relay.chat.cards.card import Button, Card, PrincipalRef, Text, Tone

MAX_CARD_BYTES = 27_000
"""What `card_size` of a card may be: less than the 28,672 bytes that Teams allows for a message's properties."""
LENGTHS = (1000, 300, 100, 40)
"""Characters of one text: the first of these with which the card is light enough."""
_STYLES: dict[Tone, str] = {
    "waiting": "warning",
    "held": "attention",
    "approved": "good",
    "running": "accent",
    "over": "emphasis",
}
_ACTIONS: dict[DecisionKind, str] = {
    "approve": "positive",
    "hold": "destructive",
    "release": "default",
}
_GAP = "\N{ZERO WIDTH SPACE}"

Json = dict[str, Any]


def card_message(card: Card) -> Json:
    """The message that shows a card."""
    return _fitted(
        lambda longest: _adaptive(
            [*_body(card, longest)],
            [*map(_action, card.buttons)],
            _plain((f"{card.title}. ", *card.summary), longest),
        )
    )


def follow_up(lines: Sequence[Text]) -> Json:
    """A short message of one line or more; of several, the first is the heading."""

    def made(longest: int) -> Json:
        first, *rest = (render_markdown(line, longest) for line in lines)
        head = _block(first, weight="Bolder") if rest else _block(first)
        return _adaptive(
            [head, *(_block(line, spacing="Small") for line in rest)], [], _plain(lines[0], longest)
        )

    return _fitted(made)


def card_size(card: Json) -> int:
    """Bytes of a card as Teams seems to count them: as text within JSON, what is not ASCII as escapes.

    There a request of 24,453 bytes was refused for 28,897 (https://github.com/MicrosoftDocs/msteams-docs/issues/11274), after the
    workflow had answered 202: nobody hears of it.
    """
    return len(json.dumps(json.dumps(card)))


def render_markdown(text: Text, longest: int = LENGTHS[0]) -> str:
    """A text in the Markdown of cards: moments become the reader's own, words stay words and are cut to a length."""
    made, left = "", longest
    for part in text:
        if isinstance(part, datetime):
            made += moment(part)
        elif left > 0:
            words = _words(part)
            made += escaped(_cut(words, left))
            left -= len(words)
    return re.sub(r"^(\s*)([-+#>=]|\d+[.)])", rf"\1{_GAP}\2", made)  # else it begins a list


def moment(at: datetime) -> str:
    """Date and time of the reader.

    Capitals, no blanks inside of the braces, whole seconds and a zone: anything else is shown to the reader as it stands.
    """
    text = f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return f"{{{{DATE({text}, SHORT)}}}} {{{{TIME({text})}}}}"


def escaped(words: str) -> str:
    """Words that stay words, whatever they hold: no emphasis, link, mention, tag or function.

    A backslash keeps Markdown off. What clients look for by themselves (addresses, tags, functions) is broken by a gap that
    nobody sees.
    """
    words = re.sub(r"([\\*_\[\]`~])", r"\\\1", words)
    return re.sub(
        r"(?<=[<@{$&])(?=\S)|(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=mailto)(?=:)",
        _GAP,
        words,
        flags=re.IGNORECASE,
    )


def _words(part: str | PrincipalRef) -> str:
    """On one line: whoever wrote it makes no paragraphs of their own."""
    return re.sub(r"\s+", " ", part.principal if isinstance(part, PrincipalRef) else part)


def _plain(text: Text, longest: int) -> str:
    """For clients that show no cards: no Markdown, moments in UTC."""
    words = "".join(
        f"{part.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if isinstance(part, datetime) else _words(part)
        for part in text
    )
    return _cut(words, longest)


def _cut(words: str, longest: int) -> str:
    """Words of that many characters at the most; what is left out is left out before their end, which may say how many more."""
    if len(words) <= longest:
        return words
    end = longest // 4
    return f"{words[: longest - end - 1]}…{words[len(words) - end :]}"


def _body(card: Card, longest: int) -> Iterator[Json]:
    yield {
        "type": "Container",
        "style": _STYLES[card.tone],
        "bleed": True,
        "items": [
            _block(
                render_markdown((card.title,), longest),
                size="Large",
                weight="Bolder",
                style="heading",
            ),
            _block(render_markdown(card.summary, longest)),
        ],
    }
    for told, facts in groupby(
        card.facts, key=lambda fact: any(isinstance(part, datetime) for part in fact[1])
    ):
        if told:  # only a TextBlock is said to show moments
            yield from (
                _block(f"**{label}:** {render_markdown(text, longest)}") for label, text in facts
            )
        else:
            yield {
                "type": "FactSet",
                "facts": [
                    {"title": label, "value": render_markdown(text, longest)}
                    for label, text in facts
                ],
            }
    for line in card.lines:
        items = [_block(render_markdown(line.text, longest))]
        if line.buttons:
            items.append(
                {"type": "ActionSet", "spacing": "Small", "actions": [*map(_action, line.buttons)]}
            )
        yield {"type": "Container", "separator": True, "items": items}
    for note in card.notes:
        yield _block(render_markdown(note, longest))
    if card.code is not None:
        yield _block(f"The page asks for this code: **{card.code}**")
    if card.footer:
        yield _block(render_markdown((card.footer,), longest), size="Small", isSubtle=True)


def _block(text: str, **more: object) -> Json:
    return {"type": "TextBlock", "text": text, "wrap": True, **more}


def _action(button: Button) -> Json:
    return {
        "type": "Action.OpenUrl",
        "title": button.label,
        "style": _ACTIONS[button.decision],
        "url": button.url,
    }


def _adaptive(body: list[Json], actions: list[Json], fallback: str) -> Json:
    return {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.5",
        "msteams": {"width": "Full"},
        "fallbackText": fallback,
        "body": body,
        **({"actions": actions} if actions else {}),
    }


def _fitted(make: Callable[[int], Json]) -> Json:
    """The message, with texts as long as there is room for."""
    card = next(
        (made for made in map(make, LENGTHS) if card_size(made) <= MAX_CARD_BYTES), None
    ) or make(LENGTHS[-1])
    return {
        "type": "message",
        "attachments": [
            {
                "contentType": "application/vnd.microsoft.card.adaptive",
                "contentUrl": None,
                "content": card,
            }
        ],
    }
