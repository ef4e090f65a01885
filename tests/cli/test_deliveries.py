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
from tests.cli.command import environment, run_command
from tests.cli.running_relay import RunningRelay, running_relay
from tests.eventually import eventually


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay that runs."""
    async with running_relay(tmp_path) as relay:
        yield relay


async def test_dead_letters_go_out_again_by_sink_and_since(relay: RunningRelay) -> None:
    relay.receiver.status = 422
    events = [relay.azure.schedule(Plan(type="Reboot", started=True, lasts=None)) for _ in range(3)]

    async def parked() -> bool:
        return len((await relay.run("dead-letters", "--json")).json["items"]) == 3

    await eventually(parked)
    shown = await relay.run("deliveries", "1")
    assert "422" in shown.out
    assert len((await relay.run("deliveries", "1", "--json")).json["log"]) == 1
    relay.receiver.status = 204
    nothing = await relay.run("redeliver", "--since", "2999-01-01T00:00:00Z")
    assert (nothing.code, nothing.out) == (
        0,
        "0 dead letters go out again; see `imds-relay deliveries`\n",
    )
    result = await relay.run(
        "redeliver", "--since", "1h", "--sink", "drain", "--type", "event.started"
    )
    assert (result.code, result.out) == (
        0,
        "3 dead letters go out again; see `imds-relay deliveries`\n",
    )
    for event in events:
        await relay.wait_for_webhook("event.started", event.event_id)


async def test_a_person_sees_how_far_it_is(relay: RunningRelay) -> None:
    """A bar, on a terminal alone, and never where a program reads."""
    relay.receiver.status = 422
    relay.azure.schedule(Plan(type="Reboot", started=True, lasts=None))

    async def parked() -> bool:
        return len((await relay.run("dead-letters", "--json")).json["items"]) == 1

    await eventually(parked)
    relay.receiver.status = 204
    code, out, screen = await asyncio.to_thread(
        on_a_terminal, "redeliver", "--all", "-c", relay.config
    )
    assert (code, out) == (0, "1 dead letter goes out again; see `imds-relay deliveries`\n")
    assert "sent again" in screen
    assert "1/1" in screen


def on_a_terminal(*arguments: str) -> tuple[int, str, str]:
    """Run the command with a terminal as standard error. Return exit code, output and screen."""
    reader, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "relay", *arguments],
        env=environment(TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    ) as process:
        os.close(terminal)
        screen = bytearray()
        while True:
            try:
                screen += os.read(reader, 4096)
            except OSError:  # nobody holds the other end any more
                break
        os.close(reader)
        assert process.stdout is not None
        return process.wait(), process.stdout.read(), screen.decode()


@pytest.mark.parametrize(
    "arguments",
    [(), ("7", "--all"), ("--since", "soon"), ("--since", "9999999999d"), ("7", "--sink", "x")],
    ids=["nothing", "id and all", "since is no time", "since is before all", "id and sink"],
)
def test_redeliver_wants_one_id_or_what_they_have_in_common(arguments: tuple[str, ...]) -> None:
    assert run_command("redeliver", *arguments, "--url", "http://127.0.0.1:1").code == 2
