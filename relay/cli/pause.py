"""``pause``: keeps a sink's events until it is resumed."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._options import SinkName
from relay.cli._output import print_lines


@with_client
async def pause(relay: Client, sink: SinkName) -> None:
    """Send a sink nothing until it is resumed. Its events are kept."""
    await relay.post("sinks", sink, "pause")
    print_lines(f"{sink} is paused; its events are kept until `imds-relay resume {sink}`")
