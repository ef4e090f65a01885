"""The event loop of the tests leaves nothing behind that a later test would be blamed for."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from tests.conftest import DebugLoop

Stop = Callable[[], Awaitable[object]]


async def stream_server() -> tuple[int, Stop]:
    """Start a server whose handler never ends. Return its port and what stops it."""

    async def never_end(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()
        await asyncio.Event().wait()

    server = await asyncio.start_server(never_end, "127.0.0.1", 0)

    async def stop() -> None:
        server.close()

    return server.sockets[0].getsockname()[1], stop


async def aiohttp_server() -> tuple[int, Stop]:
    """Start a server of aiohttp. Return its port and what stops it."""
    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner.addresses[0][1], runner.cleanup


@pytest.mark.parametrize("turns", range(9))
@pytest.mark.parametrize("start", [stream_server, aiohttp_server])
def test_a_connection_that_comes_as_a_server_stops_is_closed(
    start: Callable[[], Awaitable[tuple[int, Stop]]], turns: int
) -> None:
    async def connect_and_stop() -> socket.socket:
        port, stop = await start()
        client = socket.create_connection(("127.0.0.1", port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await stop()
        return client

    gc.collect()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with asyncio.Runner(loop_factory=DebugLoop) as runner:
            client = runner.run(connect_and_stop())
        gc.collect()
    client.close()
    assert [str(warning.message) for warning in warned] == []
