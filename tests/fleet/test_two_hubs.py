"""A hub beside another, which does nothing and says so, and a hub whose disk is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.app import start_relay
from relay.clock import SystemClock
from relay.fleet.agent import start_orders
from relay.fleet.hub import link
from relay.fleet.routing import report_queue_name
from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.running_fleet import AUTOMATIC, RunningFleet, one_vote, running_fleet
from tests.rabbitmq import Broker
from tests.store.conftest import SmallDisk, small_disk

SCOPE = "vmss-a-1f0c33ab"


async def test_a_second_hub_tells_nothing_and_starts_nothing_until_the_first_is_gone(
    own_broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(link, "LOST_AFTER", 1.0)
    monkeypatch.setattr(start_orders, "RESTART_PAUSE", 0.0)
    async with running_fleet(
        own_broker, tmp_path, {SCOPE: ["vm-0", "vm-1"]}, hub=AUTOMATIC
    ) as fleet:
        second = fleet.hub_config(tmp_path / "second.db")
        async with start_relay(second, SystemClock()) as other:
            await eventually(lambda: "another hub reads" in caplog.text)
            await eventually(lambda: other.relay.source.lost)
            await eventually(lambda: "relay.source-lost" in names(fleet))
            event = fleet.azure.schedule(Plan(resources=("vm-0",)))
            await eventually(lambda: "event.started" in fleet.told(event.event_id))
            ids = [each["id"] for each in fleet.inbox.events]
            assert len(set(ids)) == len(ids)
            assert len(fleet.azure.start_requests) == 1
            assert await other.relay.store.read(lambda tx: tx.occurrences.live_occurrences()) == []
            await fleet.stop_hub()
            await eventually(lambda: not other.relay.source.lost)
            await eventually(lambda: "relay.source-recovered" in names(fleet))


def names(fleet: RunningFleet) -> list[str]:
    return [each["type"].split(".", 2)[2][:-3] for each in fleet.inbox.events]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as made:
        yield made


async def test_a_hub_with_a_full_disk_tells_from_memory_and_approves_nothing(
    own_broker: Broker, tmp_path: Path, disk: SmallDisk
) -> None:
    """Reports are acknowledged when they are on disk. The next start of the hub has the others."""
    scopes = {SCOPE: ["vm-0", "vm-1"]}
    async with running_fleet(own_broker, tmp_path, scopes, hub=one_vote("client:ops")) as fleet:
        await fleet.stop_hub()
        fleet.hub_file = disk.folder / "hub.db"
        await fleet.start_hub()
        azure, first = fleet.azure, await fleet.scheduled("vm-0")
        await fleet.wait_until_reported()
        disk.fill()
        second = azure.schedule(Plan(resources=("vm-1",)))
        azure.start(first)
        await eventually(lambda: fleet.told(first.event_id)[-1] == "event.started")
        await eventually(lambda: fleet.told(second.event_id) == ["event.scheduled"])
        status, _ = await fleet.approve(SCOPE, second.event_id)
        assert status == 503
        assert azure.start_requests == ()
        await fleet.stop_hub()
        waiting = report_queue_name(fleet.exchange)
        # The broker puts back what was not acknowledged when it notices that the hub is gone.
        await eventually(lambda: fleet.count_waiting(waiting), lambda count: count >= 2)
        disk.free()
        await fleet.start_hub()
        await fleet.wait_until_reported()
        await eventually(lambda: fleet.told(second.event_id) != [])
        status, _ = await fleet.approve(SCOPE, second.event_id)
        assert status == 202
        azure.end(first)
        await eventually(lambda: fleet.told(first.event_id)[-1] == "event.ended")
        told = fleet.told(first.event_id)
        assert told == ["event.scheduled", "event.started", "event.ended"]
        await fleet.stop_hub()
        assert await fleet.count_waiting(waiting) == 0
