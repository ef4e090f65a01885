"""``reload``, ``ping``, ``pause`` and ``resume``: what operators do with a running relay."""

from __future__ import annotations

from typing import Annotated

import typer

from relay.cli._exit_codes import CommandFailed, Unprocessable
from relay.cli._options import AsJson
from relay.cli._output import print_json, print_lines
from relay.cli.client import RelayCall
from relay.errors import ConfigError


async def reload(call: RelayCall, *, as_json: AsJson = False) -> None:
    """Let the relay read its configuration again and take it over, as SIGHUP does.

    All of it or nothing: if it is wrong, or a change in it needs a restart, the earlier
    configuration stays in force. Connections that are not concerned stay. Exit code 2: the
    configuration is wrong. Exit code 1: it needs a restart, or the relay does not answer.
    """
    try:
        answer = await call.relay.post("reload")
    except Unprocessable as error:
        if "restartRequired" in error.problem:
            raise CommandFailed(str(error)) from error
        raise ConfigError(str(error)) from error
    if as_json:
        print_json(answer)
        return
    for change in answer["changes"]:
        print_lines(f"{change['key']} {change['change']}")
    if not answer["changes"]:
        print_lines("nothing has changed")


SinkName = Annotated[
    str, typer.Argument(metavar="SINK", help="The sink's name in the configuration.")
]


async def ping(call: RelayCall, sink: SinkName) -> None:
    """Send a sink a test message. No other sink gets it."""
    await call.relay.post("sinks", sink, "ping")
    print_lines(f"a relay.ping goes to {sink}; see `imds-relay deliveries`")


async def pause(call: RelayCall, sink: SinkName) -> None:
    """Send a sink nothing until it is resumed. Its events are kept."""
    await call.relay.post("sinks", sink, "pause")
    print_lines(f"{sink} is paused; its events are kept until `imds-relay resume {sink}`")


async def resume(call: RelayCall, sink: SinkName) -> None:
    """Send to a paused or disabled sink again, the kept events first."""
    await call.relay.post("sinks", sink, "resume")
    print_lines(f"{sink} gets the kept events, and new ones")
