"""How a card looks in Slack: blocks, and the text of the notification. Pure.

Texts that others wrote (Azure, resource names, reasons) stand in rich text and plain text alone, which Slack shows letter for
letter: there is no markup to break out of, whatever they hold. Moments and people are elements of their own. Only the text
of notifications is Slack's markup, and is escaped as https://docs.slack.dev/messaging/formatting-message-text says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any
from urllib.parse import quote_plus

from slack_sdk.models.blocks import (
    ActionsBlock,
    Block,
    ButtonElement,
    ConfirmObject,
    ContextBlock,
    HeaderBlock,
    PlainTextObject,
    RichTextBlock,
    RichTextElement,
    RichTextElementParts,
    RichTextSectionElement,
)

from relay.chat.cards.card import Button, Card, Line, PrincipalRef, Text, Tone

LINK = "link"
"""What the action of a button begins with that only opens a page: Slack tells of its click too, and nothing follows from it."""
LARGEST = 40_000
"""Bytes of a message as Slack sends it back with each click, and the relay takes 64 KiB of a call at the most."""
_CUTS = (1500, 700, 300, 100)
"""Characters that any one text may have; fewer where the whole would be too large."""
_TITLE, _LABEL, _QUESTION, _HEADING, _VERB, _VALUE, _URL = 150, 75, 300, 100, 30, 2000, 3000
"""Characters that the reference of Block Kit allows: header, button, confirmation, its title and its buttons, value and URL."""
_CONTEXT, _NOTICE, _SAID = 500, 1000, 500
"""Characters of a footer, a notification and one sentence: less than what is allowed."""
_DATE = "{time_secs} on {date_short}"
_MARKS: Mapping[Tone, str] = {
    "waiting": "🟡",
    "held": "🟠",
    "approved": "🟢",
    "running": "🔵",
    "over": "⚪",
}
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")
"""What could feign a line of ours, or turn its direction."""
_BOLD = RichTextElementParts.TextStyle(bold=True)
_CODE = RichTextElementParts.TextStyle(code=True)

Value = Callable[[Button], str]
"""What a button that is answered in the chat brings back."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a message is sent as. ``text`` is for notifications, and for whom blocks cannot be shown."""

    text: str
    blocks: tuple[Mapping[str, Any], ...]


def card_message(card: Card, team: str, value: Value | None) -> Message:
    """A card as a message in a channel of this workspace.

    ``value`` None: no click reaches the relay. Slack warns of each that nobody acknowledges, also where a button only opens
    a page, so there are links then in place of buttons.
    """
    text = _markup((f"{_MARKS[card.tone]} {card.title}. ", *card.summary), team)
    drawn = (tuple(block.to_dict() for block in _blocks(card, team, value, most)) for most in _CUTS)
    fitting = (blocks for blocks in drawn if len(quote_plus(json.dumps(blocks))) <= LARGEST)
    return Message(text, next(fitting, (_rich(*_parts((card.title[:_TITLE],), team)).to_dict(),)))


def text_message(lines: Sequence[Text], team: str) -> Message:
    """Sentences, one a line: in a thread, or to one person alone."""
    text = _lines([_cut(line, _SAID) for line in lines])
    return Message(_markup(text, team), (_rich(*_parts(text, team)).to_dict(),))


def _blocks(card: Card, team: str, value: Value | None, most: int) -> Iterator[Block]:
    numbers = count(1)
    yield HeaderBlock(text=_plain(f"{_MARKS[card.tone]} {card.title}", _TITLE))
    yield _rich(*_parts(_cut(card.summary, most), team, _BOLD))
    if card.facts:
        yield _rich(*_facts(card.facts, team, most))
    for line in card.lines:
        yield from _line(line, team, value, most, numbers)
    if card.notes:
        yield _rich(*_parts(_lines([_cut(note, most) for note in card.notes]), team))
    yield from _actions(card.buttons, value, numbers)
    if card.code is not None:
        yield _rich(
            *_parts(("The page asks for this code: ",), team),
            RichTextElementParts.Text(text=card.code, style=_CODE),
        )
    if card.footer:
        yield ContextBlock(elements=[_plain(card.footer, _CONTEXT)])


def _facts(facts: Iterable[tuple[str, Text]], team: str, most: int) -> Iterator[RichTextElement]:
    for number, (label, text) in enumerate(facts):
        yield from _parts(((f"\n{label}" if number else label),), team, _BOLD)
        yield from _parts((": ", *_cut(text, most)), team)


def _line(
    line: Line, team: str, value: Value | None, most: int, numbers: Iterator[int]
) -> Iterator[Block]:
    yield _rich(*_parts(("• ", *_cut(line.text, most)), team))
    yield from _actions(line.buttons, value, numbers)


