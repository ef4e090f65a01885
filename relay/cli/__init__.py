"""The command line, ``imds-relay <verb>``. This module assembles it of the modules with verbs.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 refused by policy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Annotated

import typer

from relay import __version__
from relay.cli._output import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USAGE,
    error_text,
    exit_code,
    print_to_stderr,
    unwrap_exception_group,
)

VERBS: Mapping[str, Sequence[str]] = {
    "Begin": ("demo", "init", "check", "doctor", "keys", "run", "reload"),
    "Watch": ("events", "show", "explain", "tail", "fleet"),
    "Decide": ("approve", "hold", "release", "holds", "approvals", "audit"),
    "Send": ("deliveries", "redeliver", "sink"),
    "Build against it": ("simulate", "schema"),
}
"""The verbs, by the panel of the help text that lists them.

A verb is a function of that name, or a typer.Typer if it has verbs of its own.
"""
_MODULES = {
    **dict.fromkeys(("show", "explain", "tail"), "events"),
    **dict.fromkeys(("approve", "hold", "release", "holds", "approvals"), "decide"),
    **dict.fromkeys(("deliveries", "redeliver", "sink", "reload"), "operate"),
    **dict.fromkeys(("keys", "schema"), "init"),
    "simulate": "demo",
}
"""The module of each verb that has none of its own name."""


def make_app(verbs: Collection[str] | None = None) -> typer.Typer:
    """Return the command line with some verbs, or with all and what a shell needs to complete them.

    It imports the modules of these only. So `run` does not keep all other verbs in memory.
    """
    app = typer.Typer(
        name="imds-relay",
        invoke_without_command=True,
        add_completion=verbs is None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_show_version_or_help)
    for panel, names in VERBS.items():
        for name in names:
            if verbs is not None and name not in verbs:
                continue
            verb = getattr(import_module(f"{__name__}.{_MODULES.get(name, name)}"), name)
            if isinstance(verb, typer.Typer):
                app.add_typer(verb, name=name, rich_help_panel=panel)
            elif iscoroutinefunction(verb):
                from relay.cli.client import RelayCommand  # noqa: PLC0415  # `run` needs none

                app.command(name, cls=RelayCommand, rich_help_panel=panel)(verb)
            else:
                app.command(name, rich_help_panel=panel)(verb)
    return app


def _show_version_or_help(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Relays Azure's Scheduled Events to everyone concerned, and their approvals to Azure."""
    if version:
        print(f"imds-relay {__version__}")  # noqa: T201  # the answer to --version
        raise typer.Exit(EXIT_DONE)
    if context.invoked_subcommand is None:
        print(context.get_help())  # noqa: T201  # the answer to no verb
        raise typer.Exit(EXIT_USAGE)


def main() -> None:
    """Run the command line, and end the process with an exit code.

    Errors are sentences on standard error, never tracebacks.
    """
    named = {*sys.argv[1:2]} & {name for names in VERBS.values() for name in names}
    try:
        # The help text, a wrong verb and a shell that completes need all verbs.
        app = make_app(named if named and "_IMDS_RELAY_COMPLETE" not in os.environ else None)
        # A verb returns None. Typer returns the code of an Exit, and 130 after Ctrl-C.
        code = app(prog_name="imds-relay", standalone_mode=False) or EXIT_DONE
    except typer.TyperException as error:
        problem = error.format_message().rstrip(".").replace("Value error, ", "")
        end = "" if problem.endswith("?") else "."
        place = getattr(getattr(error, "ctx", None), "command_path", "imds-relay")
        print_to_stderr(f"imds-relay: {problem}{end} See {place} --help")
        code = EXIT_USAGE
    except (typer.Abort, KeyboardInterrupt):
        code = EXIT_FAILED
    except Exception as error:  # noqa: BLE001  # a person must see no traceback
        cause = unwrap_exception_group(error)
        for line in error_text(cause).splitlines():
            print_to_stderr(f"imds-relay: {line}")
        code = exit_code(cause)
    sys.exit(code if code in range(4) else EXIT_FAILED)
