"""Three events for three machines, and a limit that lets one machine go at a time."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relay.simulator import Plan
from tests.eventually import eventually
from tests.journey.relay_process import told_relay

REST = 1.5
RULE = {"name": "reboots", "approve": {"votes": 1, "from": ["client:drain"]}}
LIMIT = {"name": "databases", "match": {"resources": ["db-*"]}, "max": 1, "rest": f"{REST}s"}
APPROVALS = {"rules": [RULE], "limits": [LIMIT]}
MACHINES = ("db-0", "db-1", "db-2")


async def test_three_approved_machines_go_one_after_the_other(tmp_path: Path) -> None:
    """The relay is killed and started again while two of them wait."""
    started = told_relay(tmp_path, machines=MACHINES, approvals=APPROVALS)
    async with started as (receiver, sim, process):
        # The last machine has the earliest NotBefore.
        events = [
            sim.schedule(Plan(type="Reboot", resources=(name,), notice=900.0 - number, lasts=None))
            for number, name in enumerate(MACHINES)
        ]
        busy = sim.schedule(Plan(type="Reboot", resources=("db-0",), started=True, lasts=None))
        await eventually(lambda: "event.started" in receiver.types_of(busy.event_id))
        for event in events[1:]:
            status, answer = await process.approve(event)
            assert (status, answer["state"]) == (202, "waiting")
            assert answer["waitingFor"][0]["machines"] == ["db-0"]
        await process.kill()
        assert not sim.start_requests
        await process.start()
        second, first = events[1:]
        assert (await process.shown(second))["approval"]["state"] == "waiting"
        ended: list[datetime] = []
        for over, next_one in ((busy, first), (first, second)):
            assert not sim.start_requests or sim.start_requests[-1].event_ids == (over.event_id,)
            sim.end(over)
            await eventually(lambda over=over: "event.ended" in receiver.types_of(over.event_id))
            ended.append(_time_of(receiver.by_subject()[over.event_id][-1]))
            await sim.wait_until_approved(next_one, within=60)
            await eventually(
                lambda next_one=next_one: "event.started" in receiver.types_of(next_one.event_id)
            )
        sent = [call.event_ids for call in sim.start_requests]
        assert sent == [(first.event_id,), (second.event_id,)]
        granted = [
            _time_of(next(one for one in told if one["type"].endswith("approval.granted.v1")))
            for told in (receiver.by_subject()[one.event_id] for one in (first, second))
        ]
        for grant, end in zip(granted, ended, strict=True):
            assert (grant - end).total_seconds() >= REST
        # Nobody has voted for the machine that was rebooted already.
        assert (await process.shown(events[0]))["approval"]["state"] == "pending"


def _time_of(event: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(event["time"]).astimezone(UTC)
