"""The receivers of the relay and the raw loops: two HTTP endpoints and a queue."""

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
    """Yield the URL of an endpoint that accepts every POST.

    It runs in this process, so both the relay's figure and the raw one include its CPU time.
    """

    async def receive(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=204)

    application = web.Application()
    application.router.add_post("/", receive)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    # With a smaller backlog, some of many simultaneous connections wait a second.
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def hung_endpoint() -> AsyncIterator[str]:
    """Yield the URL of an endpoint that accepts every connection and never answers."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def bound_queue(amqp_url: str) -> AsyncIterator[AbstractQueue]:
    """Yield a queue with every message of the exchange, declared as the relay declares it."""
    connection = await aio_pika.connect(amqp_url)
    async with connection, connection.channel() as channel:
        arguments: dict[str, Any] = {"alternate-exchange": f"{EXCHANGE}.unrouted"}
        await channel.declare_exchange(
            EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True, arguments=arguments
        )
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(EXCHANGE, "#")
        yield queue
