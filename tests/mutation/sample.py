"""A module with mutants of every kind, for the tests of the runner."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 10


@dataclass(frozen=True, slots=True)
class Order:
    """An order of goods."""

    amount: int
    urgent: bool = False

    @property
    def is_large(self) -> bool:
        """Whether the order reaches the limit."""
        return self.amount >= LIMIT


def describe(order: Order, unit: str = "boxes") -> str:
    """Return a text about the order."""
    if order.is_large or order.urgent:
        return f"now: {order.amount} {unit}"
    return f"later: {order.amount} {unit}"
