"""The receiver counts what arrived, and the metadata endpoint tells a change at once."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import orjson

from bench.bare_outbox import client_session, post_signed
from bench.imds import event_id, metadata_endpoint, scheduled_events
from bench.receiver import receiver


def body(run: int, number: int) -> bytes:
    """A request's body, as far as the receiver reads it."""
    return orjson.dumps({"subject": event_id(run, number)})


async def test_a_receiver_counts_first_arrivals_repeats_and_forgeries() -> None:
    async with receiver(2) as target, client_session() as session:
        await target.begin(7)
        before = time.monotonic_ns()
        for number in (0, 1, 1):
            await post_signed(session, target.urls[0], f"id-{number}", body(7, number))
        await post_signed(session, target.urls[1], "id-0", body(7, 0))
        await post_signed(session, target.urls[1], "id-0", body(8, 0))  # of another run
        async with session.post(target.urls[1], data=body(7, 5)) as unsigned:
            assert unsigned.status == 204
        assert await target.wait(4, 10) == 4
        assert await target.wait(2, 10, ignored=0) == 2
        arrivals = await target.arrivals()
    assert {(endpoint, number) for endpoint, number, _ in arrivals["first"]} == {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 5),
    }
    assert all(before < moment < time.monotonic_ns() for *_, moment in arrivals["first"])
    assert (arrivals["repeats"], arrivals["forged"]) == (1, 1)


async def test_an_endpoint_of_the_receiver_can_hang() -> None:
    async with receiver(2) as target, client_session() as session:
        await target.begin(1)
        await target.delay(0, 30.0)
        hanging = asyncio.create_task(post_signed(session, target.urls[0], "a", body(1, 0)))
        await post_signed(session, target.urls[1], "a", body(1, 0))
        assert await target.wait(2, 10) == 2, "the request is noted although no answer comes"
        assert not hanging.done()
        hanging.cancel()
        await asyncio.wait([hanging])


async def test_a_wait_ends_when_its_time_is_over() -> None:
    async with receiver(1) as target:
        await target.begin(1)
        assert await target.wait(1, 0.05) == 0


async def test_a_poll_is_held_until_something_has_changed() -> None:
    async with metadata_endpoint() as endpoint, aiohttp.ClientSession() as session:

        async def poll() -> list[str]:
            async with session.get(f"{endpoint.url}/metadata/scheduledevents") as response:
                return [event["EventId"] for event in (await response.json())["Events"]]

        assert await poll() == []
        held = asyncio.create_task(poll())
        await endpoint.poll_waits()
        assert not held.done()
        endpoint.tell(scheduled_events(1, [3], "Mon, 01 Jan 2029 00:00:00 GMT"))
        assert await held == [event_id(1, 3)]
