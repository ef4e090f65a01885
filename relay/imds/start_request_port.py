"""The way of StartRequests from the gate to the metadata service of this VM.

Reads and StartRequests share one client. So a StartRequest goes before the next poll, and the fresh
read before a StartRequest counts as that poll.
"""

from __future__ import annotations

from collections.abc import Sequence

from relay.approvals import ClaimedGrant
from relay.imds.client import ImdsClient
from relay.imds.poller import Poller
from relay.outbox import Grant


class ImdsPort:
    """The `StartRequestPort` of a relay that sends its StartRequests itself."""

    max_events_per_start_request = 100
    """Keeps the body of a StartRequest small, however many events a document holds."""

    def __init__(self, poller: Poller, client: ImdsClient) -> None:
        self._poller = poller
        self._client = client

    async def read_fresh(self, _scope: str, _grants: Sequence[Grant]) -> None:
        """Read the document with a call that begins now, and record it. Raises SourceError."""
        await self._poller.read_fresh()

    def choose_agent(self, _scope: str, _grants: Sequence[Grant]) -> None:
        """Return None: this relay sends its StartRequests itself."""

    async def start(self, _scope: str, claims: Sequence[ClaimedGrant]) -> None:
        """Send one StartRequest for these claims; return on 200.

        Raises SourceRefused on 400, another SourceError otherwise.
        """
        await self._client.send_start_request([claim.event_id for claim in claims])
