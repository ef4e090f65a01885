"""From a decision to the StartRequest, with kills, answers that never come and a full disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.simulator import VM, Fault, Plan, Setup, Simulator
from tests.eventually import eventually
from tests.journey.relay_process import CLIENT_SECRET, client, inbox, relay, webhook
from tests.store.open_store import read_column

VOTE = {
    "name": "reboots",
    "match": {"event_type": ["Reboot"]},
    "approve": {"votes": 1, "from": ["client:drain"]},
}


def _document(sim: Simulator, *sinks: dict[str, Any], **approvals: Any) -> dict[str, Any]:
    return {
        "source": {"url": sim.url},
        "sinks": list(sinks),
        "approvals": {"rules": [VOTE], **approvals},
        "api": {"clients": [client(secrets=[CLIENT_SECRET])]},
    }


async def test_a_vote_starts_the_event_and_the_receiver_gets_every_step(tmp_path: Path) -> None:
    """The vote comes over the API. The receiver gets all notices in order."""
    async with (
        inbox() as receiver,
        Simulator(Setup(vms=(VM("vm-0"),))) as sim,
        relay(tmp_path, _document(sim, webhook(receiver.url))) as process,
    ):
        await process.start()
        event = sim.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
        status, answer = await process.approve(event)
        assert (status, answer["state"], answer["votes"], answer["required"], answer["rule"]) == (
            202,
            "granted",
            1,
            1,
            "reboots",
        )
        await sim.wait_until_approved(event, within=60)
        await eventually(lambda: "event.started" in receiver.types_of(event.event_id))
        sim.end(event)
        await eventually(lambda: "event.ended" in receiver.types_of(event.event_id))
        assert receiver.types_of(event.event_id) == [
            "event.scheduled",
            "approval.recorded",
            "approval.granted",
            "startrequest.accepted",
            "event.started",
            "event.ended",
        ]
        ended = receiver.by_subject()[event.event_id][-1]["data"]
        assert (ended["outcome"], ended["evidence"], ended["approvedByRelay"]) == (
            "completed",
            "observed",
            True,
        )
        assert [call.event_ids for call in sim.start_requests] == [(event.event_id,)]


async def test_a_relay_killed_before_the_answer_sends_again_while_the_event_still_waits(
    tmp_path: Path,
) -> None:
    """The claim is on disk before the POST, so the restarted relay knows of the request.

    `test_machine_goes` kills it where Azure took the request.
    """
    async with (
        inbox() as receiver,
        Simulator(Setup(vms=(VM("vm-0"),))) as sim,
        relay(tmp_path, _document(sim, webhook(receiver.url))) as process,
    ):
        await process.start()
        event = sim.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None, starts_after=1.0))
        sim.add_fault(Fault(kind="hang", on="approval", calls=1, processed=False))
        assert (await process.approve(event))[0] == 202
        await eventually(lambda: len(sim.start_requests) == 1)
        await process.kill()
        await process.start()
        await sim.wait_until_started(event, within=60)
        await eventually(lambda: "startrequest.accepted" in receiver.types_of(event.event_id))
        assert len(sim.start_requests) == 2
        await process.stop()
        kinds = [row.kind for row in process.journal()]
        assert kinds.index("approval.granted") < kinds.index("claim")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 16 MiB for this test."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


async def test_with_a_full_disk_notices_still_go_out_and_nothing_is_approved(
    tmp_path: Path, small_disk: Path
) -> None:
    """Notices go out from memory. Approvals get 503 and start nothing.

    Once the disk has room again, the relay records everything in order.
    """
    async with inbox() as receiver, Simulator(Setup(vms=(VM("vm-0"),))) as sim:
        document = {
            **_document(sim, webhook(receiver.url)),
            "store": {"path": str(small_disk / "relay.db")},
        }
        async with relay(tmp_path / "relay", document) as process:
            await process.start()
            first = sim.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
            await eventually(lambda: receiver.types_of(first.event_id) == ["event.scheduled"])
            filler = small_disk / "filler"
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"x" * 4096)
                except OSError:
                    pass
            second = sim.schedule(Plan(type="Freeze", resources=("vm-0",), lasts=None))
            await eventually(
                lambda: receiver.types_of(second.event_id) == ["event.scheduled"],
                what="notice from memory",
            )
            assert (await process.approve(first))[0] == 503
            assert not await process.ready()
            await eventually(
                lambda: any(
                    event["type"] == "io.imdsrelay.relay.store-failing.v1"
                    for event in receiver.events
                )
            )
            assert not sim.start_requests
            filler.unlink()
            await eventually(process.ready)
            status, answer = await process.approve(first)
            assert (status, answer["state"]) == (202, "granted")
            await sim.wait_until_approved(first, within=60)
            assert await process.stop() == 0
            recorded = {row.event_key for row in process.journal() if row.kind == "event.scheduled"}
            assert recorded == {first.event_id.lower(), second.event_id.lower()}
            query = "SELECT count(*) FROM entry WHERE state = 'waiting'"
            assert read_column(process.store, query) == [0]
