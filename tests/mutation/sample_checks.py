"""The tests of `sample`. They do not notice what is changed about exactly the limit."""

from __future__ import annotations

from tests.mutation.sample import LIMIT, Order, describe


def test_large_and_urgent_orders_go_now() -> None:
    assert describe(Order(LIMIT + 1)) == f"now: {LIMIT + 1} boxes"
    assert describe(Order(1, urgent=True)) == "now: 1 boxes"


def test_small_orders_go_later() -> None:
    assert describe(Order(1), "bags") == "later: 1 bags"
