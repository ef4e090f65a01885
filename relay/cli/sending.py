"""``deliveries``, ``dead-letters``, ``redeliver``, ``ping``, ``pause`` and ``resume``: how it goes out."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from relay.cli._http import Client, talking
from relay.cli._screen import counted, local, show, show_json, show_table, tell
from relay.cli.events import AsJson, Every

SinkName = Annotated[str, typer.Argument(metavar="SINK", help="The sink's name in the configuration.")]


@talking
async def deliveries(relay: Client, *, every: Every = False, as_json: AsJson = False) -> None:
    """List what was sent, and what waits."""
    _list(await relay.pages("deliveries", every=every), "nothing was sent", as_json=as_json)


@talking
async def dead_letters(relay: Client, *, every: Every = False, as_json: AsJson = False) -> None:
    """List what was given up, and why. `imds-relay redeliver` sends one again."""
    _list(await relay.pages("dead-letters", every=every), "no dead letters", as_json=as_json)


@talking
async def redeliver(
    relay: Client, dead_letter: Annotated[str, typer.Argument(metavar="ID", help="Its id in `imds-relay dead-letters`.")]
) -> None:
    """Send a dead letter again, at once."""
    await relay.post("dead-letters", dead_letter, "redeliver")
    show(f"{dead_letter} goes out again; see `imds-relay deliveries`")


@talking
async def ping(relay: Client, sink: SinkName) -> None:
    """Send a sink a test message. Only that sink gets it."""
    await relay.post("sinks", sink, "ping")
    show(f"a relay.ping goes to {sink}; see `imds-relay deliveries`")


@talking
async def pause(relay: Client, sink: SinkName) -> None:
    """Send a sink nothing until it is resumed. What it wants is kept."""
    await relay.post("sinks", sink, "pause")
    show(f"{sink} is paused; what it wants is kept until `imds-relay resume {sink}`")


@talking
async def resume(relay: Client, sink: SinkName) -> None:
    """Send to a paused or disabled sink again, what was kept first."""
    await relay.post("sinks", sink, "resume")
    show(f"{sink} gets what was kept for it, and what comes")


def _list(found: dict[str, Any], empty: str, *, as_json: bool) -> None:
    if as_json:
        show_json(found)
        return
    rows = [
        (
            one["id"],
            one["sink"],
            one["type"],
            one["eventId"],
            f"{one['state']}, {counted(one['attempts'], 'try')}",
            local(one["settled"] or one["nextAttempt"] or one["recorded"], relative=False),
            one["reason"],
        )
        for one in found["items"]
    ]
    show_table(("id", "sink", "what", "event", "state", "when", "reason"), rows, empty=empty)
    if found["next"] is not None:
        tell("there are more: --all")
