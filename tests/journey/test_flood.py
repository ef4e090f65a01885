"""Thousands of hostile requests from thousands of addresses start nothing and break nothing.

`make chaos-tests` sends 100,000, `make test` 2,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.simulator import VM, Plan, Setup, Simulator
from tests.api.test_hostile import GET, MALFORMED
from tests.depth import depth
from tests.eventually import eventually
from tests.journey.relay_process import (
    CLIENT_SECRET,
    KEY,
    RelayProcess,
    client,
    relay,
    signed_headers,
)

REQUESTS = depth(100_000, 2_000)
WORKERS = 32
_log = logging.getLogger(__name__)
VOTE = {"name": "all", "approve": {"votes": 1, "from": ["client:honest", "client:drain"]}}
FORGED = "whsec_AfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
HONEST = "imdsr_bearer-test-key-of-the-honest"


def _post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    head = [
        f"POST {path} HTTP/1.1",
        "Host: relay",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    if not any(header.lower().startswith("content-type") for header in headers):
        head.append("Content-Type: application/json")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def _signed(body: bytes, secret: str = CLIENT_SECRET, *, ago: float = 0) -> list[str]:
    headers = signed_headers(body, secret, at=datetime.now(UTC) - timedelta(seconds=ago))
    return [f"{name}: {value}" for name, value in headers.items()]


def hostile_requests(vote: bytes, replayed: bytes) -> dict[str, bytes]:
    """Return requests that must be refused, by their fault.

    ``vote`` would start an event. ``replayed`` was sent before.
    """
    callback, approvals, bearer = (
        "/v1/callbacks/drain",
        "/v1/approvals",
        f"Authorization: Bearer {KEY}x",
    )
    return {
        "forged": _post(callback, vote, *_signed(vote, FORGED)),
        "stale": _post(callback, vote, *_signed(vote, ago=301)),
        "of the future": _post(callback, vote, *_signed(vote, ago=-120)),
        "signed for another body": _post(callback, vote, *_signed(replayed)),
        "of nobody": _post("/v1/callbacks/nobody", vote, *_signed(vote)),
        "replayed": replayed,
        "wrong key": _post(approvals, vote, bearer),
        "no key": _post(approvals, vote),
        "a token": _post(approvals, vote, "Authorization: Bearer eyJhbGciOiJub25lIn0.e30."),
        "truncated": _post(approvals, vote[:20], bearer, length=500),
        "oversized": _post(approvals, b"x", bearer, length=10**9),
        "gzip": _post(approvals, vote, bearer, "Content-Encoding: gzip"),
        "XML": _post(
            approvals,
            b"<!DOCTYPE a SYSTEM 'file:///etc/passwd'>",
            bearer,
            "Content-Type: application/xml",
        ),
        "UTF-16": _post(
            approvals,
            vote.decode().encode("utf-16"),
            bearer,
            "Content-Type: application/json; charset=utf-16",
        ),
        "no UTF-8": _post(approvals, b'{"eventId": "\xff\xfe"}', *_signed(b"{}")),
        "smuggled by length": _post(
            approvals,
            b"0\r\n\r\n" + _post(approvals, vote, bearer),
            bearer,
            "Transfer-Encoding: chunked",
        ),
        "another path": b"GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
        "switch": b"PUT /v1/approvals/mode HTTP/1.1\r\nHost: a\r\n"
        b"Content-Type: application/json\r\nContent-Length: 13\r\n\r\n"
        b'{"mode":"on"}',
        "GET that approves": b"GET /v1/approvals?decision=approve HTTP/1.1\r\nHost: a\r\n\r\n",
        **{name: malformed + GET + b"\r\n" for name, malformed in MALFORMED.items()},
    }


SLOW = b"POST /v1/approvals HTTP/1.1\r\nHost: a\r\nContent-Le"
"""The beginning of a request that never ends."""


class Flood:
    """Sends each hostile request from another address, and counts the answers by status."""

    def __init__(self, port: int, kinds: dict[str, bytes]) -> None:
        self.port = port
        self.kinds = list(kinds.items())
        self.statuses: Counter[int] = Counter()
        self.sent = itertools.count()
        self._slow: list[asyncio.StreamWriter] = []

    async def run(self, requests: int) -> None:
        last = next(self.sent) + requests
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work(last))

    async def _work(self, last: int) -> None:
        while (number := next(self.sent)) < last:
            address = f"127.{1 + number % 7}.{number // 7 % 250}.{1 + number // 1750 % 250}"
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(30):
                    await self._send(number, address)

    async def _send(self, number: int, address: str) -> None:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(address, 0)
        )
        if number % 200 == 0:
            writer.write(SLOW)
            self._slow.append(writer)  # the connection stays open
            return
        try:
            kind, request = self.kinds[number % len(self.kinds)]
            writer.write(request)
            if kind == "truncated":
                writer.write_eof()  # or the relay would wait for more
            answer = await reader.read(4096)
            status_line = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
            self.statuses[int(status_line[1]) if status_line else 0] += 1
        finally:
            writer.close()

    def close(self) -> None:
        for writer in self._slow:
            writer.close()


async def _approve(process: RelayProcess, vote: dict[str, Any]) -> tuple[int, float]:
    """Approve from another address; return status and seconds."""
    began = time.monotonic()
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(
            f"{process.url}/v1/approvals", json=vote, headers={"Authorization": f"Bearer {HONEST}"}
        ) as answer,
    ):
        await answer.read()
        return answer.status, time.monotonic() - began


@pytest.mark.timeout(900)
async def test_a_flood_starts_and_breaks_nothing_and_approvals_still_work(tmp_path: Path) -> None:
    clients = [client(secrets=[CLIENT_SECRET]), client("honest", key=HONEST)]
    async with Simulator(Setup(vms=(VM("vm-0"),))) as sim:
        document = {
            "source": {"url": sim.url},
            "approvals": {"rules": [VOTE], "tell_first": "0s"},
            "api": {"clients": clients},
        }
        async with relay(tmp_path, document) as process:
            await process.start()
            began = time.monotonic()
            event = sim.schedule(
                Plan(type="Reboot", resources=("vm-0",), lasts=None, starts_after=3600.0)
            )
            shown = await process.shown(event)
            vote = {"eventId": event.event_id, "decision": "approve", "revision": shown["revision"]}
            refused = orjson.dumps({**vote, "revision": "of yesterday"})
            replayed = _post("/v1/callbacks/drain", refused, *_signed(refused))
            flood = Flood(process.port, hostile_requests(orjson.dumps(vote), replayed))
            await flood.run(REQUESTS // 4)
            assert not sim.start_requests
            before = process.memory()
            flooding = asyncio.create_task(flood.run(REQUESTS * 3 // 4))
            answered_before = flood.statuses.total()
            await eventually(lambda: flood.statuses.total() > answered_before + 100, every=0.01)
            assert not flooding.done()
            status, seconds = await _approve(process, vote)
            await flooding
            flood.close()
            grown = (process.memory() - before) / 2**20
            _log.info(
                "statuses %s, memory %+.1f MiB, the approval took %.0f ms",
                dict(flood.statuses),
                grown,
                seconds * 1000,
            )
            assert (status, seconds < 10.0) == (202, True)
            await sim.wait_until_approved(event, within=60)
            assert len(sim.start_requests) == 1
            assert [each for each in flood.statuses if each >= 500 or 200 <= each < 300] == []
            assert sum(flood.statuses.values()) - flood.statuses[0] > REQUESTS * 0.7
            assert grown < 24
            assert await process.ready()
            assert await process.stop() == 0
            assert "Traceback" not in process.log
            # The log has at most a line for each of a thousand addresses a minute.
            assert process.log.count("\n") < 1024 * ((time.monotonic() - began) // 60 + 2) + 100
