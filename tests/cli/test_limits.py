"""What the command says about events that wait for a limit."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.approvals.limits import LIMIT_NOTICE
from relay.simulator import Plan
from tests.cli.running_relay import LOCAL_PRINCIPAL, RunningRelay, running_relay

RULE = {"name": "all", "approve": {"votes": 1, "from": [LOCAL_PRINCIPAL]}}
LIMIT = {"name": "databases", "match": {"resources": ["db-*"]}, "max": 1, "rest": "2m"}
WAIT = f"limit databases, 1 machine at once: db-0; {LIMIT_NOTICE}"


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay that lets one database go at a time."""
    async with running_relay(tmp_path, rules=[RULE], limits=[LIMIT]) as relay:
        yield relay


async def test_every_verb_says_for_what_an_event_waits(relay: RunningRelay) -> None:
    busy = relay.azure.schedule(Plan(type="Reboot", resources=("db-0",), started=True, lasts=None))
    await relay.wait_for_webhook("event.started", busy.event_id)
    event = await relay.announce(Plan(type="Reboot", resources=("db-1",), notice=900.0))
    voted = await relay.run("approve", event.event_id, "--yes")
    assert voted.out == f"approved, and waiting (1 of 1 vote) for {WAIT}\n"
    assert "waiting, 1 of 1 vote, for limit databases, rule all" in (await relay.run("events")).out
    shown = (await relay.run("show", event.event_id)).out
    assert WAIT in shown
    assert re.search(
        r"approval\.recorded .* voted to approve, 1 of 1\. "
        r"It is approved, and waits for limit databases",
        shown,
    )
    explained = (await relay.run("explain", event.event_id)).out
    assert re.search(rf"waits for +{re.escape(WAIT)}", explained)
    await relay.run("hold", event.event_id)
    released = await relay.run("release", event.event_id)
    assert released.out == f"released and approved, and waiting for {WAIT}\n"
    relay.azure.end(busy)
    await relay.wait_for_webhook("event.ended", busy.event_id)
    assert "machine at once: db-0 until " in (await relay.run("show", event.event_id)).out
