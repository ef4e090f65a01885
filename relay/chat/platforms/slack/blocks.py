"""Renders a card as a Slack message: Block Kit blocks and the notification's text. Pure.

Source of the limits: https://docs.slack.dev/reference/block-kit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    RichTextElement,
    RichTextElementParts,
)

from relay.chat.cards.card import Button, Card, Text, Tone
from relay.chat.platforms.slack.requests import LINK_ACTION_PREFIX
from relay.chat.platforms.slack.rich_text import (
    BOLD,
    CODE,
    card_text_to_mrkdwn,
    card_text_to_plain_text,
    join_card_text_lines,
    plain_text_object,
    replace_control_characters,
    rich_text_block_from_elements,
    rich_text_elements,
    truncate_card_text_to_single_line,
)

MAX_ENCODED_BYTES = 40_000
"""Bytes of a message's blocks, URL-encoded. Slack repeats them in each click, and the API accepts
requests of at most 64 KiB."""
_TEXT_LENGTHS = (1500, 700, 300, 100)
"""Characters of one text, tried in this order until the message is small enough."""
_MAX_TITLE = 150
_MAX_BUTTON_LABEL = 75
_MAX_BUTTON_VALUE = 2000
_MAX_URL = 3000
_MAX_CONFIRM_TITLE = 100
_MAX_CONFIRM_TEXT = 300
_MAX_CONFIRM_LABEL = 30
# The limits above are Slack's. The limits below are lower than Slack's.
_MAX_FOOTER = 500
_MAX_NOTIFICATION = 1000
_MAX_REPLY_LINE = 500
_TONE_MARKS: Mapping[Tone, str] = {
    "waiting": "🟡",
    "held": "🟠",
    "approved": "🟢",
    "running": "🔵",
    "over": "⚪",
}

ButtonValue = Callable[[Button], str]
"""Returns the value that Slack sends back when somebody clicks the button."""


@dataclass(frozen=True, slots=True)
class SlackMessage:
    """The content of a message. Notifications, and clients without blocks, show ``text``."""

    text: str
    blocks: tuple[Mapping[str, Any], ...]


def card_message(card: Card, team_id: str, button_value: ButtonValue | None) -> SlackMessage:
    """Return a card as a message in a channel of this workspace.

    With ``button_value`` None, no click reaches the relay. The message then has links in place of
    buttons: Slack warns about every click that no app acknowledges, even if the button only opens
    a page.
    """
    title = f"{_TONE_MARKS[card.tone]} {card.title}"
    text = card_text_to_mrkdwn((f"{title}. ", *card.summary), team_id, _MAX_NOTIFICATION)
    for max_text in _TEXT_LENGTHS:
        renderer = _CardRenderer(team_id, button_value, max_text)
        blocks = tuple(block.to_dict() for block in renderer.blocks(card, title))
        if len(quote_plus(json.dumps(blocks))) <= MAX_ENCODED_BYTES:
            return SlackMessage(text, blocks)
    return SlackMessage(text, (_make_rich_text_block((card.title[:_MAX_TITLE],), team_id),))


def text_message(lines: Sequence[Text], team_id: str) -> SlackMessage:
    """Return lines of text as a message in a thread or to one person."""
    text = join_card_text_lines(
        truncate_card_text_to_single_line(line, _MAX_REPLY_LINE) for line in lines
    )
    markup = card_text_to_mrkdwn(text, team_id, _MAX_NOTIFICATION)
    return SlackMessage(markup, (_make_rich_text_block(text, team_id),))


def _make_rich_text_block(text: Text, team_id: str) -> Mapping[str, Any]:
    block: Mapping[str, Any] = rich_text_block_from_elements(
        rich_text_elements(text, team_id)
    ).to_dict()
    return block


class _CardRenderer:
    """Renders one card with texts of at most ``max_text`` characters."""

    def __init__(self, team_id: str, button_value: ButtonValue | None, max_text: int) -> None:
        self._team_id = team_id
        self._button_value = button_value
        self._max_text = max_text
        self._action_numbers = count(1)

    def blocks(self, card: Card, title: str) -> Iterator[Block]:
        yield HeaderBlock(text=plain_text_object(title, _MAX_TITLE))
        yield rich_text_block_from_elements(
            self._rich_text_elements(
                truncate_card_text_to_single_line(card.summary, self._max_text), BOLD
            )
        )
        if card.facts:
            yield rich_text_block_from_elements(self._elements_of_all_facts(card.facts))
        for line in card.lines:
            text: Text = ("• ", *truncate_card_text_to_single_line(line.text, self._max_text))
            yield rich_text_block_from_elements(self._rich_text_elements(text))
            yield from self._actions(line.buttons)
        if card.notes:
            notes = join_card_text_lines(
                truncate_card_text_to_single_line(note, self._max_text) for note in card.notes
            )
            yield rich_text_block_from_elements(self._rich_text_elements(notes))
        yield from self._actions(card.buttons)
        if card.code is not None:
            yield rich_text_block_from_elements(
                [
                    *self._rich_text_elements(("The page asks for this code: ",)),
                    RichTextElementParts.Text(text=card.code, style=CODE),
                ]
            )
        if card.runbooks:
            yield rich_text_block_from_elements(_runbook_elements(card.runbooks))
        if card.footer:
            yield ContextBlock(elements=[plain_text_object(card.footer, _MAX_FOOTER)])

    def _rich_text_elements(
        self, text: Text, style: RichTextElementParts.TextStyle | None = None
    ) -> Iterator[RichTextElement]:
        return rich_text_elements(text, self._team_id, style)

    def _elements_of_all_facts(
        self, facts: Iterable[tuple[str, Text]]
    ) -> Iterator[RichTextElement]:
        for number, (label, text) in enumerate(facts):
            yield from self._rich_text_elements((f"\n{label}" if number else label,), BOLD)
            yield from self._rich_text_elements(
                (": ", *truncate_card_text_to_single_line(text, self._max_text))
            )

    def _actions(self, buttons: Sequence[Button]) -> Iterator[Block]:
        links = [
            button for button in buttons if button.url is not None and len(button.url) <= _MAX_URL
        ]
        if self._button_value is None:
            if links:
                yield rich_text_block_from_elements(_rich_text_links_replacing_buttons(links))
            return
        elements = [self._link_button(button) for button in links]
        for button in buttons:
            if button.url is None:
                value = self._button_value(button)
                if len(value) <= _MAX_BUTTON_VALUE:
                    elements.append(self._decision_button(button, value))
        if elements:
            yield ActionsBlock(elements=elements)

    def _link_button(self, button: Button) -> ButtonElement:
        return ButtonElement(
            text=plain_text_object(button.label, _MAX_BUTTON_LABEL),
            action_id=f"{LINK_ACTION_PREFIX}{button.decision}-{next(self._action_numbers)}",
            url=button.url,
            style=_button_style(button),
        )

    def _decision_button(self, button: Button, value: str) -> ButtonElement:
        return ButtonElement(
            text=plain_text_object(button.label, _MAX_BUTTON_LABEL),
            action_id=f"{button.decision}-{next(self._action_numbers)}",
            value=value,
            style=_button_style(button),
            confirm=ConfirmObject(
                title=plain_text_object(f"{button.label}?", _MAX_CONFIRM_TITLE),
                text=_confirm_text(button.question),
                confirm=plain_text_object(button.label, _MAX_CONFIRM_LABEL),
                deny=plain_text_object("Cancel", _MAX_CONFIRM_LABEL),
            ),
        )


def _rich_text_links_replacing_buttons(buttons: Iterable[Button]) -> Iterator[RichTextElement]:
    for number, button in enumerate(buttons):
        if number:
            yield RichTextElementParts.Text(text="  ·  ")
        yield RichTextElementParts.Link(
            url=str(button.url), text=replace_control_characters(button.label), style=BOLD
        )


def _runbook_elements(runbooks: Iterable[tuple[str, str]]) -> Iterator[RichTextElement]:
    for number, (rule, url) in enumerate(runbooks):
        line_break = "\n" if number else ""
        yield RichTextElementParts.Text(text=f"{line_break}Runbook of rule {rule}: ")
        yield RichTextElementParts.Link(url=url, text=url)


def _button_style(button: Button) -> str | None:
    return "primary" if button.decision == "approve" else None


def _confirm_text(question: Text) -> PlainTextObject:
    """Return a question, shortened in its middle: its end says what the decision leads to."""
    text = card_text_to_plain_text(question)
    if len(text) > _MAX_CONFIRM_TEXT:
        start = _MAX_CONFIRM_TEXT // 3
        end = _MAX_CONFIRM_TEXT - start - len(" … ")
        text = f"{text[:start]} … {text[-end:]}"
    return plain_text_object(text, _MAX_CONFIRM_TEXT)
