"""The pause that a server asks for."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime

import pytest

from relay.net.http import parse_retry_after

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        pytest.param(None, None, id="no header"),
        pytest.param("", None, id="empty"),
        pytest.param("soon", None, id="a word"),
        pytest.param("-5", None, id="negative"),
        pytest.param("inf", None, id="infinite"),
        pytest.param("\u0665", None, id="a digit that is not ASCII"),
        pytest.param("0", 0.0, id="zero"),
        pytest.param(" 5 ", 5.0, id="spaces around"),
        pytest.param("1.5", 1.5, id="a fraction"),
        pytest.param("3600", 60.0, id="more than the maximum"),
        pytest.param("9" * 5000, 60.0, id="thousands of digits"),
        pytest.param(format_datetime(NOW.replace(second=35), usegmt=True), 30.0, id="a date"),
        pytest.param(format_datetime(NOW.replace(hour=5), usegmt=True), 60.0, id="a far date"),
        pytest.param(format_datetime(NOW.replace(hour=1), usegmt=True), 0.0, id="a past date"),
    ],
)
def test_seconds_or_a_date_become_seconds_up_to_the_maximum(
    header: str | None, seconds: float | None
) -> None:
    assert parse_retry_after(header, NOW, maximum=60.0) == seconds
