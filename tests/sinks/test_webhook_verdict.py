"""What an answer means: a table over every status, Retry-After in all its forms, and receivers whose clock is wrong."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from relay.errors import Deferred
from relay.net.http import Response, interpret_response
from relay.sinks import Receipt
from tests.builders import cloudevent
from tests.sinks.http_receiver import Connection, listening
from tests.sinks.webhook_sink import NOW, sink

TRANSIENT = {408, 409, 425, 429, *range(500, 600)}
DELIVERED = {*range(200, 300)}


def meant(status: int, **headers: str) -> Deferred:
    fields = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    outcome = interpret_response(Response(status, fields, "sorry"), NOW)
    assert isinstance(outcome, Deferred)
    return outcome


@pytest.mark.parametrize("status", range(100, 600))
def test_every_status_has_its_meaning(status: int) -> None:
    """What passes is tried again, 410 stops, what a person must correct is tried slowly; only 2xx is delivered."""
    outcome = interpret_response(Response(status, CIMultiDict(), "text"), NOW)
    if status in DELIVERED:
        assert outcome == Receipt(status, "text")
        return
    assert isinstance(outcome, Deferred)
    assert (outcome.status, outcome.response, outcome.after) == (status, "text", None)
    assert outcome.reason.startswith(f"expected 2xx, got {status}")
    assert outcome.failure == (
        "disabled" if status == 410 else "transient" if status in TRANSIENT else "slow"
    )


async def test_every_status_has_that_meaning_over_the_wire() -> None:
    """1xx is no answer: the one that follows is. 101 would be a switch to another protocol, and is an answer."""

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
                told: int | None = (await webhook.deliver(cloudevent())).status
                failure = None
            except Deferred as deferred:
                told, failure = deferred.status, deferred.failure
            informational = status < 200 and status != 101
            assert told == (204 if informational else status)
            if informational or status in DELIVERED:
                assert failure is None
            else:
                assert failure == (
                    "disabled" if status == 410 else "transient" if status in TRANSIENT else "slow"
                )
        assert len(receiver.requests) == 500
        assert receiver.connections == 1


def test_a_reason_says_what_to_do() -> None:
    assert (
        meant(404).reason
        == "expected 2xx, got 404 Not Found: the receiver or its URL must be mended"
    )
    assert (
        meant(302).reason
        == "expected 2xx, got 302 Found: redirects are not followed, give the URL that answers itself"
    )
    assert (
        meant(410).reason
        == "expected 2xx, got 410 Gone: the receiver asks never to be called again"
    )
    assert meant(503).reason == "expected 2xx, got 503 Service Unavailable"
    assert meant(599).reason == "expected 2xx, got 599"


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
        ),  # RFC 850, which receivers must accept: we too
        (f"{NOW + timedelta(seconds=30):%a %b %d %H:%M:%S %Y}", 29.1),  # asctime, the same
        (format_datetime(NOW - timedelta(days=1), usegmt=True), 0.0),
        (format_datetime(NOW + timedelta(days=1), usegmt=True), 3600.0),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("1.5", None),
        ("٣", None),
        ("Sun, 99 Foo 99999 99:99:99 +9999", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_cut_to_an_hour(
    status: int, text: str, after: float | None
) -> None:
    assert meant(status, Retry_After=text).after == (
        after if after is None else pytest.approx(after)
    )


@given(
    retry=st.text(max_size=40), date=st.text(max_size=40), status=st.sampled_from([401, 429, 503])
)
def test_no_header_of_an_answer_makes_more_than_a_verdict(
    retry: str, date: str, status: int
) -> None:
    outcome = meant(status, Retry_After=retry, Date=date)
    assert outcome.after is None or 0 <= outcome.after <= 3600


def later(seconds: float) -> str:
    return format_datetime(NOW.replace(microsecond=0) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_receiver_whose_clock_is_wrong_is_told_of_where_it_may_have_refused_a_good_signature(
    status: int,
) -> None:
    """See docs/protocol.md#clocks-that-differ."""
    assert (
        "; its clock is 399 s ahead of ours, and signatures bear the time"
        in meant(status, Date=later(400)).reason
    )
    assert "; its clock is 400 s behind ours" in meant(status, Date=later(-400)).reason
    assert "clock" not in meant(status, Date=later(50)).reason
    assert "clock" not in meant(status).reason
    assert "clock" not in meant(404, Date=later(400)).reason


@pytest.mark.parametrize("status", [204, 401, 410, 503])
def test_the_clock_of_a_receiver_is_compared_by_its_date_whatever_it_answers(status: int) -> None:
    """Only what cannot be the time that the request took, nor the fraction of a second that a Date has not."""

    def skew(seconds: float, took: float = 0.0) -> float | None:
        return interpret_response(
            Response(status, CIMultiDict({"Date": later(seconds)}), None, took), NOW
        ).skew

    assert skew(400) == pytest.approx(399.1)
    assert skew(-400) == pytest.approx(-399.9)
    assert (skew(0), skew(-14, took=15.0), skew(-1, took=1.0)) == (0.0, 0.0, 0.0)
    assert skew(-60, took=15.0) == pytest.approx(-44.9)
    assert (
        interpret_response(Response(status, CIMultiDict({"Date": "yesterday"}), None), NOW).skew
        is None
    )
    assert interpret_response(Response(status, CIMultiDict(), None), NOW).skew is None


@pytest.mark.parametrize("more", [lambda text: text, str.lower])
async def test_retry_after_comes_through_from_the_wire(more: Callable[[str], str]) -> None:
    async def busy(connection: Connection) -> None:
        await connection.request()
        await connection.answer(429, {more("Retry-After"): "12"}, b"slow down")

    async with listening(busy) as receiver, sink(url=receiver.url) as webhook:
        with pytest.raises(Deferred) as caught:
            await webhook.deliver(cloudevent())
    assert (caught.value.after, caught.value.failure, caught.value.response) == (
        12.0,
        "transient",
        "slow down",
    )
