"""Scheduled events, what changed between two documents, and the CloudEvents about it. Pure.

A document becomes events of `model`, which also finds the changes, and `build` makes a `cloudevent`
of each and lists their types. `data_types` has the fields. `match` decides which events a rule, a
sink or a client is about. `timestamps` reads and writes times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["fast_dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass as fast_dataclass
else:
    from dataclasses import dataclass

    # For what is made for each event and each delivery. Python sets each field of a frozen
    # dataclass with a call, so to make one takes three times as long as to make another. A class
    # with this decorator is frozen for mypy alone.
    def fast_dataclass(*, frozen: bool, **options: Any) -> Any:
        """``frozen``: nothing may change a field, so that objects are equal and hashable by it."""
        return dataclass(unsafe_hash=frozen, **options)
