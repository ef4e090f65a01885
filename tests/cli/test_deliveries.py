"""The verbs that send again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.simulator import Plan
from tests.cli.command import run_command
from tests.cli.running_relay import RunningRelay, running_relay
from tests.eventually import eventually


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay that runs."""
    async with running_relay(tmp_path) as relay:
        yield relay


async def test_dead_letters_go_out_again_by_sink(relay: RunningRelay) -> None:
    relay.receiver.status = 422
    events = [relay.azure.schedule(Plan(type="Reboot", started=True, lasts=None)) for _ in range(3)]

    async def parked() -> bool:
        return len((await relay.run("dead-letters", "--json")).json["items"]) == 3

    await eventually(parked)
    shown = await relay.run("deliveries", "1")
    assert "422" in shown.out
    assert len((await relay.run("deliveries", "1", "--json")).json["log"]) == 1
    relay.receiver.status = 204
    result = await relay.run("redeliver", "--sink", "drain")
    assert (result.code, result.out) == (
        0,
        "3 dead letters go out again; see `imds-relay deliveries`\n",
    )
    for event in events:
        await relay.wait_for_webhook("event.started", event.event_id)


@pytest.mark.parametrize("arguments", [(), ("7", "--all"), ("7", "--sink", "x")])
def test_redeliver_wants_one_id_or_a_sink_or_all(arguments: tuple[str, ...]) -> None:
    assert run_command("redeliver", *arguments, "--url", "http://127.0.0.1:1").code == 2
