"""``schema``: the JSON Schemas of what the relay sends, and what goes over RabbitMQ as AsyncAPI."""

from __future__ import annotations

from typing import Annotated

import typer

from relay.api import asyncapi
from relay.cli._screen import show_json, show_table
from relay.errors import ConfigError
from relay.events.catalog import CATALOG
from relay.events.catalog import schema as schema_of


def schema(
    name: Annotated[
        str | None, typer.Argument(metavar="TYPE", show_default=False, help="Such as event.scheduled, or asyncapi; without it, all.")
    ] = None,
    *,
    listed: Annotated[bool, typer.Option("--list", help="Only name the types, and say when each is sent.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: print JSON for programs.")] = False,
) -> None:
    """Print the JSON Schema of one CloudEvent, of all by type, or what goes over RabbitMQ both ways (asyncapi)."""
    if listed and as_json:
        show_json([{"type": one.type, "when": one.when} for one in CATALOG])
        return
    if listed:
        show_table(("type", "when"), [(one.type, one.when) for one in CATALOG], empty="")
        return
    if name is None:
        show_json({one.type: schema_of(one) for one in CATALOG})
        return
    if name == "asyncapi":
        show_json(asyncapi.describe())
        return
    found = next((one for one in CATALOG if name in (one.name, one.type)), None)
    if found is None:
        raise ConfigError(f"expected asyncapi or a type of `imds-relay schema --list`, got {name!r}")
    show_json(schema_of(found))
