"""Plays a playbook to its end, and runs the simulator as a program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from relay.simulator.azure import SimulatedAzure
from relay.simulator.playbook import (
    AwaitedEventState,
    Playbook,
    Step,
    load_playbook,
    perform_action,
)
from relay.simulator.scope import InvalidTransition
from relay.simulator.server import Simulator
from relay.simulator.setup import Setup

DEFAULT_PORT = 8169


async def play_playbook(azure: SimulatedAzure, playbook: Playbook) -> None:
    """Perform every step at its time, then wait until no event is left. Repeat if it has ``loop``.

    A step that is no longer possible is skipped and reported: the software under test may be
    faster or slower than the playbook.
    """
    while True:
        started_at = azure.clock.now()
        for step in playbook.steps:
            await _wait_until_step_is_due(azure, step, started_at)
            try:
                perform_action(azure, step)
            except InvalidTransition as error:
                azure.report_line_with_time(f"a step is left out: {error}")
        await azure.wait_until(lambda: not azure.events)
        if not playbook.loop:
            return


async def run_simulator(
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    playbook: str | Path | None = None,
    scale: float | None = None,
    stay: bool = True,
    report: Callable[[str], None] = print,
) -> None:
    """Run until cancelled, or without ``stay`` until the playbook has ended.

    ``report`` gets a line for each thing that happens. The first VM listens on ``port``, the next
    one on the next port; 0 takes free ports. Without a playbook there is one VM, and events come
    through the control API. Raises ConfigError for an invalid playbook, OSError for an address
    that cannot be used.
    """
    loaded = load_playbook(playbook) if playbook is not None else None
    setup = loaded.azure if loaded is not None else Setup()
    if scale is not None:
        setup = replace(setup, scale=scale)
    async with Simulator(setup, host=host, port=port, report=report) as simulator:
        for name, url in simulator.urls.items():
            simulator.report_line_with_time(f"{name} finds its IMDS at {url}")
        if not simulator.is_loopback:
            simulator.report_line_with_time(
                f"{host} is not a loopback address: "
                "everybody who reaches it can read and control this simulator"
            )
        if loaded is not None:
            simulator.report_line_with_time(loaded.description)
            await play_playbook(simulator, loaded)
            simulator.report_line_with_time("the playbook has ended")
        if stay:
            await asyncio.Event().wait()


async def _wait_until_step_is_due(azure: SimulatedAzure, step: Step, started_at: datetime) -> None:
    if step.at is not None:
        due = started_at + azure.scale_duration(step.at)
        await azure.clock.sleep(max((due - azure.clock.now()).total_seconds(), 0.0))
        return
    if step.when is not None:
        await azure.wait_until(partial(_is_met, azure, step.when))
    await azure.clock.sleep(azure.scale_duration(step.after or 0.0).total_seconds())


def _is_met(azure: SimulatedAzure, condition: AwaitedEventState) -> bool:
    event = azure.event(condition.event)
    if condition.is_ == "gone":
        return not event.is_live
    if condition.is_ == "approved" and event.approved:
        return True
    return event.status != "Scheduled"
