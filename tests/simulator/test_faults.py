"""What goes wrong, how often, and how it looks to a client."""

from __future__ import annotations

import asyncio
import errno
from datetime import UTC, datetime, timedelta

import aiohttp
import orjson
import pytest

from relay.simulator import Fault, Plan, Simulator
from relay.simulator.azure import SimulatedAzure
from relay.simulator.setup import Kind
from tests.clocks import ManualClock
from tests.simulator.test_server import EVENTS, PAIR

T0 = datetime(2026, 1, 1, tzinfo=UTC)


async def ask(client: aiohttp.ClientSession, sim: Simulator, **more: float) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=more.get("total", 10))
    async with client.get(sim.url + EVENTS, allow_redirects=False, timeout=timeout) as response:
        return response.status, await response.read()


async def test_a_status_is_answered_as_often_as_asked(client: aiohttp.ClientSession) -> None:
    async with Simulator(PAIR) as sim:
        sim.add_fault(Fault(status=410, calls=2))
        assert [(await ask(client, sim))[0] for _ in range(3)] == [410, 410, 200]


@pytest.mark.parametrize(
    ("kind", "start", "stop"),
    [
        ("empty", b"", b""),
        ("truncated", b'{"DocumentIncarnation":2', b'Scheduled"'),
        ("malformed", b'{"DocumentIncarnation"=2', b"}]}"),
    ],
)
async def test_a_broken_body_comes_with_200(
    client: aiohttp.ClientSession, kind: Kind, start: bytes, stop: bytes
) -> None:
    async with Simulator(PAIR) as sim:
        sim.schedule(Plan(id="A", description="x" * 20))
        sim.add_fault(Fault(kind=kind))
        status, body = await ask(client, sim)
        assert status == 200
        assert body.startswith(start)
        assert not body or stop in body or kind == "truncated"
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(body)
        orjson.loads((await ask(client, sim))[1])


async def test_an_event_can_be_there_twice_and_differ(client: aiohttp.ClientSession) -> None:
    async with Simulator(PAIR) as sim:
        sim.schedule(Plan(id="A"))
        sim.add_fault(Fault(kind="duplicate", fields={"EventStatus": "Started"}))
        events = orjson.loads((await ask(client, sim))[1])["Events"]
        assert [event["EventId"] for event in events] == ["A", "A"]
        assert [event["EventStatus"] for event in events] == ["Scheduled", "Started"]


async def test_a_redirect_shows_whether_it_was_followed(client: aiohttp.ClientSession) -> None:
    async with Simulator(PAIR) as sim:
        sim.add_fault(Fault(kind="redirect"))
        sim.add_fault(Fault(kind="redirect", location="http://127.0.0.1:1/"))
        assert (await ask(client, sim))[0] == 302
        async with client.get(sim.url + EVENTS, allow_redirects=False) as response:
            assert response.headers["Location"] == "http://127.0.0.1:1/"
        sim.add_fault(Fault(kind="redirect"))
        async with client.get(sim.url + EVENTS) as response:
            assert response.status == 200
        assert "redirected=true" in sim.calls[-1].query


async def test_a_reset_breaks_the_connection_off(client: aiohttp.ClientSession) -> None:
    """Two in a row: aiohttp's client quietly tries a GET once more when its connection breaks."""
    async with Simulator(PAIR) as sim:
        sim.add_fault(Fault(kind="reset", calls=2))
        with pytest.raises(aiohttp.ClientOSError) as caught:
            await ask(client, sim)
        assert caught.value.errno == errno.ECONNRESET
        assert (sim.calls[-1].status, sim.calls[-1].fault) == (None, "reset")


async def test_a_hang_keeps_no_simulator_from_ending(client: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks, Simulator(PAIR) as sim:
        sim.add_fault(Fault(kind="hang", calls=2))

        async def hung() -> None:
            with pytest.raises(aiohttp.ClientError):
                await ask(client, sim)

        tasks.create_task(hung())
        await sim.wait_until(lambda: bool(sim.calls), within=60)


@pytest.mark.parametrize(("processed", "approved_by"), [(True, ("vm-0",)), (False, ())])
async def test_an_approval_whose_answer_is_lost_counts_only_if_it_was_processed(
    client: aiohttp.ClientSession, processed: bool, approved_by: tuple[str, ...]
) -> None:
    async with Simulator(PAIR) as sim:
        event = sim.schedule(Plan())
        sim.add_fault(Fault(status=503, on="approval", processed=processed))
        assert (await ask(client, sim))[0] == 200
        body = {"StartRequests": [{"EventId": event.event_id}]}
        async with client.post(sim.url + EVENTS, json=body) as response:
            assert response.status == 503
        assert sim.event(event).approved_by == approved_by
        assert sim.start_requests[0].event_ids == (event.event_id,)


def test_a_fault_is_over_at_its_time_or_after_its_calls_whichever_comes_first() -> None:
    clock = ManualClock(T0)
    azure = SimulatedAzure(clock=clock)
    azure.add_fault(Fault(lasts=70.0, calls=1))
    azure.add_fault(Fault(lasts=10.0, calls=5, status=503))
    azure.add_fault(Fault(lasts=70.0, status=429))
    taken = []
    for seconds in (0, 0, 9.9, 10, 69.9, 70):
        clock.set_wall_clock(T0 + timedelta(seconds=seconds))
        taken.append(azure.take_fault("document", "vm-0"))
    statuses = [fault.status if fault else None for fault in taken]
    assert statuses == [500, 503, 503, 429, 429, None]
    assert azure.faults == ()


def test_a_fault_waits_for_the_calls_that_it_is_meant_for() -> None:
    azure = SimulatedAzure()
    azure.add_fault(Fault(on="approval", vm="vm-1"))
    azure.add_fault(Fault(on="any", status=410))
    assert azure.take_fault("approval", "vm-0") == Fault(on="any", status=410)
    assert azure.take_fault("approval", "vm-0") is None
    assert azure.take_fault("document", "vm-1") is None
    assert azure.take_fault("approval", "vm-1") == Fault(on="approval", vm="vm-1")
