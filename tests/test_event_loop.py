"""The event loop of the tests leaves nothing behind that a later test would be blamed for."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

from tests.conftest import DebugLoop


def test_a_connection_that_is_accepted_at_the_end_is_closed_with_the_loop() -> None:
    loop = DebugLoop()
    accepted = asyncio.Event()
    listening = asyncio.start_server(lambda *_: accepted.set(), "127.0.0.1", 0)
    server = loop.run_until_complete(listening)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        loop.run_until_complete(accepted.wait())
        server.close()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loop.close()
            gc.collect()
        assert warned == []
        assert client.recv(1) == b""
