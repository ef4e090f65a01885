"""What an HTTP response means for a delivery: status, Retry-After and Date."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from relay.errors import Deferred
from relay.net.http import Response, interpret_response, measure_clock_skew
from tests.builders import cloudevent
from tests.sinks.http_receiver import Connection, listening
from tests.sinks.webhook_sink import NOW, sink

TRANSIENT = {408, 409, 425, 429, *range(500, 600)}
DELIVERED = {*range(200, 300)}


def response(status: int, *, elapsed: float = 0.0, **headers: str) -> Response:
    fields = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return Response(status=status, headers=fields, text="sorry", elapsed=elapsed)


def failure_of(status: int, **headers: str) -> Deferred:
    failure = interpret_response(response(status, elapsed=0.0, **headers), NOW)
    assert failure is not None
    return failure


def expected_failure(status: int) -> str:
    if status == 410:
        return "disabled"
    return "transient" if status in TRANSIENT else "slow"


def test_every_status_has_its_meaning() -> None:
    """2xx is success. Transient statuses are retried, 410 disables, the others need a person."""
    for status in range(100, 600):
        failure = interpret_response(response(status), NOW)
        if status in DELIVERED:
            assert failure is None, status
            continue
        assert failure is not None, status
        assert (failure.status, failure.response, failure.after) == (status, "sorry", None)
        assert failure.reason.startswith(f"expected 2xx, got {status}")
        assert failure.failure == expected_failure(status), status


async def test_every_status_has_that_meaning_over_the_wire() -> None:
    """A 1xx is not the response, the next status is. 101 switches protocols, so it is final."""

    async def status_by_status(connection: Connection) -> None:
        while True:
            await connection.request()
            status = 99 + len(connection.receiver.requests)
            await connection.answer(status)
            if status < 200 and status != 101:
                await connection.answer(204)

    async with listening(status_by_status) as receiver, sink(url=receiver.url) as webhook:
        for status in range(100, 600):
            try:
                seen_status: int | None = (await webhook.deliver(cloudevent())).status
                failure = None
            except Deferred as deferred:
                seen_status, failure = deferred.status, deferred.failure
            informational = status < 200 and status != 101
            assert seen_status == (204 if informational else status)
            if informational or status in DELIVERED:
                assert failure is None
            else:
                assert failure == expected_failure(status)
        assert len(receiver.requests) == 500
        assert receiver.connections == 1


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (404, " Not Found: correct the receiver or its URL"),
        (302, " Found: redirects are not followed, set the final URL"),
        (410, " Gone: the receiver asks never to be called again"),
        (503, " Service Unavailable"),
        (599, ""),
    ],
)
def test_a_reason_says_what_to_do(status: int, advice: str) -> None:
    assert failure_of(status).reason == f"expected 2xx, got {status}{advice}"


@pytest.mark.parametrize("status", [429, 503, 500, 404])
@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("0", 0.0),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("3600", 3600.0),
        ("86400", 3600.0),
        ("9" * 5000, 3600.0),
        (format_datetime(NOW.replace(microsecond=0) + timedelta(seconds=31), usegmt=True), 30.1),
        (
            f"{NOW + timedelta(seconds=30):%A, %d-%b-%y %H:%M:%S} GMT",
            29.1,
        ),  # RFC 850, which every recipient must accept
        (f"{NOW + timedelta(seconds=30):%a %b %d %H:%M:%S %Y}", 29.1),  # asctime, the same
        (format_datetime(NOW - timedelta(days=1), usegmt=True), 0.0),
        (format_datetime(NOW + timedelta(days=1), usegmt=True), 3600.0),
        ("", None),
        ("soon", None),
        ("inf", None),
        ("-1", None),
        ("1.5", 1.5),
        ("٣", None),
        ("Sun, 99 Foo 99999 99:99:99 +9999", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_cut_to_an_hour(
    status: int, text: str, after: float | None
) -> None:
    assert failure_of(status, Retry_After=text).after == (
        after if after is None else pytest.approx(after)
    )


@given(
    retry=st.text(max_size=40), date=st.text(max_size=40), status=st.sampled_from([401, 429, 503])
)
def test_any_text_in_the_headers_gives_a_bounded_pause(retry: str, date: str, status: int) -> None:
    failure = failure_of(status, Retry_After=retry, Date=date)
    assert failure.after is None or 0 <= failure.after <= 3600


def later(seconds: float) -> str:
    return format_datetime(NOW.replace(microsecond=0) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refusal_mentions_a_skewed_clock_that_may_have_spoiled_the_signature(
    status: int,
) -> None:
    """See docs/protocol.md#clocks-that-differ."""
    assert "; its clock is 399 s ahead of ours" in failure_of(status, Date=later(400)).reason
    assert "; its clock is 400 s behind ours" in failure_of(status, Date=later(-400)).reason
    assert "clock" not in failure_of(status, Date=later(50)).reason
    assert "clock" not in failure_of(status).reason
    assert "clock" not in failure_of(404, Date=later(400)).reason


def test_the_clock_skew_follows_from_the_date_of_a_response() -> None:
    """The duration of the request and the fraction of a second of a Date are not skew."""

    def skew(seconds: float, elapsed: float = 0.0) -> float | None:
        return measure_clock_skew(later(seconds), NOW, elapsed=elapsed)

    assert skew(400) == pytest.approx(399.1)
    assert skew(-400) == pytest.approx(-399.9)
    assert (skew(0), skew(-14, elapsed=15.0), skew(-1, elapsed=1.0)) == (0.0, 0.0, 0.0)
    assert skew(-60, elapsed=15.0) == pytest.approx(-44.9)
    assert measure_clock_skew("yesterday", NOW, elapsed=0.0) is None
    assert measure_clock_skew(None, NOW, elapsed=0.0) is None


@pytest.mark.parametrize("status", [401, 410, 503])
def test_a_failure_reports_the_clock_skew(status: int) -> None:
    assert failure_of(status, Date=later(400)).skew == pytest.approx(399.1)


@pytest.mark.parametrize("spelling", [str, str.lower], ids=["as in the RFC", "lower case"])
async def test_retry_after_is_read_from_a_real_response(spelling: Callable[[str], str]) -> None:
    async def busy(connection: Connection) -> None:
        await connection.request()
        await connection.answer(429, {spelling("Retry-After"): "12"}, b"slow down")

    async with listening(busy) as receiver, sink(url=receiver.url) as webhook:
        with pytest.raises(Deferred) as caught:
            await webhook.deliver(cloudevent())
    assert (caught.value.after, caught.value.failure, caught.value.response) == (
        12.0,
        "transient",
        "slow down",
    )
