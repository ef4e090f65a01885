"""The arguments and options that several verbs share, as annotated types for typer.

Typer learns the options of a verb from its signature, and the help text from its docstring.
`set_default_verb` gives a group of verbs, such as ``holds``, those of a default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

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


def set_default_verb(group: typer.Typer, default: Callable[..., None]) -> None:
    """Run ``default`` where a group of verbs is called without one of them.

    The options and the help text of the group are then those of ``default``.
    """

    def run_default(context: typer.Context, **options: Any) -> None:
        if context.invoked_subcommand is None:
            default(**options)

    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    run_default.__doc__ = inspect.getdoc(default)
    run_default.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [context, *inspect.signature(default).parameters.values()]
    )
    group.callback()(run_default)
