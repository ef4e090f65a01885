"""Known clients without rights flood a relay over every way in. A program: its own process.

It reads an `Attack` as JSON from its standard input, sends all of it, and prints a `Report` as
JSON. So the measurements of the test do not share its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from pamqp.commands import Basic

from tests.journey.relay_process import signed_headers
from tests.raw_amqp import RawChannel

WORKERS = 32
STREAMS = 96
"""More than the relay allows."""
UNREAD = 128
"""Responses that stay open, and that nobody reads."""
MESSAGES_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakClient:
    """A client with a key and a secret, whose name is that of its RabbitMQ user."""

    name: str
    key: str
    secret: str
    amqp_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    port: int
    clients: list[WeakClient]
    event_id: str
    revision: str
    requests: int
    messages: int
    exchange: str
    routing_key: str


@dataclass(slots=True)
class Report:
    """What was sent, and the answers."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Of requests, by status, or how else they ended."""
    messages: int = 0
    streams: int = 0
    """The most that were open at once."""


class Flood:
    def __init__(self, attack: Attack) -> None:
        self._attack = attack
        self.report = Report()
        self._numbers = itertools.count()
        self._sent = 0
        self._progressed = asyncio.Event()
        self._open_streams = 0
        self._unread: deque[aiohttp.ClientResponse] = deque()

    def _session(self, **connector: Any) -> aiohttp.ClientSession:
        """Return a session that makes as many connections as it is asked for."""
        return aiohttp.ClientSession(
            f"http://127.0.0.1:{self._attack.port}",
            connector=aiohttp.TCPConnector(limit=0, **connector),
            timeout=aiohttp.ClientTimeout(total=30),
        )

    async def run(self) -> None:
        async with (
            self._session() as keeping,
            self._session(force_close=True) as closing,
            asyncio.TaskGroup() as group,
        ):
            streams = [
                group.create_task(self._keep_stream(closing, number)) for number in range(STREAMS)
            ]
            senders = [group.create_task(self._publish(client)) for client in self._attack.clients]
            for worker in range(WORKERS):
                session = keeping if worker % 2 == 0 else closing
                senders.append(group.create_task(self._work(session, worker % 8 in (0, 1))))
            await asyncio.wait(senders)
            for stream in streams:
                stream.cancel()

    async def _work(self, session: aiohttp.ClientSession, reads: bool) -> None:
        """Send requests.

        Every fourth worker reads: the relay lets it wait, and the others must not wait with it.
        """
        while (number := next(self._numbers)) < self._attack.requests:
            kind, path, headers, body = self._request(number, reads)
            method = "GET" if body is None else "POST"
            ended = "unread"
            try:
                response = await session.request(method, path, headers=headers, data=body)
                if kind == "unread":
                    self._unread.append(response)
                    if len(self._unread) > UNREAD:
                        self._unread.popleft().close()
                else:
                    await response.read()
                    ended = str(response.status)
            except (aiohttp.ClientError, TimeoutError) as error:
                ended = type(error).__name__
            self._sent += 1
            self._progressed.set()
            self.report.statuses[ended] += 1

    def _request(self, number: int, reads: bool) -> tuple[str, str, dict[str, str], bytes | None]:
        """Return the kind of a request, its path, its headers and its body."""
        attack = self._attack
        client = attack.clients[number % len(attack.clients)]
        vote = {"eventId": attack.event_id, "decision": "approve", "revision": attack.revision}
        kinds: tuple[tuple[str, str, dict[str, str] | None], ...] = (
            ("vote", "/v1/approvals", vote),
            ("hold", "/v1/approvals", {**vote, "decision": "hold"}),
            ("release", "/v1/approvals", {**vote, "decision": "release"}),
            ("unknown event", "/v1/approvals", {**vote, "eventId": f"none-{number}"}),
            ("no decision", "/v1/approvals", {"a": "b" * 60_000}),
            ("callback", f"/v1/callbacks/{client.name}", vote),
        )
        if reads:
            kinds = (
                ("events", "/v1/events", None),
                ("event", f"/v1/events/{attack.event_id}", None),
                ("deliveries", "/v1/deliveries?limit=500", None),
                ("unread", "/v1/deliveries?limit=500", None),
            )
        kind, path, decision = kinds[number // len(attack.clients) % len(kinds)]
        headers = {"Authorization": f"Bearer {client.key}", "Idempotency-Key": str(number)}
        if decision is None:
            return kind, path, headers, None
        body = orjson.dumps(decision)
        if kind == "callback":
            headers = signed_headers(body, client.secret, message_id=str(number))
        return kind, path, {**headers, "Content-Type": "application/json"}, body

    async def _keep_stream(self, session: aiohttp.ClientSession, number: int) -> None:
        """Keep an event stream open from the beginning of the journal. Every other is not read."""
        client = self._attack.clients[number % len(self._attack.clients)]
        headers = {"Authorization": f"Bearer {client.key}", "Last-Event-ID": "0"}
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get("/v1/stream", headers=headers) as response:
                    if response.status == 200:
                        await self._hold_stream(response, is_read=number // 8 % 2 == 0)
            await asyncio.sleep(0.5)

    async def _hold_stream(self, response: aiohttp.ClientResponse, *, is_read: bool) -> None:
        self._open_streams += 1
        self.report.streams = max(self.report.streams, self._open_streams)
        try:
            while is_read and await response.content.readany():
                pass
            if not is_read:
                await asyncio.sleep(30)
        finally:
            self._open_streams -= 1

    async def _publish(self, client: WeakClient) -> None:
        """Publish a share of the messages, as the requests progress."""
        attack = self._attack
        share = attack.messages // len(attack.clients)
        decisions = ("approve", "hold", "release")
        for start in range(0, share, MESSAGES_AT_ONCE):
            while self._sent < attack.requests * start // share:
                self._progressed.clear()
                await self._progressed.wait()
            ids = range(start, min(start + MESSAGES_AT_ONCE, share))
            decision = decisions[start // MESSAGES_AT_ONCE % len(decisions)]
            body = {"eventId": attack.event_id, "decision": decision, "revision": attack.revision}
            properties = [
                Basic.Properties(message_id=str(id_), user_id=client.name, delivery_mode=2)
                for id_ in ids
            ]
            async with RawChannel(client.amqp_url) as channel:
                await channel.publish_all(
                    attack.exchange, attack.routing_key, orjson.dumps(body), properties
                )
            self.report.messages += len(ids)


async def _main() -> None:
    fields = orjson.loads(sys.stdin.buffer.read())
    clients = [WeakClient(**client) for client in fields.pop("clients")]
    flood = Flood(Attack(clients=clients, **fields))
    await flood.run()
    sys.stdout.buffer.write(orjson.dumps(flood.report))


if __name__ == "__main__":
    asyncio.run(_main())
