"""Moments as text: lenient in, RFC 3339 out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.events.timestamps import format_rfc3339, format_sortable, parse_timestamp

ZONES = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
SCRAPS = st.sampled_from(
    [
        "Mon,",
        "11",
        "Apr",
        "2022",
        "22:26:58",
        "GMT",
        "-0000",
        "+9999",
        "PST",
        "99",
        "T",
        "Z",
        "W15",
        "-",
        ":",
        "24:00",
        "9" * 20,
        "(",
    ]
)


@given(
    st.datetimes(
        min_value=datetime(1900, 1, 1),  # noqa: DTZ001  # Hypothesis wants naive bounds
        max_value=datetime(2200, 1, 1),  # noqa: DTZ001  # the same
        timezones=ZONES,
    )
)
def test_a_moment_that_was_written_is_read_again(moment: datetime) -> None:
    text = format_rfc3339(moment)
    assert text.endswith("Z")
    assert parse_timestamp(text) == moment


@given(
    st.text()
    | st.text("0123456789:+-TZWGMTonApr., ")
    | st.lists(SCRAPS, max_size=8).map(" ".join)
    | st.lists(SCRAPS, max_size=8).map("".join)
)
def test_whatever_text_comes_is_a_moment_in_utc_or_none(text: str) -> None:
    moment = parse_timestamp(text)
    if moment is not None:
        assert moment.utcoffset() == timedelta(0)
        assert parse_timestamp(format_rfc3339(moment)) == moment


HALF_SECONDS = st.integers(-9, 9).map(
    lambda halves: datetime(2022, 4, 11, tzinfo=UTC) + halves * timedelta(seconds=0.5)
)


@given(st.lists(HALF_SECONDS.flatmap(lambda moment: ZONES.map(moment.astimezone))))
def test_sortable_texts_sort_as_the_moments_do(moments: list[datetime]) -> None:
    assert [*map(format_sortable, sorted(moments))] == sorted(map(format_sortable, moments))
    assert all(parse_timestamp(format_sortable(moment)) == moment for moment in moments)


@pytest.mark.parametrize("zone", ["GMT", "UTC", "+0000", "-0000", ""])
def test_rfc_1123_is_read_with_any_weekday_and_without_zone_as_utc(zone: str) -> None:
    moment = datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC)
    for weekday in ("Mon", "Tue", "Sun"):
        assert parse_timestamp(f"{weekday}, 11 Apr 2022 22:26:58 {zone}".strip()) == moment
