"""The command line, ``imds-relay <verb>``: one module for each verb. This one assembles them.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 refused by policy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from relay import __version__
from relay.cli import (
    approvals,
    approve,
    audit,
    check,
    dead_letters,
    deliveries,
    demo,
    doctor,
    events,
    explain,
    hold,
    init,
    keys,
    pause,
    ping,
    redeliver,
    release,
    resume,
    run,
    schema,
    show,
    simulate,
    tail,
)
from relay.cli._exit_codes import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USAGE,
    error_text,
    exit_code,
    unwrap_exception_group,
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
        "init": init.init,
        "check": check.check,
        "doctor": doctor.doctor,
        "keys": keys.keys,
        "run": run.run,
    },
    "Watch": {"events": events.events, "show": show.show, "tail": tail.tail},
    "Decide": {
        "approve": approve.approve,
        "hold": hold.hold,
        "release": release.release,
        "approvals": approvals.approvals,
    },
    "Send": {
        "deliveries": deliveries.deliveries,
        "dead-letters": dead_letters.dead_letters,
        "redeliver": redeliver.redeliver,
        "ping": ping.ping,
        "pause": pause.pause,
        "resume": resume.resume,
        "explain": explain.explain,
    },
    "Build against it": {"simulate": simulate.simulate, "schema": schema.schema},
}
"""The verbs by the panel of the help text that lists them."""

for _panel, _verbs in _VERBS.items():
    for _name, _function in _verbs.items():
        app.command(_name, rich_help_panel=_panel)(_function)
app.add_typer(audit.verbs, name="audit", rich_help_panel="Decide")


@app.callback()
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
    try:
        # A verb returns None. Typer returns the code of an Exit, and 130 after Ctrl-C.
        code = app(prog_name="imds-relay", standalone_mode=False) or EXIT_DONE
    except typer.TyperException as error:
        print_status(f"imds-relay: {error.format_message().rstrip('.')}. See imds-relay --help")
        code = EXIT_USAGE
    except typer.Abort:
        code = EXIT_FAILED
    except Exception as error:  # noqa: BLE001  # a person must see no traceback
        code = _print_error(unwrap_exception_group(error))
    sys.exit(code if code in range(4) else EXIT_FAILED)


def _print_error(error: Exception) -> int:
    for line in error_text(error).splitlines():
        print_status(f"imds-relay: {line}")
    return exit_code(error)
