"""What the response to a delivery over HTTP means, the same for every sink. Pure."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache

from relay.errors import Deferred, Failure
from relay.events.timestamps import parse_timestamp
from relay.net.http import Response
from relay.net.http_errors import status_text
from relay.net.retry_after import MAX_RETRY_AFTER, parse_retry_after

_TRANSIENT_STATUSES = {408, 409, 425, 429}
_MAX_HARMLESS_SKEW = 60.0
"""Seconds. Receivers of Standard Webhooks accept at least this much."""


def interpret_response(response: Response, now: datetime) -> Deferred | None:
    """Return None if the delivery succeeded (2xx), else the error to raise.

    408, 409, 425, 429 and 5xx are transient. 410 disables the sink. Anything else, such as a
    redirect, needs a person.
    """
    status = response.status
    if 200 <= status <= 299:
        return None
    skew = measure_clock_skew(response.headers.get("Date"), now, elapsed=response.elapsed)
    failure: Failure = "slow"
    if status == 410:
        failure = "disabled"
        advice = ": the receiver asks never to be called again"
    elif status in _TRANSIENT_STATUSES or 500 <= status <= 599:
        failure = "transient"
        advice = ""
    elif 300 <= status <= 399:
        advice = ": redirects are not followed, set the final URL"
    else:
        advice = f": correct the receiver or its URL{_skew_hint(status, skew)}"
    return Deferred(
        f"expected 2xx, got {status_text(status)}{advice}",
        after=parse_retry_after(response.headers.get("Retry-After"), now, maximum=MAX_RETRY_AFTER),
        failure=failure,
        status=status,
        answer=response.text,
        skew=skew,
    )


def measure_clock_skew(date_header: str | None, now: datetime, *, elapsed: float) -> float | None:
    """Return how many seconds the server's clock is ahead of ours for certain; negative: behind.

    Returns None without a readable ``Date``. The server wrote it at some moment of our wait, which
    took ``elapsed`` seconds, and without the fraction of its second (RFC 9110, section 6.6.1).
    """
    date = _parse_date(date_header)
    if date is None:
        return None
    ahead = (date - now).total_seconds()
    behind = ahead + elapsed + 1
    return ahead if ahead > 0 else min(behind, 0.0)


@lru_cache(maxsize=16)
def _parse_date(text: str | None) -> datetime | None:
    return parse_timestamp(text)  # all responses of a second have the same text


def _skew_hint(status: int, skew: float | None) -> str:
    """Return a hint if the receiver may have refused a good signature for its timestamp."""
    if status not in {400, 401, 403} or skew is None or abs(skew) <= _MAX_HARMLESS_SKEW:
        return ""
    direction = "ahead of" if skew > 0 else "behind"
    return (
        f"; its clock is {abs(skew):.0f} s {direction} ours, and signatures contain the time: "
        "check both clocks"
    )
