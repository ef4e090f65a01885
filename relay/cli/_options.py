"""The arguments and options that several verbs share, as annotated types for typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
AllPages = Annotated[bool, typer.Option("--all", help="Every page, not only the first.")]
EventId = Annotated[
    str,
    typer.Argument(
        metavar="EVENT",
        help="An EventId or a unique beginning of it; upper and lower case are the same. "
        "On a hub also EVENTID@SCOPE.",
    ),
]
Scope = Annotated[
    str | None,
    typer.Option("--scope", metavar="SCOPE", help="Of a hub: only events of this scope."),
]
SinkName = Annotated[
    str, typer.Argument(metavar="SINK", help="The sink's name in the configuration.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration file. Default: $IMDS_RELAY_CONFIG, else ./relay.yaml, "
        "else /etc/imds-relay/relay.yaml, else the built-in defaults.",
    ),
]


def scope_query(scope: str | None) -> dict[str, str]:
    """Return the query of a call that is limited to a scope."""
    return {} if scope is None else {"scope": scope}
