"""``ping``, ``pause`` and ``resume``: act on one sink of a running relay."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._options import SinkName
from relay.cli._output import print_output


@with_client
async def ping(relay: Client, sink: SinkName) -> None:
    """Send a sink a test message. No other sink gets it."""
    await relay.post("sinks", sink, "ping")
    print_output(f"a relay.ping goes to {sink}; see `imds-relay deliveries`")


@with_client
async def pause(relay: Client, sink: SinkName) -> None:
    """Send a sink nothing until it is resumed. Its events are kept."""
    await relay.post("sinks", sink, "pause")
    print_output(f"{sink} is paused; its events are kept until `imds-relay resume {sink}`")


@with_client
async def resume(relay: Client, sink: SinkName) -> None:
    """Send to a paused or disabled sink again, the kept events first."""
    await relay.post("sinks", sink, "resume")
    print_output(f"{sink} gets the kept events, and new ones")
