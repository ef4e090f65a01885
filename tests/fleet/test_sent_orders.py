"""What the hub remembers of its orders, and which results it takes."""

from __future__ import annotations

from typing import Any

import pytest

from relay.fleet.hub import sent_orders
from relay.fleet.hub.sent_orders import MAX_UNKNOWN_RESULTS, SentOrder, SentOrders
from relay.fleet.messages import StartOutcome, StartResult
from relay.fleet.routing import AuthorizedSender

AGENT = AuthorizedSender("a", "vm-1", "user-a")


def make_order(grant: int = 1, attempt: int = 1, **changes: Any) -> SentOrder:
    """An order to vm-1 of scope a that can be carried out until 8."""
    fields: dict[str, Any] = {
        "scope": "a",
        "agent": "vm-1",
        "event_key": f"e-{grant}@a",
        "grant": grant,
        "attempt": attempt,
        "executable_until": 8.0,
    }
    return SentOrder(**fields | changes)


def make_result(
    grant: int = 1, attempt: int = 1, outcome: StartOutcome = "accepted"
) -> StartResult:
    """A result of an order."""
    return StartResult(grant=grant, attempt=attempt, result=outcome, status=None, reason=None)


def test_an_order_can_be_carried_out_until_its_time_or_its_result() -> None:
    orders, order = SentOrders(), make_order()
    orders.add(order, 0.0)
    assert orders.executable_until_of_event("e-1@a", 7.9) == 8.0
    assert orders.executable_until_of_event("e-1@a", 8.0) is None
    orders.take_result(AGENT, make_result(outcome="stale"))
    assert orders.executable_until_of_event("e-1@a", 1.0) is None


def test_an_order_that_was_returned_cannot_be_carried_out_or_answered() -> None:
    orders, order = SentOrders(), make_order()
    orders.add(order, 0.0)
    outcomes = [order.outcome]
    order.end_returned()
    assert [*outcomes, order.outcome] == ["unanswered", "returned"]
    assert orders.executable_until_of_event("e-1@a", 1.0) is None
    orders.take_result(AGENT, make_result())
    assert orders.find_order_accepted_by_imds("e-1@a", 1) is None
    assert orders.ignored == {"repeated": 1}


@pytest.mark.parametrize(
    "sender",
    [AuthorizedSender("a", "vm-2", "user-a"), AuthorizedSender("b", "vm-1", "user-b")],
    ids=["another relay", "another scope"],
)
def test_a_result_of_another_agent_does_not_count(sender: AuthorizedSender) -> None:
    orders = SentOrders()
    orders.add(make_order(), 0.0)
    orders.take_result(sender, make_result())
    assert orders.find_order_accepted_by_imds("e-1@a", 1) is None
    orders.take_result(AGENT, make_result())
    assert orders.find_order_accepted_by_imds("e-1@a", 1) is not None


def test_the_first_result_counts() -> None:
    orders = SentOrders()
    orders.add(make_order(), 0.0)
    orders.take_result(AGENT, make_result(outcome="failed"))
    orders.take_result(AGENT, make_result())
    assert orders.find_order_accepted_by_imds("e-1@a", 1) is None


def test_an_acceptance_counts_for_its_grant_alone() -> None:
    orders = SentOrders()
    orders.add(make_order(1, event_key="e@a"), 0.0)
    orders.add(make_order(2, event_key="e@a"), 10.0)
    orders.take_result(AGENT, make_result(1))
    assert orders.find_order_accepted_by_imds("e@a", 1) is not None
    assert orders.find_order_accepted_by_imds("e@a", 2) is None


def test_the_oldest_orders_are_forgotten_but_none_that_can_be_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sent_orders, "MAX_ORDERS", 2)
    orders = SentOrders()
    for grant in range(1, 5):
        orders.add(make_order(grant), 0.0)
    assert len(orders) == 4, "all can be carried out"
    orders.add(make_order(5, executable_until=18.0), 10.0)
    assert len(orders) == 2
    assert orders.find_by_grant_and_attempt(3, 1) is None
    assert orders.orders_of_event("e-3@a") == []
    assert orders.find_by_grant_and_attempt(5, 1) is not None


def test_a_restored_order_takes_the_result_that_came_before_it() -> None:
    orders = SentOrders()
    orders.take_result(AGENT, make_result())
    orders.take_result(AGENT, make_result(outcome="stale"))
    order = make_order()
    orders.restore_order(order)
    assert order.is_accepted_by_imds


def test_a_restored_order_takes_no_result_of_another_agent() -> None:
    orders = SentOrders()
    orders.take_result(AuthorizedSender("a", "vm-2", "user-a"), make_result())
    order = make_order()
    orders.restore_order(order)
    assert order.result is None


def test_unknown_results_of_one_user_push_out_none_of_another() -> None:
    orders = SentOrders()
    orders.take_result(AGENT, make_result())
    for grant in range(2, 10 * MAX_UNKNOWN_RESULTS):
        orders.take_result(AuthorizedSender("b", "vm-1", "user-b"), make_result(grant))
    kept = sum(map(len, orders._unknown.values()))  # noqa: SLF001  # nothing else shows it
    assert kept == 1 + MAX_UNKNOWN_RESULTS
    order = make_order()
    orders.restore_order(order)
    assert order.is_accepted_by_imds
