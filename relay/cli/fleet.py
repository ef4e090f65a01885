"""``fleet``: shows the agents of a hub. Its verb ``definitions`` has a module of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from relay.cli._fleet_definitions import definitions
from relay.cli._options import AsJson, Scope, scope_query, set_default_verb
from relay.cli._output import format_local_time, pluralize, print_json, print_lines
from relay.cli._tables import print_table
from relay.cli.client import Client, with_client

fleet = typer.Typer(invoke_without_command=True)
fleet.command("definitions")(definitions)


@with_client
async def roster(relay: Client, *, scope: Scope = None, as_json: AsJson = False) -> None:
    """Show the agents of a hub: who they are, when they were heard, and who is silent."""
    answer = await relay.get("fleet", **scope_query(scope))
    if as_json:
        print_json(answer)
        return
    columns = ("scope", "agent", "state", "heard", "version", "zone", "clock", "polled")
    rows = [_agent_row(agent) for agent in answer["agents"]]
    print_table(columns, rows, empty="no agent has been heard of")
    for name in answer["silentScopes"]:
        print_lines(f"no agent of scope {name} is heard of: none of its events starts or ends")
    if rows:
        scopes = {agent["scope"] for agent in answer["agents"]}
        print_lines(f"{pluralize(len(rows), 'agent')} in {pluralize(len(scopes), 'scope')}")


set_default_verb(fleet, roster)


def _agent_row(agent: Mapping[str, Any]) -> tuple[object, ...]:
    offset, poll_age = agent["clockOffsetSeconds"], agent["pollAgeSeconds"]
    return (
        agent["scope"],
        agent["name"],
        agent["state"],
        format_local_time(agent["lastHeard"]),
        agent["version"],
        agent["zone"],
        None if offset is None else f"{offset:+.1f} s",
        None if poll_age is None else f"{poll_age:.0f} s before",
    )
