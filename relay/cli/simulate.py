"""``simulate``: runs the simulator of Azure IMDS as a program; see docs/simulator.md."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from relay.cli._exit_codes import CommandFailed
from relay.cli._options import argument, option
from relay.cli._output import print_json, print_lines
from relay.cli._tables import print_table
from relay.signals import run_until_stopped
from relay.simulator import load_packaged_playbooks, run_simulator
from relay.simulator.server import DEFAULT_PORT


def simulate(
    playbook: Annotated[
        str | None,
        argument(
            "PLAYBOOK",
            "A name of --list, or a YAML file. "
            "Default: one VM, and events only by the control API.",
        ),
    ] = None,
    *,
    list_names: Annotated[
        bool, option("--list", None, "List the playbooks of the package.")
    ] = False,
    scale: Annotated[
        float | None,
        option("--scale", "N", "How many times faster than Azure; overrides the playbook's scale."),
    ] = None,
    host: Annotated[str, option("--host", "ADDRESS", "The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        option(
            "--port",
            "PORT",
            "The port of the first VM; the next VM has the next port. 0: free ports.",
            min=0,
            max=65535,
        ),
    ] = DEFAULT_PORT,
    as_json: Annotated[
        bool, option("--json", None, "With --list: print JSON for programs.")
    ] = False,
    once: Annotated[
        bool, option("--once", None, "End with the playbook instead of at Ctrl-C.")
    ] = False,
) -> None:
    """Simulate Azure for tests.

    Serves the metadata service of one or more VMs, with the maintenance of a playbook.
    """
    if list_names:
        rows = [
            (name, playbook.description) for name, playbook in load_packaged_playbooks().items()
        ]
        if as_json:
            print_json([{"name": name, "description": description} for name, description in rows])
        else:
            print_table(("playbook", "what happens"), rows, empty="")
        return
    if scale is not None and not scale > 0:
        raise typer.BadParameter("expected more than 0", param_hint="--scale")
    if once and playbook is None:
        raise typer.BadParameter("expected a playbook that can end", param_hint="--once")
    simulator = run_simulator(
        host=host, port=port, playbook=playbook, scale=scale, stay=not once, report=print_lines
    )
    try:
        asyncio.run(run_until_stopped(simulator))
    except OSError as error:
        raise CommandFailed(
            f"cannot listen on {host} port {port}: {error.strerror or error}. "
            "--port 0 takes free ports"
        ) from error
