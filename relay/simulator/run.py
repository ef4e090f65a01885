"""Playing a playbook to its end, and the simulator as a program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from relay.simulator.playbook import Playbook, Step, When, load_playbook, perform
from relay.simulator.scope import InvalidTransition, Setup
from relay.simulator.server import Simulator
from relay.simulator.stage import Stage

DEFAULT_PORT = 8169


async def play(stage: Stage, playbook: Playbook) -> None:
    """Do every step at its time, then wait until no event is left; for ever with ``loop``."""
    while True:
        began = stage.clock.now()
        for step in playbook.steps:
            await _wait_for(stage, step, began)
            try:
                perform(stage, step)
            except (
                InvalidTransition
            ) as error:  # whoever is tested was faster, or slower, than the playbook
                stage.tell(f"a step is left out: {error}")
        await stage.until(lambda: not stage.events)
        if not playbook.loop:
            return


async def run_simulator(
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    playbook: str | Path | None = None,
    scale: float | None = None,
    stay: bool = True,
    tell: Callable[[str], None] = print,
) -> None:
    """Be an Azure until cancelled; with ``stay=False`` until the playbook has ended. ``tell`` gets a line for each thing that happens.

    The first VM listens on ``port``, the next one on the port after it; 0: free ports. Without a playbook there is one VM,
    and events come through the control API. Raises ConfigError for a playbook that cannot be used, OSError for an address
    that cannot be had.
    """
    story = load_playbook(playbook) if playbook is not None else None
    setup = story.azure if story is not None else Setup()
    if scale is not None:
        setup = replace(setup, scale=scale)
    async with Simulator(setup, host=host, port=port, tell=tell) as simulator:
        for name, url in simulator.urls.items():
            simulator.tell(f"{name} finds its IMDS at {url}")
        if not simulator.loopback:
            simulator.tell(
                f"{host} is not a loopback address: whoever reaches it can read and control this simulator"
            )
        if story is not None:
            simulator.tell(story.description)
            await play(simulator, story)
            simulator.tell("the playbook has ended")
        if stay:
            await asyncio.Event().wait()


async def _wait_for(stage: Stage, step: Step, began: datetime) -> None:
    if step.at is not None:
        seconds = (began + stage.scope.span(step.at) - stage.clock.now()).total_seconds()
    else:
        if step.when is not None:
            await stage.until(_reached(stage, step.when))
        seconds = stage.scope.span(step.after or 0.0).total_seconds()
    await stage.clock.sleep(max(seconds, 0.0))


def _reached(stage: Stage, when: When) -> Callable[[], bool]:
    def reached() -> bool:
        event = stage.event(when.event)
        if when.is_ == "gone":
            return not event.live
        return event.status != "Scheduled" or (when.is_ == "approved" and event.approved)

    return reached
