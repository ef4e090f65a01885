"""``fleet``: what concerns a hub and its agents. Each verb below it has a module of its own."""

from __future__ import annotations

import typer

from relay.cli._exit_codes import EXIT_USAGE
from relay.cli._fleet_definitions import definitions

fleet = typer.Typer(invoke_without_command=True, help="Look after a hub and its agents.")
fleet.command("definitions")(definitions)


@fleet.callback()
def show_help(context: typer.Context) -> None:
    """Print the verbs if none is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())  # noqa: T201  # the answer to no verb
        raise typer.Exit(EXIT_USAGE)
