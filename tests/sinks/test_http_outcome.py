"""What an HTTP response means for a delivery, and the pauses of all who try again."""

from __future__ import annotations

from datetime import timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from yarl import URL

from relay.errors import Deferred
from relay.net import exponential_backoff, with_jitter
from relay.net.http import (
    Request,
    Response,
    interpret_response,
    measure_clock_skew,
    open_session,
    send,
)
from tests.sinks.webhook_sink import NOW

TRANSIENT = {408, 409, 425, 429, *range(500, 600)}


def failure_of(status: int, **headers: str) -> Deferred | None:
    fields = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return interpret_response(Response(status=status, headers=fields, text="sorry"), NOW)


def later(seconds: float) -> str:
    return format_datetime(NOW.replace(microsecond=0) + timedelta(seconds=seconds), usegmt=True)


def test_every_status_has_its_meaning() -> None:
    """2xx is success. Transient statuses are retried, 410 disables, the others need a person."""
    for status in range(100, 600):
        failure = failure_of(status)
        if 200 <= status <= 299:
            assert failure is None, status
            continue
        assert failure is not None, status
        assert (failure.status, failure.answer, failure.after) == (status, "sorry", None)
        kind = "disabled" if status == 410 else "transient" if status in TRANSIENT else "slow"
        assert failure.failure == kind, status
        assert failure.reason.startswith(f"expected 2xx, got {status}")


def test_a_reason_says_what_to_do() -> None:
    for status, advice in (
        (404, " Not Found: correct the receiver or its URL"),
        (302, " Found: redirects are not followed, set the final URL"),
        (410, " Gone: the receiver asks never to be called again"),
        (503, " Service Unavailable"),
        (599, ""),
    ):
        failure = failure_of(status)
        assert failure is not None
        assert failure.reason == f"expected 2xx, got {status}{advice}"


def test_retry_after_is_seconds_or_a_date_and_cut_to_an_hour() -> None:
    in_half_a_minute = NOW + timedelta(seconds=30)
    for text, after in (
        ("0", 0.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        ("86400", 3600.0),
        ("9" * 5000, 3600.0),
        (later(31), 30.1),
        # RFC 850 and asctime, which every recipient must accept
        (f"{in_half_a_minute:%A, %d-%b-%y %H:%M:%S} GMT", 29.1),
        (f"{in_half_a_minute:%a %b %d %H:%M:%S %Y}", 29.1),
        (later(-86400), 0.0),
        (later(86400), 3600.0),
        *((text, None) for text in ("", "soon", "inf", "-1", "٣", "Sun, 99 Foo 99999 9:9:9 +9")),
    ):
        for status in (429, 404):
            failure = failure_of(status, retry_after=text)
            assert failure is not None
            assert failure.after == (after if after is None else pytest.approx(after)), text


@given(
    retry=st.text(max_size=40), date=st.text(max_size=40), status=st.sampled_from([401, 429, 503])
)
def test_any_text_in_the_headers_gives_a_bounded_pause(retry: str, date: str, status: int) -> None:
    failure = failure_of(status, Retry_After=retry, Date=date)
    assert failure is not None
    assert failure.after is None or 0 <= failure.after <= 3600


def test_a_refusal_mentions_a_skewed_clock_that_may_have_spoiled_the_signature() -> None:
    """See docs/protocol.md#clocks-that-differ. Every failure reports the skew."""
    for status, seconds, told in (
        *((status, 400, "; its clock is 399 s ahead of ours") for status in (400, 401, 403)),
        (401, -400, "; its clock is 400 s behind ours"),
        (401, 50, ""),
        (404, 400, ""),
        (503, 400, ""),
    ):
        failure = failure_of(status, Date=later(seconds))
        assert failure is not None
        assert failure.skew == pytest.approx(seconds - 0.9 if seconds > 0 else seconds + 0.1)
        assert ("clock" in failure.reason) == bool(told)
        assert told in failure.reason


def test_the_clock_skew_follows_from_the_date_of_a_response() -> None:
    """The duration of the request and the fraction of a second of a Date are not skew."""

    def skew(seconds: float, elapsed: float = 0.0) -> float | None:
        return measure_clock_skew(later(seconds), NOW, elapsed=elapsed)

    assert skew(400) == pytest.approx(399.1)
    assert skew(-400) == pytest.approx(-399.9)
    assert (skew(0), skew(-14, elapsed=15.0), skew(-1, elapsed=1.0)) == (0.0, 0.0, 0.0)
    assert skew(-60, elapsed=15.0) == pytest.approx(-44.9)
    for text in ("yesterday", None):
        assert measure_clock_skew(text, NOW, elapsed=0.0) is None


async def test_a_call_after_its_session_was_closed_can_be_tried_again() -> None:
    """A click in a chat may be on its way while a reload disconnects the chat."""
    async with open_session() as session:
        pass
    request = Request(url=URL("http://127.0.0.1:1"), headers={}, body=b"")
    with pytest.raises(Deferred, match="reloads"):
        await send(session, "GET", request, seconds=1)


# --- pauses between tries


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0.5), (1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (100_000, 3.0)]
)
def test_the_pause_doubles_with_each_failure_to_a_maximum(failures: int, seconds: float) -> None:
    assert exponential_backoff(failures, first=0.5, maximum=3.0) == seconds


def test_jitter_adds_at_most_a_quarter() -> None:
    assert with_jitter(8.0, 0.0) == 8.0
    assert with_jitter(8.0, 0.5) == 9.0
    assert 9.9 < with_jitter(8.0, 0.999) < 10.0
