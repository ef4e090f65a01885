"""What the hub knows of the start orders that it sent, and of their results.

An order tells one agent to send the StartRequest for an event. It belongs to a grant, which is the
permission that an event has after enough votes. Before each attempt to use a grant the hub writes a
claim into the journal. The claims say which orders were sent before the hub started. An order from
then is restored when its event is considered again (`SentOrders.restore_order`). So a result that
waited in the queue of the hub counts, and no new order goes while the old one can still be carried
out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from typing_extensions import override  # in typing from Python 3.12

from relay.fleet.messages import StartOutcome, StartResult
from relay.fleet.routing import AuthorizedSender

MAX_ORDERS = 10_000
"""Orders that are remembered. Of more, the oldest that nobody can carry out any more go."""
MAX_UNKNOWN_RESULTS = 100
"""Results of unknown orders that are kept for each RabbitMQ user, for orders to be restored."""
_MAX_LOGGED = 1000

_log = logging.getLogger(__name__)

OrderResult: TypeAlias = Literal[StartOutcome, "returned", "unanswered"]
"""The outcome of an order. An order that was withdrawn has none.

- ``accepted``, ``refused``, ``failed``: what came of the StartRequest that the agent sent.
- ``changed``, ``stale``: the agent sent none, as the event has changed or the order came too late.
- ``returned``: the order reached nobody.
- ``unanswered``: no answer came in time.
"""
IgnoreReason: TypeAlias = Literal["unknown", "other-agent", "repeated"]
"""Why a result is ignored.

- ``unknown``: the hub has sent no such order. The result counts if the order is restored.
- ``other-agent``: the order went to another agent.
- ``repeated``: the order has a result already, or reached nobody.
"""
_IGNORE_TEXTS: Mapping[IgnoreReason, str] = {
    "unknown": "but the hub knows no such order",
    "other-agent": "but that order went to another relay",
    "repeated": "but that order has ended already",
}


@dataclass(slots=True, eq=False, kw_only=True)
class SentOrder:
    """An order to send one StartRequest. ``agent`` is its relay word."""

    scope: str
    agent: str
    event_key: str
    grant: int
    attempt: int
    executable_until: float
    """By the monotonic clock: nobody can carry out the order any more then."""
    is_awaited: bool = False
    """Whether `StartRequestPort.send_start_request` waits for the result."""
    was_returned: bool = False
    """Whether RabbitMQ returned it, so that it reached nobody."""
    was_withdrawn: bool = False
    """Whether it was not sent, because IMDS had accepted an earlier order of the grant."""
    result: StartResult | None = None
    confirmed_at: float | None = None
    """By the monotonic clock: when an agent last said, asked after this order, what the event is.

    `relay.fleet.hub.start_orders` asks and sets it. Without it no further order is sent, because
    this one may have changed the event.
    """
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is known how the order ended."""

    @property
    def outcome(self) -> OrderResult:
        """How the order ended, once nobody can carry it out any more."""
        if self.was_returned:
            return "returned"
        return self.result.result if self.result is not None else "unanswered"

    @property
    def is_accepted_by_imds(self) -> bool:
        """Whether IMDS accepted the StartRequest."""
        return self.result is not None and self.result.result == "accepted"

    @property
    def is_confirmed_unexecuted(self) -> bool:
        """Whether the agent says that it sent nothing."""
        return self.result is not None and self.result.result in ("changed", "stale")

    def can_be_executed(self, monotonic: float) -> bool:
        """Whether the agent can still send a StartRequest for it."""
        return not self.ended.is_set() and monotonic < self.executable_until

    def end_returned(self) -> None:
        """Note that the order reached nobody."""
        if not self.ended.is_set():
            self.was_returned = True
            self.ended.set()

    def end_unsent_as_no_longer_needed(self) -> None:
        """Note that the order was not sent, because it was not needed any more."""
        if not self.ended.is_set():
            self.was_withdrawn = True
            self.ended.set()

    def end_with_result(self, result: StartResult) -> None:
        """Note the result."""
        self.result = result
        self.ended.set()

    @override
    def __str__(self) -> str:
        """Name the order in the log."""
        return f"grant {self.grant}, attempt {self.attempt}, relay {self.agent} of {self.scope}"


