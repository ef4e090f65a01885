"""What a person types: ``imds-relay <verb>``. One module for each group of verbs; this one puts them together.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 refused by policy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from relay import __version__
from relay.cli import approve as deciding
from relay.cli import audit, demo, doctor, events, keys, schema
from relay.cli import check as checking
from relay.cli import deliveries as sending
from relay.cli import explain as explaining
from relay.cli import init as beginning
from relay.cli import run as running
from relay.cli import simulate as simulating
from relay.cli._exit_codes import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USAGE,
    error_text,
    exit_code,
    unwrap_group,
)
from relay.cli._output import print_status

app = typer.Typer(
    name="imds-relay",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_VERBS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "Begin": {
        "demo": demo.demo,
        "init": beginning.init,
        "check": checking.check,
        "doctor": doctor.doctor,
        "keys": keys.keys,
        "run": running.run,
    },
    "Watch": {"events": events.events, "show": events.show_event, "tail": events.tail},
    "Decide": {
        "approve": deciding.approve,
        "hold": deciding.hold,
        "release": deciding.release,
        "approvals": deciding.approvals,
    },
    "Send": {
        "deliveries": sending.deliveries,
        "dead-letters": sending.dead_letters,
        "redeliver": sending.redeliver,
        "ping": sending.ping,
        "pause": sending.pause,
        "resume": sending.resume,
        "explain": explaining.explain,
    },
    "Build against it": {"simulate": simulating.simulate, "schema": schema.schema},
}
for _panel, _verbs in _VERBS.items():
    for _name, _verb in _verbs.items():
        app.command(_name, rich_help_panel=_panel)(_verb)
app.add_typer(audit.verbs, name="audit", rich_help_panel="Decide")


@app.callback()
def _relay(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Hears Azure's Scheduled Events, tells everyone who must know, and brings their answer back."""
    if version:
        print(f"imds-relay {__version__}")  # noqa: T201  # it was asked for
        raise typer.Exit(EXIT_DONE)
    if context.invoked_subcommand is None:
        print(context.get_help())  # noqa: T201  # nothing else to do
        raise typer.Exit(EXIT_USAGE)


def main() -> None:
    """Run the command line; ends the process with the exit code. Errors are sentences on standard error, never tracebacks."""
    try:
        # A verb returns nothing; what comes back is the code of an Exit, and 130 after Ctrl-C.
        code = app(prog_name="imds-relay", standalone_mode=False) or EXIT_DONE
    except typer.TyperException as error:
        print_status(f"imds-relay: {error.format_message().rstrip('.')}. See imds-relay --help")
        code = EXIT_USAGE
    except typer.Abort:
        code = EXIT_FAILED
    except Exception as error:  # noqa: BLE001  # the last one to hear of it: a person reads what comes of it
        code = _end(unwrap_group(error))
    sys.exit(code if code in range(4) else EXIT_FAILED)


def _end(error: Exception) -> int:
    for line in error_text(error).splitlines():
        print_status(f"imds-relay: {line}")
    return exit_code(error)
