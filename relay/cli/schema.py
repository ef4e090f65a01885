"""``schema``: the JSON Schemas of what the relay sends, what goes over RabbitMQ as AsyncAPI, and the manifest of a Slack app."""

from __future__ import annotations

from typing import Annotated

import typer

from relay.amqp import asyncapi
from relay.chat.platforms.slack.manifest import manifest
from relay.cli._output import print_json, print_table
from relay.errors import ConfigError
from relay.events.catalog import CATALOG
from relay.events.catalog import event_schema as schema_of


def schema(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE",
            show_default=False,
            help="Such as event.scheduled, or asyncapi, or slack-manifest; without it, all.",
        ),
    ] = None,
    *,
    listed: Annotated[
        bool, typer.Option("--list", help="Only name the types, and say when each is sent.")
    ] = False,
    answers: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="With slack-manifest: none (the app only tells, and links), socket (Socket Mode), or the https URL of /v1/chat/<sink>.",
        ),
    ] = "socket",
    as_json: Annotated[
        bool, typer.Option("--json", help="With --list: print JSON for programs.")
    ] = False,
) -> None:
    """Print the JSON Schema of one CloudEvent, or of all by type; what goes over RabbitMQ (asyncapi); or a Slack app's manifest."""
    if listed and as_json:
        print_json([{"type": one.type, "when": one.when} for one in CATALOG])
        return
    if listed:
        print_table(("type", "when"), [(one.type, one.when) for one in CATALOG], empty="")
        return
    if name is None:
        print_json({one.type: schema_of(one) for one in CATALOG})
        return
    if name == "asyncapi":
        print_json(asyncapi.describe())
        return
    if name == "slack-manifest":
        if answers not in ("none", "socket") and not answers.startswith("https://"):
            raise ConfigError(
                f"--answers: expected none, socket, or a URL that starts with https://, got {answers!r}"
            )
        print_json(manifest(answers))
        return
    found = next((one for one in CATALOG if name in (one.name, one.type)), None)
    if found is None:
        raise ConfigError(
            f"expected asyncapi, slack-manifest or a type of `imds-relay schema --list`, got {name!r}"
        )
    print_json(schema_of(found))
