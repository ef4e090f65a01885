"""A hub whose disk is full: it tells from memory, refuses approvals, and keeps the messages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.fleet.routing import report_queue_name
from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.running_fleet import running_fleet
from tests.rabbitmq import Broker
from tests.store.conftest import SmallDisk

SCOPE = "vmss-a-1f0c33ab"
RULE = {
    "approvals": {
        "tell_first": "0s",
        "rules": [{"name": "ops", "approve": {"votes": 1, "from": ["client:ops"]}}],
    }
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", folder], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


async def test_a_hub_with_a_full_disk_tells_from_memory_and_approves_nothing(
    own_broker: Broker, tmp_path: Path, disk: SmallDisk
) -> None:
    """Reports are acknowledged when they are on disk. The next start of the hub has the others."""
    async with running_fleet(own_broker, tmp_path, {SCOPE: ["vm-0", "vm-1"]}, hub=RULE) as fleet:
        await fleet.stop_hub()
        fleet.hub_file = disk.folder / "hub.db"
        await fleet.start_hub()
        azure = fleet.azures[SCOPE]
        first = azure.schedule(Plan(resources=("vm-0",)))
        await eventually(lambda: fleet.told(first.event_id) == ["event.scheduled"])
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
