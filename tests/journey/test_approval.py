"""From a decision to the StartRequest, with kills, answers that never come and a full disk."""

from __future__ import annotations

from pathlib import Path

from relay.simulator import Fault, Plan
from tests.eventually import eventually
from tests.journey.relay_process import name_of, told_relay
from tests.store.conftest import small_disk
from tests.store.open_store import read_column

VOTE = {
    "name": "reboots",
    "match": {"event_type": ["Reboot"]},
    "approve": {"votes": 1, "from": ["client:drain"]},
}
APPROVALS = {"rules": [VOTE]}


async def test_a_vote_starts_the_event_and_the_receiver_gets_every_step(tmp_path: Path) -> None:
    """The vote comes over the API. The receiver gets all notices in order."""
    async with told_relay(tmp_path, approvals=APPROVALS) as (receiver, sim, process):
        event = sim.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
        status, answer = await process.approve(event)
        wanted = {"state": "granted", "votes": 1, "required": 1, "rule": "reboots"}
        assert (status, wanted.items() <= answer.items()) == (202, True)
        await sim.wait_until_approved(event, within=60)
        await eventually(lambda: "event.started" in receiver.types_of(event.event_id))
        sim.end(event)
        await eventually(lambda: "event.ended" in receiver.types_of(event.event_id))
        steps = ("approval.recorded", "approval.granted", "startrequest.accepted")
        told = ["event.scheduled", *steps, "event.started", "event.ended"]
        assert receiver.types_of(event.event_id) == told
        ended = receiver.by_subject()[event.event_id][-1]["data"]
        outcome = (ended["outcome"], ended["evidence"], ended["approvedByRelay"])
        assert outcome == ("completed", "observed", True)
        assert [call.event_ids for call in sim.start_requests] == [(event.event_id,)]


async def test_killed_before_the_answer_it_sends_again_while_an_event_waits(tmp_path: Path) -> None:
    """The claim is on disk before the POST, so the restarted relay knows of the request.

    `test_machine_goes` kills it where Azure took the request.
    """
    async with told_relay(tmp_path, approvals=APPROVALS) as (receiver, sim, process):
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


async def test_with_a_full_disk_notices_go_out_and_nothing_is_approved(tmp_path: Path) -> None:
    """Notices go out from memory. Approvals get 503 and start nothing.

    Once the disk has room again, the relay records everything in order.
    """
    with small_disk(tmp_path / "disk", "16m") as disk:
        store = {"path": str(disk.folder / "relay.db")}
        started = told_relay(tmp_path / "relay", approvals=APPROVALS, store=store)
        async with started as (receiver, sim, process):
            first = sim.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
            await eventually(lambda: receiver.types_of(first.event_id) == ["event.scheduled"])
            disk.fill()
            second = sim.schedule(Plan(type="Freeze", resources=("vm-0",), lasts=None))
            await eventually(
                lambda: receiver.types_of(second.event_id) == ["event.scheduled"],
                what="notice from memory",
            )
            assert (await process.approve(first))[0] == 503
            assert not await process.ready()
            await eventually(
                lambda: any(name_of(each) == "relay.store-failing" for each in receiver.events)
            )
            assert not sim.start_requests
            disk.free()
            await eventually(process.ready)
            status, answer = await process.approve(first)
            assert (status, answer["state"]) == (202, "granted")
            await sim.wait_until_approved(first, within=60)
            assert await process.stop() == 0
            recorded = {row.event_key for row in process.journal() if row.kind == "event.scheduled"}
            assert recorded == {first.event_id.lower(), second.event_id.lower()}
            query = "SELECT count(*) FROM entry WHERE state = 'waiting'"
            assert read_column(process.store, query) == [0]
