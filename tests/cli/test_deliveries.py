"""The verbs that send again."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.simulator import Plan
from tests.cli.command import called, environment, typed
from tests.cli.running_relay import Alive, alive
from tests.journey.relay_process import eventually


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Alive]:
    """A relay that runs."""
    async with alive(tmp_path) as running:
        yield running


async def test_dead_letters_go_out_again_by_sink_and_since(relay: Alive) -> None:
    relay.receiver.status = 422
    events = [relay.azure.schedule(Plan(type="Reboot", started=True, lasts=None)) for _ in range(3)]

    async def parked() -> bool:
        return len((await called("dead-letters", "-c", relay.config, "--json")).json["items"]) == 3

    await eventually(parked)
    shown = await called("deliveries", "1", "-c", relay.config)
    assert "422" in shown.out
    assert len((await called("deliveries", "1", "-c", relay.config, "--json")).json["log"]) == 1
    relay.receiver.status = 204
    nothing = await called("redeliver", "--since", "2999-01-01T00:00:00Z", "-c", relay.config)
    assert (nothing.code, nothing.out) == (
        0,
        "0 dead letters go out again; see `imds-relay deliveries`\n",
    )
    done = await called(
        "redeliver",
        "--since",
        "1h",
        "--sink",
        "drain",
        "--type",
        "event.started",
        "-c",
        relay.config,
    )
    assert (done.code, done.out) == (
        0,
        "3 dead letters go out again; see `imds-relay deliveries`\n",
    )
    for event in events:
        await relay.told("event.started", event.event_id)


async def test_a_person_sees_how_far_it_is(relay: Alive) -> None:
    """A bar, on a terminal alone, and never where a program reads."""
    relay.receiver.status = 422
    relay.azure.schedule(Plan(type="Reboot", started=True, lasts=None))

    async def parked() -> bool:
        return len((await called("dead-letters", "-c", relay.config, "--json")).json["items"]) == 1

    await eventually(parked)
    relay.receiver.status = 204
    code, out, screen = await asyncio.to_thread(
        on_a_terminal, "redeliver", "--all", "-c", relay.config
    )
    assert (code, out) == (0, "1 dead letter goes out again; see `imds-relay deliveries`\n")
    assert "sent again" in screen
    assert "1/1" in screen


def on_a_terminal(*arguments: str) -> tuple[int, str, str]:
    """Run the command with a terminal as standard error: how it ended, what it printed, and what a person saw meanwhile."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "relay", *arguments],
        env=environment(TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    ) as process:
        os.close(theirs)
        seen = bytearray()
        while True:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # nobody holds the other end any more
                break
        os.close(ours)
        assert process.stdout is not None
        return process.wait(), process.stdout.read(), seen.decode()


@pytest.mark.parametrize(
    "arguments", [(), ("7", "--all"), ("--since", "soon"), ("7", "--sink", "drain")]
)
def test_redeliver_wants_one_id_or_what_they_have_in_common(arguments: tuple[str, ...]) -> None:
    assert typed("redeliver", *arguments, "--url", "http://127.0.0.1:1").code == 2
