"""``simulate``: the stand-in for Azure as a program; see docs/simulator.md."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from relay.cli._exit_codes import CommandFailed
from relay.cli._output import print_json, print_output, print_table
from relay.cli._signals import until_stopped
from relay.simulator import list_playbooks, run_simulator
from relay.simulator.run import DEFAULT_PORT


def simulate(
    playbook: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAYBOOK",
            show_default=False,
            help="A name of --list, or a YAML file. Without it: one VM, and events by the control API.",
        ),
    ] = None,
    *,
    listed: Annotated[
        bool, typer.Option("--list", help="List the playbooks that come with the package.")
    ] = False,
    scale: Annotated[
        float | None,
        typer.Option(
            "--scale",
            metavar="N",
            show_default=False,
            help="How many times faster than Azure; wins over the playbook's.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            help="For the first VM, the next one has the port after it; 0: free ones.",
        ),
    ] = DEFAULT_PORT,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --list: print JSON for programs.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="End when the playbook has ended, instead of at Ctrl-C.")
    ] = False,
) -> None:
    """Be an Azure to test with: IMDS for one or more VMs, with maintenance as a playbook has it."""
    if listed and as_json:
        print_json(
            [
                {"name": name, "description": one.description}
                for name, one in list_playbooks().items()
            ]
        )
        return
    if listed:
        print_table(
            ("playbook", "what happens"),
            [(name, one.description) for name, one in list_playbooks().items()],
            empty="",
        )
        return
    if scale is not None and not scale > 0:
        raise typer.BadParameter("expected more than 0", param_hint="--scale")
    if once and playbook is None:
        raise typer.BadParameter("expected a playbook that can end", param_hint="--once")
    try:
        asyncio.run(
            until_stopped(
                run_simulator(
                    host=host,
                    port=port,
                    playbook=playbook,
                    scale=scale,
                    stay=not once,
                    tell=print_output,
                )
            )
        )
    except OSError as error:
        raise CommandFailed(
            f"cannot listen on {host} port {port}: {error.strerror or error}. --port 0 takes free ones"
        ) from error
