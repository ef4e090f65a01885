"""A card as a Mattermost post: attachments with fields and buttons, in whose texts nothing is markup but ours. Pure.

Everything is in attachments and nothing in ``message``: a post whose message does not change can be edited whatever the
server's time limit for edits is, and bears no "(edited)".
Source: developers.mattermost.com, "Message attachments" and "Interactive messages".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from relay.chat.cards.card import Button, Card, PrincipalRef, Text, Tone

MOST_MESSAGE = 16383
"""Characters of a post's ``message`` (Mattermost, ``PostMessageMaxRunesV2``)."""
MOST_TITLE, MOST_VALUE = 300, 3000
"""Characters of a title, and of any other text in an attachment, before they are escaped."""
MOST_ASKED = 600
"""Characters of a dialog's question, before they are escaped."""

_GAP = "\N{ZERO WIDTH SPACE}"
_COLOURS: dict[Tone, str] = {
    "waiting": "#F0A30A",
    "held": "#8C5BD6",
    "approved": "#2E9E6B",
    "running": "#1C58D9",
    "over": "#8B8FA7",
}
_ESCAPED = re.compile(r"[\\`*\[\]|$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# A backslash does not keep a mention, a hashtag, an emoji or a bare URL from being one: the server looks for them in the text
# after markup is read. A gap that has no width does.
_GAPPED = re.compile(r"[@#&~<]|:(?=\S)|www(?=\d{0,3}\.)|\.(?=[A-Za-z]{2,}/)", re.IGNORECASE)
_BEGINS_A_BLOCK = re.compile(r"(?=[-+>=]|\d{1,9}[.)])")


def plain(text: str, *, begins: bool = True) -> str:
    """A text as Mattermost's Markdown shows it word for word, in one line. ``begins``: at the start of a line."""
    text = re.sub(r"\s+", " ", "".join(char if char.isprintable() else " " for char in text))
    if begins:
        text = text.lstrip()
    text = _GAPPED.sub(lambda found: found[0] + _GAP, _ESCAPED.sub(r"\\\g<0>", text))
    return _GAP + text if begins and _BEGINS_A_BLOCK.match(text) else text


def rendered(text: Text, names: Mapping[str, str], *, most: int = MOST_VALUE) -> str:
    """A text with its moments in UTC and its people by name, as far as ``names`` knows their principals; nobody is mentioned."""
    said, left = "", most
    for piece in text:
        if left <= 0:
            break
        if isinstance(piece, str):
            said += plain(_cut(piece, left), begins=not said)
            left -= len(piece)
        else:
            shown = _moment(piece) if isinstance(piece, datetime) else _person(piece, names)
            said += shown
            left -= len(shown)
    return said.strip()


def attachments(
    card: Card, names: Mapping[str, str], action: Callable[[Button], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The card's attachments. ``action`` makes the integration of a button that is answered in the chat itself."""
    actions = _Actions(action)
    paragraphs = [
        rendered(card.summary, names),
        *(rendered(note, names) for note in card.notes),
        _links(card.buttons),
    ]
    if card.code is not None:
        paragraphs.append(f"The page asks for this code: **{plain(card.code)}**")
    main: dict[str, Any] = {
        "fallback": _cut(_one_line(card.title), MOST_TITLE),
        "color": _COLOURS[card.tone],
        "title": plain(_cut(card.title, MOST_TITLE)),
        "text": "\n\n".join(part for part in paragraphs if part),
        "fields": [
            {"title": label, "value": rendered(text, names), "short": False}
            for label, text in card.facts
        ],
        "footer": plain(_cut(card.footer, MOST_TITLE)),
        "actions": actions.of(card.buttons),
    }
    lines = [
        {
            "fallback": _cut(_one_line(card.title), MOST_TITLE),
            "color": _COLOURS[card.tone],
            "text": "\n\n".join(
                part for part in (rendered(line.text, names), _links(line.buttons)) if part
            ),
            "actions": actions.of(line.buttons),
        }
        for line in card.lines
    ]
    return [main, *lines]


def thread_reply(lines: Sequence[Text], names: Mapping[str, str]) -> str:
    """Lines as the message of a reply in a thread, cut where all of them would be too long for one."""
    tries = [
        "\n".join(rendered(line, names, most=most) for line in lines) for most in (1500, 500, 150)
    ]
    return next(
        (message for message in tries if len(message) <= MOST_MESSAGE), tries[-1][:MOST_MESSAGE]
    )


class _Actions:
    """Makes buttons; within one post, each has an id of its own, of letters and digits alone (else the server knows it not)."""

    def __init__(self, action: Callable[[Button], Mapping[str, Any]]) -> None:
        self._action = action
        self._made = 0

    def of(self, buttons: Sequence[Button]) -> list[dict[str, Any]]:
        return [self._made_of(button) for button in buttons if button.url is None]

    def _made_of(self, button: Button) -> dict[str, Any]:
        self._made += 1
        return {
            "id": f"{button.decision}{self._made}",
            "type": "button",
            "name": button.label,
            "style": "primary" if button.decision == "approve" else "default",
            "integration": dict(self._action(button)),
        }


def _links(buttons: Sequence[Button]) -> str:
    """Buttons of Mattermost open no page: what is decided there has a link."""
    return " · ".join(
        f"**[{plain(button.label)}]({button.url})**" for button in buttons if button.url is not None
    )


def _moment(at: datetime) -> str:
    """A post has no reader's time zone: it says which one it means."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _person(who: PrincipalRef, names: Mapping[str, str]) -> str:
    name = names.get(who.principal)
    return f"**{plain(_cut(name, 64))}**" if name else f"`{_cut(_one_line(who.principal), 128)}`"


def _one_line(text: str) -> str:
    return (
        re.sub(r"\s+", " ", "".join(char if char.isprintable() else " " for char in text))
        .replace("`", "'")
        .strip()
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: max(most - 1, 0)]}…"
