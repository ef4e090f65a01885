"""Converts timestamps: reads several formats, writes RFC 3339."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache


def format_rfc3339(moment: datetime) -> str:
    """Format as RFC 3339 in UTC with its own precision. Raises ValueError without a time zone."""
    if moment.tzinfo is None:
        raise ValueError(f"expected a moment with a time zone, got {moment!r}")
    return _format(moment, "auto")


@lru_cache(maxsize=1024)  # the events of a document share few values of NotBefore
def parse_timestamp(text: str | None) -> datetime | None:
    """Read RFC 1123 (the weekday is not checked) or ISO 8601, as UTC if it has no zone; or None."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            moment = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:
        return None


def format_sortable(moment: datetime) -> str:
    """Format a moment as RFC 3339 in UTC with six digits, so that texts sort as moments do."""
    return _format(moment, "microseconds")


@lru_cache(maxsize=1024)  # all that a poll records has one time
def _format(moment: datetime, timespec: str) -> str:
    return moment.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def duration_text(seconds: int) -> str:
    """Return how long something takes, in one unit. The page says it alike (words.js)."""
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
