"""``fleet``: what concerns a hub and its agents. Each verb below it has a module of its own."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from relay.cli._fleet_definitions import definitions
from relay.cli._fleet_roster import roster
from relay.cli._fleet_simulate import simulate

fleet = typer.Typer(invoke_without_command=True)
fleet.command("definitions")(definitions)
fleet.command("simulate")(simulate)


def _show_roster_by_default(context: typer.Context, **options: Any) -> None:
    if context.invoked_subcommand is None:
        roster(**options)


# Without a verb, the options are those of the roster.
_show_roster_by_default.__doc__ = inspect.getdoc(roster)
_show_roster_by_default.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        ),
        *inspect.signature(roster).parameters.values(),
    ]
)
fleet.callback()(_show_roster_by_default)
