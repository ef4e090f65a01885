"""How a measurement runs: how many rounds, how large, against which broker, and who watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.rabbitmq import Broker


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``advance`` is called with the name of what is measured, at the begin of each round.

    ``broker`` is a node of our own, for those that make users or look into it.
    """

    repeats: int
    amqp_url: str
    broker: Broker | None = None
    scale: float = 1.0
    """Events, as a part of the usual number: a test needs few."""
    advance: Callable[[str], None] = lambda _: None

    def rounds(self, name: str) -> Iterator[int]:
        """Yield the number of each round, from 1 on."""
        for number in range(1, self.repeats + 1):
            self.advance(f"{name}, round {number} of {self.repeats}")
            yield number

    def scaled(self, count: int) -> int:
        """Return how many events to use where a full run uses so many."""
        return max(1, round(count * self.scale))

    def scaled_all(self, counts: Iterable[int]) -> list[int]:
        """Return each number for `scaled` once."""
        return list(dict.fromkeys(self.scaled(count) for count in counts))
