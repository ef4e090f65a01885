"""Says which pattern with wildcards is certainly inside another. Pure.

Patterns are those of `relay.events.match`: ``*``, ``?`` and ``[…]``, without case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

_PART = re.compile(r"\[!?+\]?+[^\]]*\]|.", re.DOTALL)
"""A set of characters, or one character."""


def are_inside(patterns: Iterable[str], covers: Iterable[str]) -> bool:
    """Whether each name that one of the patterns can match certainly matches one of the covers."""
    known = tuple(covers)
    return all(any(is_inside(pattern, cover) for cover in known) for pattern in patterns)


def is_inside(pattern: str, cover: str) -> bool:
    """Whether each name that the pattern can match certainly matches the cover.

    False if that cannot be shown: of two sets of characters only equal ones are known to match.
    """
    inner, outer = _PART.findall(pattern.lower()), _PART.findall(cover.lower())
    # row[i]: whether the rest of the pattern from i on is inside the rest of the cover.
    row = [False] * len(inner) + [True]
    for taken in reversed(outer):
        after, row = row, [False] * (len(inner) + 1)
        for index in reversed(range(len(inner) + 1)):
            has_more = index < len(inner)
            if taken == "*":
                row[index] = after[index] or (has_more and row[index + 1])
            elif has_more:
                row[index] = after[index + 1] and _is_part_inside(inner[index], taken)
    return row[0]


def _is_part_inside(part: str, cover: str) -> bool:
    """Whether each character that a part of a pattern stands for is one that the cover takes."""
    if part == "*":
        return False
    if cover in ("?", part):
        return True
    is_single_character = len(part) == 1 and part != "?"
    return is_single_character and fnmatchcase(part, cover)