def _actions(
    buttons: Sequence[Button], value: Value | None, numbers: Iterator[int]
) -> Iterator[Block]:
    links = [button for button in buttons if button.url is not None and len(button.url) <= _URL]
    if value is None:
        if links:
            yield _rich(*_links(links))
        return
    answered = [button for button in buttons if button.url is None and len(value(button)) <= _VALUE]
    if links or answered:
        yield ActionsBlock(
            elements=[_button(button, value, next(numbers)) for button in (*links, *answered)]
        )


def _links(buttons: Iterable[Button]) -> Iterator[RichTextElement]:
    for number, button in enumerate(buttons):
        if number:
            yield RichTextElementParts.Text(text="  ·  ")
        yield RichTextElementParts.Link(url=str(button.url), text=_calm(button.label), style=_BOLD)


def _button(button: Button, value: Value, number: int) -> ButtonElement:
    style = "primary" if button.decision == "approve" else None
    label = _plain(button.label, _LABEL)
    if button.url is not None:
        return ButtonElement(
            text=label, action_id=f"{LINK}-{button.decision}-{number}", url=button.url, style=style
        )
    confirm = ConfirmObject(
        title=_plain(f"{button.label}?", _HEADING),
        text=_plain(_middle(_flat(button.question)), _QUESTION),
        confirm=_plain(button.label, _VERB),
        deny=_plain("Cancel", _VERB),
    )
    return ButtonElement(
        text=label,
        action_id=f"{button.decision}-{number}",
        value=value(button),
        style=style,
        confirm=confirm,
    )


def _rich(*elements: RichTextElement) -> RichTextBlock:
    return RichTextBlock(elements=[RichTextSectionElement(elements=list(elements))])


def _parts(
    text: Text, team: str, style: RichTextElementParts.TextStyle | None = None
) -> Iterator[RichTextElement]:
    for part in text:
        match part:
            case datetime():
                yield RichTextElementParts.Date(
                    timestamp=int(part.timestamp()), format=_DATE, fallback=_utc(part), style=style
                )
            case PrincipalRef() if (user := _user(part, team)) is not None:
                yield RichTextElementParts.User(user_id=user)
            case PrincipalRef():
                yield RichTextElementParts.Text(text=part.principal, style=style)
            case str() if part:
                yield RichTextElementParts.Text(text=part, style=style)


def _user(who: PrincipalRef, team: str) -> str | None:
    """The person's id, of somebody of this workspace."""
    user = who.principal.removeprefix(f"slack:{team}/")
    return user if user != who.principal and user.isalnum() and user.isascii() else None


def _markup(text: Text, team: str) -> str:
    """In Slack's markup, escaped: for the text of notifications."""
    pieces = []
    for part in _cut(text, _NOTICE):
        match part:
            case datetime():
                pieces.append(f"<!date^{int(part.timestamp())}^{_DATE}|{_utc(part)}>")
            case PrincipalRef() if (user := _user(part, team)) is not None:
                pieces.append(f"<@{user}>")
            case _:
                pieces.append(_escaped(part.principal if isinstance(part, PrincipalRef) else part))
    return "".join(pieces)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _flat(text: Text) -> str:
    return "".join(
        _utc(part)
        if isinstance(part, datetime)
        else part.principal
        if isinstance(part, PrincipalRef)
        else part
        for part in text
    )


def _utc(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%H:%M:%S on %Y-%m-%d} UTC"


def _plain(text: str, most: int) -> PlainTextObject:
    text = _calm(text)
    return PlainTextObject(text=text if len(text) <= most else f"{text[: most - 1]}…", emoji=False)


def _middle(text: str) -> str:
    """Cut where it hurts least: a question says at its beginning what it is about, and at its end what follows."""
    return (
        text
        if len(text) <= _QUESTION
        else f"{text[: _QUESTION // 3]} … {text[3 - 2 * _QUESTION // 3 :]}"
    )


def _calm(text: str) -> str:
    return _UNSEEN.sub(" ", text)


def _cut(text: Text, most: int) -> Text:
    """At most so many characters of words, in one line; where there are more, it ends with an ellipsis."""
    kept: list[str | datetime | PrincipalRef] = []
    left = most
    for part in text:
        if not isinstance(part, str):
            kept.append(part)
            continue
        if len(part) > left:
            return (*kept, f"{_calm(part[:left])}…")
        kept.append(_calm(part))
        left -= len(part)
    return tuple(kept)


def _lines(texts: Iterable[Text]) -> Text:
    return tuple(
        part for number, text in enumerate(texts) for part in (("\n", *text) if number else text)
    )
