"""What a relay can be: a module for each role puts the parts of that role together.

- `plain`: a relay without a fleet.
- `agent`: it reports to the hub of a fleet and carries out its orders.
- `hub`: it merges what agents report, tells, decides, and orders StartRequests.

`parts` holds what roles have in common, `live_parts` what a reload changes, and `reload` runs
reloads. Nothing here decides about events or approvals.
"""

from __future__ import annotations

from dataclasses import dataclass

from relay.api.state import Relay
from relay.roles.live_parts import LiveParts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRelay:
    """A started relay, for the demo and for tests."""

    relay: Relay
    api_port: int
    """The port on which the API listens."""
    live: LiveParts
    """What takes another configuration over."""
