"""The control API: what tests in any language drive the simulator with."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from relay.simulator import Plan, Simulator
from tests.simulator.test_server import EVENTS, PAIR


async def post_action(sim: Simulator, action: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{sim.url}/sim/{action}", json=body) as response,
    ):
        return response.status, await response.json()


async def get_control(sim: Simulator, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{sim.url}/sim/{path}") as response:
        return response.status, await response.json()


async def test_an_event_can_be_led_through_its_life() -> None:
    async with Simulator(PAIR) as sim:
        plan = {"name": "reboot", "type": "Reboot", "resources": ["vm-1"], "notice": "15m"}
        status, event = await post_action(sim, "schedule", plan)
        assert (status, event["status"], event["plan"]["resources"]) == (200, "Scheduled", ["vm-1"])
        changes = {"event": "reboot", "notice": "30m", "duration": 9}
        assert (await post_action(sim, "update", changes))[1]["plan"]["duration"] == 9
        _, approved = await post_action(sim, "approve", {"event": "reboot", "vm": "vm-0"})
        assert approved["approved_by"] == ["vm-0"]
        assert (await post_action(sim, "start", event["event_id"]))[1]["status"] == "Started"
        assert (await post_action(sim, "end", "reboot"))[1]["status"] == "Completed"
        assert (await get_control(sim, "events/reboot"))[1]["status"] == "Completed"


async def test_faults_come_and_go(client: aiohttp.ClientSession) -> None:
    async with Simulator(PAIR) as sim:
        assert (await post_action(sim, "fault", {"status": 410, "lasts": "70s"}))[0] == 200
        assert (await get_control(sim, "state"))[1]["faults"][0]["status"] == 410
        async with client.get(sim.url + EVENTS) as response:
            assert response.status == 410
        assert (await post_action(sim, "clear_faults", True))[0] == 200
        assert (await get_control(sim, "state"))[1]["faults"] == []


async def test_calls_can_be_read(client: aiohttp.ClientSession) -> None:
    async with Simulator(PAIR) as sim:
        async with client.post(sim.urls["vm-1"] + EVENTS, data=b"\xff{") as response:
            assert response.status == 400
        _, calls = await get_control(sim, "calls")
        assert [(call["vm"], call["method"], call["status"], call["body"]) for call in calls] == [
            ("vm-1", "POST", 400, "\ufffd{")
        ]


@pytest.mark.parametrize(
    ("action", "body", "status", "text"),
    [
        (
            "schedule",
            {"notice": 15},
            400,
            "schedule.notice: expected a duration such as 500ms, 1s, 5m, 2h or 7d, got 15",
        ),
        ("schedule", {"kind": "Reboot"}, 400, "schedule.kind: unknown key"),
        ("fault", {"kind": "fire"}, 400, "fault.kind: expected 'status'"),
        ("update", {}, 400, "update.event: expected a value, got none"),
        ("cancel", "nothing", 404, "expected the EventId or name of an event, got 'nothing'"),
        ("end", "reboot", 409, "to be Started, it is Scheduled"),
        ("explode", {}, 404, "expected one of schedule, start"),
        ("start", 7, 400, "start: expected a valid string, got 7"),
    ],
)
async def test_what_cannot_be_done_is_said(action: str, body: Any, status: int, text: str) -> None:
    async with Simulator(PAIR) as sim:
        sim.schedule(Plan(name="reboot"))
        answer = await post_action(sim, action, body)
        assert answer[0] == status
        assert text in answer[1]["error"]
        assert len(sim.events) == 1


async def test_a_body_that_is_not_json_is_refused() -> None:
    async with (
        Simulator(PAIR) as sim,
        aiohttp.ClientSession() as session,
        session.post(f"{sim.url}/sim/schedule", data=b"{") as response,
    ):
        assert response.status == 400
        assert "expected JSON" in (await response.json())["error"]
