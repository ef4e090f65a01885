"""What a message shows, without the form of any platform: texts, facts and buttons. Pure.

The other modules of this package make a `Card` from an approval status, and each platform renders
it. Times and people stay objects in a text, so that a platform can show a time in the reader's
time zone. Plain strings are not escaped for any platform.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

from relay.approvals.request import DecisionKind
from relay.approvals.status import ApprovalStatus
from relay.sentences import PrincipalRef, Text

_Made = TypeVar("_Made")
Tone = Literal["waiting", "held", "approved", "running", "over"]
"""The state of an event that the color of a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """One decision that is possible now.

    ``question`` is asked before a click counts, where the platform can ask. ``url`` leads to the
    page, where the decision is prepared; None if it is taken in the chat itself.
    """

    decision: DecisionKind
    label: str
    event_id: str
    revision: str
    question: Text
    url: str | None = None


@dataclass(frozen=True, slots=True)
class EventLine:
    text: Text
    buttons: tuple[Button, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The content of a message. Every platform shows all of it, in its own form.

    ``facts`` are pairs of a label and a text. ``notes`` are sentences that follow them. ``lines``
    are the events of a grouped message. ``footer`` names event and scope. ``runbooks`` are the
    https URLs of runbooks, each with the name of its rule.
    """

    title: str
    tone: Tone
    summary: Text
    facts: tuple[tuple[str, Text], ...] = ()
    notes: tuple[Text, ...] = ()
    lines: tuple[EventLine, ...] = ()
    buttons: tuple[Button, ...] = ()
    footer: str = ""
    runbooks: tuple[tuple[str, str], ...] = ()


Link = Callable[[ApprovalStatus, DecisionKind], str | None]
"""Returns the URL of the button for a decision about an event; None if it decides in the chat."""


def one_line(text: Text, limit: int) -> Text:
    """Return one line of at most ``limit`` characters of words; times and people do not count."""
    pieces: list[str | datetime | PrincipalRef] = []
    for piece in text:
        if isinstance(piece, str):
            words = on_one_line(piece)
            pieces.append(cut(words, limit))
            if len(words) > limit:
                break
            limit -= len(words)
        else:
            pieces.append(piece)
    return tuple(pieces)


def on_one_line(words: str) -> str:
    """Return words without line breaks, and without characters that change their direction."""
    printable = "".join(char if char.isprintable() else " " for char in words)
    return re.sub(r"\s+", " ", printable)


def cut(words: str, limit: int) -> str:
    """Return at most ``limit`` characters. The end stays: it may say how many more there are."""
    if len(words) <= limit:
        return words
    end = len(words) - limit // 2
    return f"{words[: max(limit - limit // 2 - 1, 0)]}…{words[end:]}"


def longest_fitting(
    make: Callable[[int], _Made], limits: Sequence[int], fits: Callable[[_Made], bool]
) -> _Made:
    """Return what ``make`` returns for the first limit at which it fits, or else for the last."""
    *longer, shortest = limits
    return next((made for made in map(make, longer) if fits(made)), None) or make(shortest)
