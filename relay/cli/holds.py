"""``holds``: standing holds. Each verb below it has a module of its own."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from relay.cli._holds_add import add
from relay.cli._holds_end import end
from relay.cli._holds_list import list_holds

holds = typer.Typer(invoke_without_command=True)
holds.command("add")(add)
holds.command("end")(end)


def _list_holds_by_default(context: typer.Context, **options: Any) -> None:
    if context.invoked_subcommand is None:
        list_holds(**options)


# Without a verb, the options are those of the list.
_list_holds_by_default.__doc__ = inspect.getdoc(list_holds)
_list_holds_by_default.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        ),
        *inspect.signature(list_holds).parameters.values(),
    ]
)
holds.callback()(_list_holds_by_default)
