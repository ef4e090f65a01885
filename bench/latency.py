"""From poll returned to received: one event at a time, through the real command, on an otherwise idle machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import aio_pika
import orjson
from aiohttp import web

from bench.figures import Figure, percentiles
from relay.simulator import VM, Plan, Setup, Simulator
from tests.journey.relay_process import eventually, inbox, relay, webhook

EVENTS = 100


async def measure(amqp_url: str) -> list[Figure]:
    """Let events appear at odd moments; p50 and p99 from the answer that first held one to its arrival."""
    arrived: dict[str, dict[str, float]] = {"webhook": {}, "queue": {}}
    answered: dict[str, float] = {}
    exchange = "imds-relay.bench"
    async with (
        inbox() as box,
        Simulator(Setup(vms=(VM("vm-0"),))) as sim,
        asyncio.TaskGroup() as group,
    ):
        box.on_event = lambda event: _note(arrived["webhook"], event)
        front = await _front(sim, answered)
        consumer = group.create_task(_consume(amqp_url, exchange, arrived["queue"]))
        document = {
            "source": {"url": front.name},
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
                        lambda key=event.event_id: all(key in found for found in arrived.values())
                    )
                    sim.cancel(event)
                    await asyncio.sleep(0.7 + 0.3 * (number % 3))
                await process.stop()
        consumer.cancel()
        await front.cleanup()
    return [
        *percentiles(
            "poll returned to received by the webhook",
            _spans(answered, arrived["webhook"]),
            "under 20",
        ),
        *percentiles(
            "poll returned to consumed from the queue",
            _spans(answered, arrived["queue"]),
            "under 20",
        ),
    ]


class _Front(web.AppRunner):
    name = ""


async def _front(sim: Simulator, answered: dict[str, float]) -> _Front:
    """A window in front of the simulator that notes when an answer with an event had been written."""

    async def document(_: web.Request) -> web.StreamResponse:
        body = orjson.dumps(sim.scope.document())
        response = web.Response(body=body, content_type="application/json")
        keys = [event.event_id for event in sim.events if event.is_live]
        response_sent = time.perf_counter()
        for key in keys:
            answered.setdefault(key, response_sent)
        return response

    async def instance(_: web.Request) -> web.StreamResponse:
        return web.json_response({"compute": {"vmId": "bench", "name": "vm-0"}})

    application = web.Application()
    application.router.add_get("/metadata/scheduledevents", document)
    application.router.add_get("/metadata/instance", instance)
    runner = _Front(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    runner.name = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner


async def _consume(url: str, exchange: str, arrived: dict[str, float]) -> None:
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
                _note(arrived, orjson.loads(message.body))


def _note(arrived: dict[str, float], event: dict[str, Any]) -> None:
    if event["type"].endswith("event.scheduled.v1"):
        arrived.setdefault(event["subject"], time.perf_counter())


def _spans(begun: dict[str, float], ended: dict[str, float]) -> list[float]:
    return [ended[key] - begun[key] for key in begun if key in ended]
