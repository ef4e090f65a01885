"""What both the relay and the raw loops send to: an endpoint that takes everything, one that hangs, a queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aio_pika
from aio_pika.abc import AbstractQueue
from aiohttp import web

EXCHANGE = "imds-relay.bench"


@asynccontextmanager
async def endpoint() -> AsyncIterator[str]:
    """Takes every POST. It runs in this process, so that its share of the CPU is in the relay's figure and in the raw one."""

    async def receive(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=204)

    application = web.Application()
    application.router.add_post("/", receive)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(
        runner, "127.0.0.1", 0, backlog=1024
    ).start()  # with less, some of many that connect at once wait a second
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def hung_endpoint() -> AsyncIterator[str]:
    """Takes every connection and never answers."""
    kept: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: kept.append(writer), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()
        for writer in kept:
            writer.transport.abort()


@asynccontextmanager
async def queue(amqp_url: str) -> AsyncIterator[AbstractQueue]:
    """A queue that gets everything on the exchange, which is made as the relay makes it."""
    connection = await aio_pika.connect(amqp_url)
    async with connection, connection.channel() as channel:
        arguments: dict[str, Any] = {"alternate-exchange": f"{EXCHANGE}.unrouted"}
        await channel.declare_exchange(
            EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True, arguments=arguments
        )
        bound = await channel.declare_queue(exclusive=True)
        await bound.bind(EXCHANGE, "#")
        yield bound
