"""``ping``, ``pause`` and ``resume``: what operators do with one sink."""

from __future__ import annotations

from typing import Annotated

import typer

from relay.cli._output import print_lines
from relay.cli.client import Client, with_client

SinkName = Annotated[
    str, typer.Argument(metavar="SINK", help="The sink's name in the configuration.")
]


@with_client
async def ping(relay: Client, sink: SinkName) -> None:
    """Send a sink a test message. No other sink gets it."""
    await relay.post("sinks", sink, "ping")
    print_lines(f"a relay.ping goes to {sink}; see `imds-relay deliveries`")


@with_client
async def pause(relay: Client, sink: SinkName) -> None:
    """Send a sink nothing until it is resumed. Its events are kept."""
    await relay.post("sinks", sink, "pause")
    print_lines(f"{sink} is paused; its events are kept until `imds-relay resume {sink}`")


@with_client
async def resume(relay: Client, sink: SinkName) -> None:
    """Send to a paused or disabled sink again, the kept events first."""
    await relay.post("sinks", sink, "resume")
    print_lines(f"{sink} gets the kept events, and new ones")
