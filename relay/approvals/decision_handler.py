"""What the API does with decisions: the gate's side of it, or on an agent that of the hub."""

from __future__ import annotations

from typing import Protocol

from relay.approvals.engine import ApprovalEngine
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.outbox import Mode


class DecidedElsewhere(Exception):
    """Another relay decides this. The text names it."""


class DecisionHandler(Protocol):
    """Takes decisions of callers, and says how approvals stand."""

    engine: ApprovalEngine
    """Knows the status of each event."""

    async def submit(self, request: DecisionRequest, /) -> DecisionAnswer:
        """Return the answer to a request; 503 if it cannot be decided now."""

    async def mode(self) -> Mode:
        """Return the mode in force."""

    async def set_mode(self, mode: Mode, principal: str, /) -> Mode:
        """Set and remember the switch; return the mode then in force.

        Raises StoreUnavailable, and DecidedElsewhere if another relay has the switch.
        """
