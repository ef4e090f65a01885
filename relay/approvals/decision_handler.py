"""What the channels of decisions call: the API, the chats and the consumer of AMQP.

`relay.approvals.gate.Gate` is the `DecisionHandler` of a relay that decides itself. That of an
agent is `relay.fleet.agent.votes.VoteForwarder`, which asks the hub.
"""

from __future__ import annotations

from typing import Protocol

from relay.approvals.engine import ApprovalEngine
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.approvals.standing_hold_admission import CreateRequest, EndRequest
from relay.store import Mode, StandingHold
from relay.store.rows import PageLimit


class NotDecidedHere(Exception):
    """Another relay decides this. The text names it."""


class DecisionHandler(Protocol):
    """Takes decisions of callers, and says how approvals stand."""

    engine: ApprovalEngine
    """Knows the status of each event."""

    async def submit(self, request: DecisionRequest, /) -> DecisionAnswer:
        """Return the answer to a request; 503 if it cannot be decided now."""

    async def create_standing_hold(self, request: CreateRequest, /) -> DecisionAnswer:
        """Return the answer: 201, or why not. Raises NotDecidedHere."""

    async def end_standing_hold(self, request: EndRequest, /) -> DecisionAnswer:
        """Return the answer: 200, or why not. Raises NotDecidedHere."""

    async def standing_holds_page(
        self, before: int | None, limit: PageLimit, *, only_open: bool
    ) -> tuple[list[StandingHold], bool]:
        """Return the newest standing holds with a number less than ``before``, newest first.

        The second value says whether there are more. Raises StoreUnavailable, NotDecidedHere.
        """

    async def find_standing_hold(self, hold_id: str, /) -> StandingHold | None:
        """Return a standing hold, also one that is over.

        Raises StoreUnavailable, NotDecidedHere.
        """

    async def approval_mode(self) -> Mode:
        """Return the mode in force."""

    async def set_approval_mode(self, mode: Mode, principal: str, /) -> Mode:
        """Set and remember the switch; return the mode then in force.

        Raises StoreUnavailable, and NotDecidedHere if another relay has the switch.
        """
