"""``fleet simulate``: loads a broker and a hub as a fleet of many VMs does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from relay.cli._options import AsJson
from relay.cli._output import pluralize, print_json, print_to_stderr
from relay.cli._tables import print_table, show_progress_bar
from relay.errors import ConfigError
from relay.fleet.settings import AgentSettings
from relay.roles.simulated_agents import Counters
from relay.roles.simulated_fleet import FleetPlan, raise_open_files_limit, simulated_fleet
from relay.signals import run_until_stopped
from relay.validation import first_error_path_and_message

SETTLE_TIMEOUT = 10.0
"""Seconds after the last change in which agents still report."""
_PROGRESS_INTERVAL = 0.5


def simulate(
    *,
    agents: Annotated[
        int, typer.Option("--agents", metavar="N", min=1, help="How many VMs.")
    ] = 100,
    scopes: Annotated[
        int, typer.Option("--scopes", metavar="N", min=1, help="How many scopes they are in.")
    ] = 10,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="The RabbitMQ, with the user of the agents. Others on this machine can see it: "
            "prefer --url-file.",
        ),
    ] = None,
    url_file: Annotated[
        Path | None,
        typer.Option("--url-file", metavar="FILE", help="A file that holds this URL."),
    ] = None,
    exchange: Annotated[
        str, typer.Option("--exchange", metavar="NAME", help="As fleet.exchange of the hub.")
    ] = "azure.scheduledevents",
    hub_user: Annotated[
        str, typer.Option("--hub-user", metavar="USER", help="The hub's user of the RabbitMQ.")
    ] = "imds-hub",
    scope_prefix: Annotated[
        str,
        typer.Option(
            "--scope-prefix",
            metavar="TEXT",
            help="How the names of the scopes begin. A domain of the hub must match them.",
        ),
    ] = "sim",
    rate: Annotated[
        float,
        typer.Option(
            "--rate", metavar="N", min=0, help="Changes a second, in all scopes together."
        ),
    ] = 1.0,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration", metavar="SECONDS", min=0, help="For how long. Default: until Ctrl-C."
        ),
    ] = None,
    votes: Annotated[
        bool, typer.Option("--votes", help="Each VM approves the events that name it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a fleet for load tests.

    Each agent has a connection of its own to a real RabbitMQ, and a real hub hears it. The VMs and
    their maintenance are simulated.
    """
    settings = _agent_settings_from_options(url, url_file, exchange, hub_user)
    allowed = raise_open_files_limit()
    if agents > allowed:
        print_to_stderr(
            f"{pluralize(allowed, 'agent')} instead of {agents}: each needs a connection, and this "
            "process may not open more files (ulimit -n)"
        )
        agents = max(1, allowed)
    try:
        plan = FleetPlan(
            agents=agents, scopes=scopes, scope_prefix=scope_prefix, rate=rate, votes=votes
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--scopes") from None
    for name in ("aiormq", "aio_pika"):  # else each connection that is lost is a traceback
        logging.getLogger(name).setLevel(logging.CRITICAL)
    counters: list[Counters] = []
    try:
        asyncio.run(run_until_stopped(_simulate(settings, plan, duration, counters)))
    except TimeoutError:
        raise ConfigError(
            "expected all agents to connect and to make their queues, some did not: is the hub "
            "running, and has the user the rights that `imds-relay fleet definitions` prints?"
        ) from None
    if counters:
        _print_counters(counters[0], as_json=as_json)


def _agent_settings_from_options(
    url: str | None, url_file: Path | None, exchange: str, user: str
) -> AgentSettings:
    fields: Mapping[str, Any] = {
        "role": "agent",
        "exchange": exchange,
        "hub_user": user,
        **({"url": url} if url is not None else {}),
        **({"url_file": url_file} if url_file is not None else {}),
    }
    try:
        return AgentSettings.model_validate(fields)
    except ValidationError as error:
        path, problem = first_error_path_and_message(error)
        option = path.replace("_", "-")
        raise ConfigError(f"--{option}: {problem}" if option else problem) from None


async def _simulate(
    settings: AgentSettings, plan: FleetPlan, duration: float | None, counters: list[Counters]
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        with show_progress_bar("connected") as show:
            numbers = count(1)
            fleet = await stack.enter_async_context(
                simulated_fleet(
                    settings, plan, on_connected=lambda: show(next(numbers), plan.agents)
                )
            )
        counters.append(fleet.counters)
        async with _show_duration_progress_bar(duration):
            await fleet.make_changes_at_plan_rate(duration)
            await fleet.wait_until_changes_are_reported(SETTLE_TIMEOUT)


@contextlib.asynccontextmanager
async def _show_duration_progress_bar(duration: float | None) -> AsyncIterator[None]:
    """Show how much of the time has passed, if there is an end."""
    if duration is None:
        yield
        return
    with show_progress_bar("seconds") as show:
        task = asyncio.create_task(_show_elapsed_seconds(show, duration))
        try:
            yield
        finally:
            task.cancel()


async def _show_elapsed_seconds(show: Callable[[int, int], None], duration: float) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        show(round(min(loop.time() - began, duration)), round(duration))
        await asyncio.sleep(_PROGRESS_INTERVAL)


def _print_counters(counters: Counters, *, as_json: bool) -> None:
    values = {
        **asdict(counters),
        "waiting": counters.unpublished_reports,
        "copies_per_change": round(counters.duplicate_reports_per_change(), 2),
    }
    if as_json:
        print_json(values)
        return
    rows = [(name.replace("_", " "), value) for name, value in values.items()]
    print_table(("what", "count"), rows, empty="")
