"""Pauses between tries."""

from __future__ import annotations

import pytest

from relay.net import exponential_backoff, with_jitter


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0.5), (1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (100_000, 3.0)]
)
def test_the_pause_doubles_with_each_failure_to_a_maximum(failures: int, seconds: float) -> None:
    assert exponential_backoff(failures, first=0.5, maximum=3.0) == seconds


def test_jitter_adds_at_most_a_quarter() -> None:
    assert with_jitter(8.0, 0.0) == 8.0
    assert with_jitter(8.0, 0.5) == 9.0
    assert 9.9 < with_jitter(8.0, 0.999) < 10.0
