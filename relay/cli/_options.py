"""The arguments and options that several verbs share, as annotated types for typer.

Typer learns the options of a verb from its signature, and the help text from its docstring.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

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
    typer.Option("--scope", metavar="SCOPE", help="Of a hub: only this scope."),
]
Reason = Annotated[
    str | None,
    typer.Option("--reason", metavar="TEXT", help="Recorded for the audit."),
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
AZURE_PROCEEDS = (
    "Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager "
    "can still approve."
)


def scope_query(scope: str | None) -> dict[str, str]:
    """Return the query of a call that is limited to a scope."""
    return {} if scope is None else {"scope": scope}


class DefaultGroup(TyperGroup):
    """A group of verbs that means its first verb where none is named."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_option = bool(args) and args[0].startswith("-") and args[0] != "--help"
        if (is_option or not args) and not ctx.resilient_parsing:
            for verb in self.commands.keys() & {*args}:
                raise typer.BadParameter(f"expected options behind the verb: {verb} {args[0]}")
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)
