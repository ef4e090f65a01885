"""How the rounds of a measurement are summed up, and how results are stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import report
from bench.results import (
    Measured,
    Rounds,
    Row,
    Section,
    number,
    percentile,
    ratio,
    summarize,
)


def measured(metric: str, value: float) -> Measured:
    """A result of one round."""
    row = Row(name="a quantity", unit="ms", values={"relay": [value], "bare outbox": [2.0]})
    section = Section(metric=metric, title=metric, columns=["relay", "bare outbox"], rows=[row])
    return Measured(section=section, date="2026-01-01", machine="m", versions="v", rounds=1)


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (50, 5.0), (51, 6.0), (99, 10.0), (100, 10.0)]
)
def test_a_percentile_is_a_value_that_was_measured(percent: float, expected: float) -> None:
    assert percentile([10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], percent) == expected


def test_a_summary_is_the_median_with_the_range() -> None:
    assert str(summarize([300.0, 100.0, 2000.0])) == "300 (100–2,000)"
    assert str(summarize([1.5, 1.5])) == "1.50"
    assert summarize([]) is None


def test_a_ratio_is_taken_within_each_round() -> None:
    """The quotient of the medians would be 4 / 4."""
    row = Row(name="x", unit="", values={"a": [1.0, 4.0, 30.0], "b": [4.0, 1.0, 10.0]})
    quotient = ratio(row, ("a", "b"))
    assert quotient is not None
    assert (quotient.median, quotient.low, quotient.high) == (3.0, 0.25, 4.0)


def test_a_ratio_needs_both_columns_and_no_zero() -> None:
    row = Row(name="x", unit="", values={"a": [1.0], "zero": [0.0]})
    assert ratio(row, ("a", "b")) is None
    assert ratio(row, ("a", "zero")) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (19.0, "19"),
        (12345.6, "12,346"),
        (99.94, "99.9"),
        (1.234, "1.23"),
        (0.0784, "0.078"),
    ],
)
def test_a_number_has_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_rounds_become_one_row_for_each_quantity() -> None:
    rounds = Rounds()
    for value in (1.0, 2.0):
        rounds.add("p50", "ms", "relay", value, "≤ 2 ms")
        rounds.add("p50", "ms", "bare outbox", value / 2, "≤ 2 ms")
    (row,) = rounds.rows()
    assert (row.name, row.aim) == ("p50", "≤ 2 ms")
    assert row.values == {"relay": [1.0, 2.0], "bare outbox": [0.5, 1.0]}


def test_new_results_take_the_place_of_those_of_the_same_metric_only(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    report.store({"latency": measured("latency", 1.0), "idle": measured("idle", 1.0)}, file)
    report.store({"idle": measured("idle", 7.0)}, file)
    assert report.stored(file) == {
        "latency": measured("latency", 1.0),
        "idle": measured("idle", 7.0),
    }
