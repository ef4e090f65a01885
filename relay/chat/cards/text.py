"""How every platform shows a `Text`: cut to one line, and rendered piece by piece. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from relay.chat.cards.card import PrincipalRef, Text


def one_line(text: Text, limit: int) -> Text:
    """Return a text on one line with at most ``limit`` characters of words.

    Times and people do not count. A text that is too long ends with the piece that was cut.
    """
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


def join_texts(texts: Iterable[Text], separator: str) -> Text:
    """Return texts as one text, with the separator between them."""
    joined: list[str | datetime | PrincipalRef] = []
    for text in texts:
        joined += [separator, *text]
    return tuple(joined[1:])


def render(
    text: Text,
    *,
    words: Callable[[str], str],
    person: Callable[[str], str],
    time: Callable[[datetime], str] | None = None,
) -> str:
    """Return a text in the markup of a platform. Without ``time``, times are in UTC."""
    show_time = time or utc_time
    pieces = []
    for piece in text:
        match piece:
            case datetime():
                pieces.append(show_time(piece))
            case PrincipalRef():
                pieces.append(person(piece.principal))
            case str():
                pieces.append(words(piece))
    return "".join(pieces)


def utc_time(time: datetime) -> str:
    """Return a time for readers whose time zone is not known."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
