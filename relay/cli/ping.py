"""``ping``: sends a test message to one sink."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._options import SinkName
from relay.cli._output import print_lines


@with_client
async def ping(relay: Client, sink: SinkName) -> None:
    """Send a sink a test message. No other sink gets it."""
    await relay.post("sinks", sink, "ping")
    print_lines(f"a relay.ping goes to {sink}; see `imds-relay deliveries`")
