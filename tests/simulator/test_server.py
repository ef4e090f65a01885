"""The simulator over HTTP: what IMDS answers and refuses, and the control API."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import aiohttp
import pytest
from yarl import URL

from relay.imds.document import NEWEST_API_VERSION
from relay.simulator import VM, Plan, Setup, Simulator
from tests.clocks import ManualClock

EVENTS = f"/metadata/scheduledevents?api-version={NEWEST_API_VERSION}"
PAIR = Setup(vms=(VM("vm-0"), VM("vm-1")), rate_limit=None)


async def get(
    client: aiohttp.ClientSession, url: str, path: str = EVENTS, **more: Any
) -> tuple[int, Any]:
    async with client.get(url + path, **more) as response:
        return response.status, await response.json()


async def approve(client: aiohttp.ClientSession, url: str, *event_ids: str) -> int:
    body = {"StartRequests": [{"EventId": event_id} for event_id in event_ids]}
    async with client.post(url + EVENTS, json=body) as response:
        return response.status


async def test_vms_share_one_document_and_each_may_approve(client: aiohttp.ClientSession) -> None:
    async with Simulator(PAIR) as sim:
        event = sim.schedule(Plan(resources=("vm-0", "vm-1"), starts_after=0.0))
        assert await get(client, sim.urls["vm-0"]) == await get(client, sim.urls["vm-1"])
        assert await approve(client, sim.urls["vm-1"], event.event_id) == 200
        assert await approve(client, sim.urls["vm-0"], event.event_id) == 200
        assert (await sim.wait_until_started(event, within=60)).approved_by == ("vm-1",)
        status, document = await get(client, sim.urls["vm-0"])
        assert (status, document["Events"][0]["EventStatus"]) == (200, "Started")


async def test_an_approval_needs_no_content_type_and_any_case_of_the_event_id_will_do(
    client: aiohttp.ClientSession,
) -> None:
    """The pages approve with plain ``curl -d``, which sends a form's content type."""
    async with Simulator() as sim:
        event = sim.schedule(Plan())
        body = f'{{"StartRequests": [{{"EventId": "{event.event_id.lower()}"}}]}}'.encode()
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        async with client.post(sim.url + EVENTS, data=body, headers=headers) as response:
            assert (response.status, await response.read()) == (200, b"")
        assert (await sim.wait_until_approved(event, within=60)).approved_by == ("vm-0",)


async def test_a_wrong_start_request_is_refused(client: aiohttp.ClientSession) -> None:
    none = (b'{"StartRequests": []}', b'{"StartRequests": [{}]}', b'{"StartRequests": "A"}')
    async with Simulator(PAIR) as sim:
        for body in (b"", b"{", b"[]", b"{}", *none):
            async with client.post(sim.url + EVENTS, data=body) as response:
                assert response.status == 400
            call = sim.start_requests[-1]
            assert (call.body, call.status, call.event_ids) == (body, 400, ())


@pytest.mark.parametrize("path", [EVENTS, "/metadata/instance", "/metadata/instance/compute"])
async def test_without_the_metadata_header_nothing_is_answered(path: str) -> None:
    async with Simulator() as sim, aiohttp.ClientSession() as bare:
        status, problem = await get(bare, sim.url, path)
        assert status == 400
        assert problem == {"error": "Bad request. Required metadata header not specified"}
        async with bare.post(sim.url + EVENTS, data=b"{}") as response:
            assert response.status == 400


async def test_a_forwarded_request_is_refused(client: aiohttp.ClientSession) -> None:
    async with Simulator() as sim:
        status, problem = await get(client, sim.url, headers={"X-Forwarded-For": "10.0.0.1"})
        assert (status, "X-Forwarded-For" in problem["error"]) == (400, True)


@pytest.mark.parametrize("params", [{}, {"api-version": ""}, {"api-version": "2020-07-02"}])
async def test_an_api_version_that_is_not_known_is_refused_with_the_newest(
    client: aiohttp.ClientSession, params: dict[str, str]
) -> None:
    async with Simulator() as sim:
        status, problem = await get(client, sim.url, "/metadata/scheduledevents", params=params)
        assert status == 400
        assert problem["newest-versions"] == ["2020-07-01", "2019-08-01", "2019-04-01"]


async def test_instance_metadata_tells_the_vm_of_the_address(client: aiohttp.ClientSession) -> None:
    async with Simulator(
        Setup(vms=(VM("set_0", tags={"role": "db"}), VM("set_18")), rate_limit=None)
    ) as sim:
        version = {"params": {"api-version": "2021-02-01"}}
        status, whole = await get(client, sim.urls["set_18"], "/metadata/instance", **version)
        assert (status, whole["compute"]["name"]) == (200, "set_18")
        assert whole["compute"]["osProfile"]["computerName"] == "set00000i"
        assert "network" in whole
        _, part = await get(client, sim.urls["set_0"], "/metadata/instance/compute", **version)
        assert part["tagsList"] == [{"name": "role", "value": "db"}]
        assert part["vmScaleSetName"] == whole["compute"]["vmScaleSetName"] == "set"
        assert part["vmId"] != whole["compute"]["vmId"]


async def test_the_sixth_call_in_a_second_is_too_many(client: aiohttp.ClientSession) -> None:
    """Five calls a second for each VM, of events and instance metadata together."""
    clock = ManualClock()
    async with Simulator(Setup(vms=PAIR.vms), clock=clock) as sim:
        paths = [EVENTS, "/metadata/instance?api-version=2021-02-01", *[EVENTS] * 4]
        answers = []
        for path in paths:
            async with client.get(sim.url + path) as response:
                answers.append((response.status, response.headers.get("Retry-After")))
        assert answers == [(200, None)] * 5 + [(429, "1")]
        assert (await get(client, sim.urls["vm-1"]))[0] == 200
        clock.advance(1)
        assert (await get(client, sim.url))[0] == 200


async def test_the_first_call_is_slow_and_none_waits_longer(client: aiohttp.ClientSession) -> None:
    clock = ManualClock()
    setup = Setup(first_call=120.0, rate_limit=None)
    async with Simulator(setup, clock=clock) as sim, clock.ticking(0.5):
        answers = await asyncio.gather(*(get(client, sim.url) for _ in range(3)))
        assert [status for status, _ in answers] == [200] * 3
        assert 120 <= (took := clock.monotonic()) < 160
        await get(client, sim.url)
        assert clock.monotonic() - took < 40


@pytest.mark.parametrize(
    "garbage",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /sim/say HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_answered_400_without_a_traceback(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with Simulator() as sim:
        address = URL(sim.url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(garbage)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        await writer.wait_closed()
    assert not [record for record in caplog.records if record.name != "asyncio"]


async def test_vms_listen_on_ports_in_a_row_on_loopback_alone() -> None:
    # Above those that `reserve` gives; as many tries as it takes to find two free ports.
    for first in itertools.count(32_100, 10):
        try:
            async with Simulator(PAIR, port=first) as sim:
                ports = {name: URL(url).port for name, url in sim.urls.items()}
                assert ports == {"vm-0": first, "vm-1": first + 1}
                assert {URL(url).host for url in sim.urls.values()} == {"127.0.0.1"}
                assert sim.is_loopback
                with pytest.raises(OSError, match=str(first)):
                    await Simulator(PAIR, port=first).__aenter__()
            return
        except OSError:
            continue


# --- the control API: what tests in any language drive the simulator with


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
