"""``resume``: sends to a paused or disabled sink again."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._options import SinkName
from relay.cli._output import print_lines


@with_client
async def resume(relay: Client, sink: SinkName) -> None:
    """Send to a paused or disabled sink again, the kept events first."""
    await relay.post("sinks", sink, "resume")
    print_lines(f"{sink} gets the kept events, and new ones")
