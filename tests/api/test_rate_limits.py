"""Token buckets: what they let through, whatever the times, and how much they remember."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.api.connections import Peer
from relay.clock import TokenBuckets

PAUSES = st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=80)


@given(PAUSES, st.integers(1, 20), st.floats(0.1, 50))
def test_no_period_has_more_calls_than_burst_and_rate_allow(
    pauses: list[float], burst: int, rate: float
) -> None:
    buckets, now, passed = TokenBuckets(rate, burst), 0.0, []
    for pause in pauses:
        now += pause
        if not buckets.take("one", now):
            passed.append(now)
    for first, since in enumerate(passed):
        for count, until in enumerate(passed[first:], start=1):
            assert count <= burst + rate * (until - since) + 1e-6


@given(PAUSES, st.integers(1, 20), st.floats(0.1, 50))
def test_waiting_for_the_returned_time_is_enough(
    pauses: list[float], burst: int, rate: float
) -> None:
    buckets, now = TokenBuckets(rate, burst), 0.0
    for pause in pauses:
        now += pause
        if wait := buckets.take("one", now):
            now += wait + 1e-6
            assert not buckets.take("one", now)


@given(st.lists(st.booleans(), max_size=60))
def test_a_refunded_token_does_not_count(given_back: list[bool]) -> None:
    buckets = TokenBuckets(rate=1, burst=20)
    for back in given_back:
        taken = not buckets.take("one", 0.0)
        if back and taken:
            buckets.refund("one", 0.0)
    kept = min(20, given_back.count(False))
    if kept < 20:
        for _ in range(20 - kept):
            assert not buckets.take("one", 0.0)
    assert buckets.take("one", 0.0)


def test_a_clock_that_is_set_back_takes_no_tokens() -> None:
    buckets = TokenBuckets(rate=1, burst=3)
    assert [buckets.take("one", now) for now in (3600.0, 0.0, 0.0)] == [0, 0, 0]
    assert buckets.take("one", 0.0) == 1
    assert not buckets.take("one", 1.0)


def test_each_key_has_a_bucket_and_the_oldest_is_forgotten() -> None:
    buckets = TokenBuckets(rate=1, burst=1, max_keys=3)
    for key in "abc":
        assert not buckets.take(key, 0.0)
        assert buckets.take(key, 0.0)
    assert not buckets.take("d", 0.0)
    assert buckets.take("c", 0.0)
    assert not buckets.take("a", 0.0)  # forgotten: full again


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "loopback"),
        ("127.0.0.1", "loopback"),
        ("127.255.0.7", "loopback"),
        ("::ffff:127.0.0.2", "loopback"),
    ],
)
def test_one_host_has_one_rate_limit(address: str, network: str) -> None:
    assert Peer(address).network == network
