"""Measures the time from an answer of IMDS to the delivery of its event, one event at a time."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import aio_pika
import orjson
from aiohttp import web

from bench.figure import Figure, percentiles
from relay.simulator import VM, Plan, Setup, Simulator
from tests.journey.relay_process import eventually, inbox, relay, webhook

EVENTS = 100


async def measure(amqp_url: str) -> list[Figure]:
    """Schedule events at irregular times, and time each from the first answer that holds it."""
    received_at: dict[str, dict[str, float]] = {"webhook": {}, "queue": {}}
    answered_at: dict[str, float] = {}
    exchange = "imds-relay.bench"
    async with (
        inbox() as box,
        Simulator(Setup(vms=(VM("vm-0"),))) as sim,
        asyncio.TaskGroup() as group,
    ):
        box.on_event = lambda event: _note(received_at["webhook"], event)
        imds = await _start_timed_imds(sim, answered_at)
        consumer = group.create_task(_consume(amqp_url, exchange, received_at["queue"]))
        document = {
            "source": {"url": imds.url},
            "sinks": [
                {"kind": "rabbitmq", "name": "bus", "url": amqp_url, "exchange": exchange},
                webhook(box.url),
            ],
        }
        with tempfile.TemporaryDirectory() as directory:
            async with relay(Path(directory), document) as process:
                await process.start()
                await asyncio.sleep(3)
                for number in range(EVENTS):
                    event = sim.schedule(Plan(resources=("vm-0",), lasts=None))
                    await eventually(
                        lambda key=event.event_id: all(
                            key in times for times in received_at.values()
                        )
                    )
                    sim.cancel(event)
                    await asyncio.sleep(0.7 + 0.3 * (number % 3))
                await process.stop()
        consumer.cancel()
        await imds.cleanup()
    return [
        *percentiles(
            "poll returned to received by the webhook",
            _differences(answered_at, received_at["webhook"]),
            "under 20",
        ),
        *percentiles(
            "poll returned to consumed from the queue",
            _differences(answered_at, received_at["queue"]),
            "under 20",
        ),
    ]


class _Runner(web.AppRunner):
    url = ""


async def _start_timed_imds(sim: Simulator, answered_at: dict[str, float]) -> _Runner:
    """Serve the simulator's document, and note when an answer first held each event."""

    async def document(_: web.Request) -> web.StreamResponse:
        body = orjson.dumps(sim.document())
        response = web.Response(body=body, content_type="application/json")
        event_ids = [event.event_id for event in sim.events if event.is_live]
        now = time.perf_counter()
        for event_id in event_ids:
            answered_at.setdefault(event_id, now)
        return response

    async def instance(_: web.Request) -> web.StreamResponse:
        return web.json_response({"compute": {"vmId": "bench", "name": "vm-0"}})

    application = web.Application()
    application.router.add_get("/metadata/scheduledevents", document)
    application.router.add_get("/metadata/instance", instance)
    runner = _Runner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    runner.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner


async def _consume(url: str, exchange: str, received_at: dict[str, float]) -> None:
    connection = await aio_pika.connect(url)
    async with connection, connection.channel() as channel:
        await channel.declare_exchange(
            exchange,
            aio_pika.ExchangeType.TOPIC,
            durable=True,
            arguments={"alternate-exchange": f"{exchange}.unrouted"},
        )
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(exchange, "event.scheduled.#")
        async with queue.iterator(no_ack=True) as messages:
            async for message in messages:
                _note(received_at, orjson.loads(message.body))


def _note(received_at: dict[str, float], event: dict[str, Any]) -> None:
    if event["type"].endswith("event.scheduled.v1"):
        received_at.setdefault(event["subject"], time.perf_counter())


def _differences(starts: dict[str, float], ends: dict[str, float]) -> list[float]:
    return [ends[key] - starts[key] for key in starts if key in ends]
