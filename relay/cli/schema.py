"""``schema``: prints JSON Schemas of events, or a Slack app manifest."""

from __future__ import annotations

from typing import Annotated

import typer

from relay.chat.platforms.slack.manifest import manifest
from relay.cli._output import print_json
from relay.cli._tables import print_table
from relay.errors import ConfigError
from relay.events.catalog import CATALOG, EventDefinition, cloudevent_schema
from relay.suggestions import closest


def schema(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE",
            help="Such as event.scheduled, or slack-manifest. Default: all types.",
        ),
    ] = None,
    *,
    list_types: Annotated[
        bool, typer.Option("--list", help="List the types, and when each is sent.")
    ] = False,
    answers: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="With slack-manifest: none (the app only posts messages with links), "
            "or socket (Socket Mode).",
        ),
    ] = "socket",
    as_json: Annotated[
        bool, typer.Option("--json", help="With --list: print JSON for programs.")
    ] = False,
) -> None:
    """Print the JSON Schema of one CloudEvent, or of all by type.

    Also prints a Slack app's manifest.
    """
    if list_types and as_json:
        print_json([{"type": definition.type, "when": definition.when} for definition in CATALOG])
    elif list_types:
        rows = [(definition.type, definition.when) for definition in CATALOG]
        print_table(("type", "when"), rows, empty="")
    elif name is None:
        print_json({definition.type: cloudevent_schema(definition) for definition in CATALOG})
    elif name == "slack-manifest":
        if answers not in ("none", "socket"):
            raise ConfigError(f"--answers: expected none or socket, got {answers!r}")
        print_json(manifest(answers))
    else:
        print_json(cloudevent_schema(_find_event_definition(name)))


def _find_event_definition(name: str) -> EventDefinition:
    for definition in CATALOG:
        if name in (definition.name, definition.type):
            return definition
    close = closest(name, ["slack-manifest", *(each.name for each in CATALOG)])
    raise ConfigError(
        f"expected slack-manifest or a type of `imds-relay schema --list`, got {name!r}"
        f"{f'; did you mean {close}?' if close else ''}"
    )
