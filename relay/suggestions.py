"""Names what a person may have meant, and what there is to choose from."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a name, without case; None if none is like it."""
    by_name = {other.lower(): other for other in known}
    matches = difflib.get_close_matches(name.lower(), by_name, n=1)
    return by_name[matches[0]] if matches else None


def describe_choices(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return what to write in place of an unknown name, as the end of a sentence.

    ``prefix`` precedes each name. Example: ``did you mean drain? There are bus, drain``.
    """
    names = list(dict.fromkeys(known))
    if not names:
        return "there are none"
    listed = f"{'there is' if len(names) == 1 else 'there are'} "
    listed += ", ".join(f"{prefix}{each}" for each in names)
    close = closest(name, names)
    if close is None:
        return listed
    return f"did you mean {prefix}{close}? {listed[0].upper()}{listed[1:]}"