class SentOrders:
    """The orders that were sent. It takes their results as they arrive."""

    def __init__(self) -> None:
        self._orders: dict[tuple[int, int], SentOrder] = {}  # the oldest first
        self._by_event: dict[str, list[SentOrder]] = {}
        self._unknown: dict[str, dict[tuple[str, str, int, int], StartResult]] = {}
        """Results of unknown orders, by RabbitMQ user. The oldest come first."""
        self.ignored: Counter[IgnoreReason] = Counter()
        """How many results were ignored."""
        self._logged: set[tuple[IgnoreReason, str, str]] = set()

    def __len__(self) -> int:
        return len(self._orders)

    def find_by_grant_and_attempt(self, grant: int, attempt: int) -> SentOrder | None:
        """Return an order."""
        return self._orders.get((grant, attempt))

    def orders_of_event(self, event_key: str) -> list[SentOrder]:
        """Return the orders about an event, the oldest first."""
        return list(self._by_event.get(event_key, ()))

    def orders_of_grant(self, event_key: str, grant: int) -> Iterator[SentOrder]:
        """Yield the orders for a grant."""
        return (order for order in self.orders_of_event(event_key) if order.grant == grant)

    def find_order_accepted_by_imds(self, event_key: str, grant: int) -> SentOrder | None:
        """Return the order for a grant whose StartRequest IMDS accepted."""
        return next(
            (
                order
                for order in self.orders_of_grant(event_key, grant)
                if order.is_accepted_by_imds
            ),
            None,
        )

    def executable_until_of_event(self, event_key: str, monotonic: float) -> float | None:
        """Return until when an order about an event can be carried out; None: none can."""
        return max(
            (
                order.executable_until
                for order in self.orders_of_event(event_key)
                if order.can_be_executed(monotonic)
            ),
            default=None,
        )

    def add(self, order: SentOrder, monotonic: float) -> None:
        """Remember an order before it is sent."""
        self._index_order(order)
        self._forget_oldest_orders(monotonic)

    def restore_order(self, order: SentOrder) -> None:
        """Remember an order from before the hub started, and take its result if it has come."""
        self._index_order(order)
        for results in self._unknown.values():
            key = (order.scope, order.agent, order.grant, order.attempt)
            result = results.pop(key, None)
            if result is not None:
                self._end_with_late_result(order, result)

    def take_result(self, sender: AuthorizedSender, result: StartResult) -> None:
        """Take the result of an order. Only that of the agent that got the order counts."""
        order = self.find_by_grant_and_attempt(result.grant, result.attempt)
        if order is None:
            self._keep_result_of_unknown_order(sender, result)
            self._count_ignored_result("unknown", sender, result)
        elif (order.scope, order.agent) != (sender.scope, sender.relay):
            self._count_ignored_result("other-agent", sender, result)
        elif order.ended.is_set():
            self._count_ignored_result("repeated", sender, result)
        elif order.is_awaited:
            order.end_with_result(result)
        else:
            self._end_with_late_result(order, result)

    def _end_with_late_result(self, order: SentOrder, result: StartResult) -> None:
        order.end_with_result(result)
        if order.is_accepted_by_imds:
            _log.warning(
                "fleet: IMDS accepted a StartRequest, but the answer came late (%s). "
                "No other is sent for the grant",
                order,
            )
        else:
            _log.info("fleet: the answer to an order came late: %s (%s)", result.result, order)

    def _keep_result_of_unknown_order(self, sender: AuthorizedSender, result: StartResult) -> None:
        results = self._unknown.setdefault(sender.user, {})
        # The first result counts, as it does for an order that is known.
        results.setdefault((sender.scope, sender.relay, result.grant, result.attempt), result)
        if len(results) > MAX_UNKNOWN_RESULTS:
            del results[next(iter(results))]

    def _count_ignored_result(
        self, reason: IgnoreReason, sender: AuthorizedSender, result: StartResult
    ) -> None:
        self.ignored[reason] += 1
        key = reason, sender.scope, sender.relay
        if key in self._logged or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.add(key)
        _log.warning(
            "fleet: relay %s of %s says %s for grant %d, attempt %d, %s. "
            "Further results like this of the relay are only counted",
            sender.relay,
            sender.scope,
            result.result,
            result.grant,
            result.attempt,
            _IGNORE_TEXTS[reason],
        )

    def _index_order(self, order: SentOrder) -> None:
        self._orders[order.grant, order.attempt] = order
        self._by_event.setdefault(order.event_key, []).append(order)

    def _forget_oldest_orders(self, monotonic: float) -> None:
        while len(self._orders) > MAX_ORDERS:
            key, oldest = next(iter(self._orders.items()))
            if oldest.can_be_executed(monotonic) or oldest.is_awaited:
                return
            del self._orders[key]
            about_event = self._by_event[oldest.event_key]
            about_event.remove(oldest)
            if not about_event:
                del self._by_event[oldest.event_key]
