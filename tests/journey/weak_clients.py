"""Known clients without rights flood a relay over every way in. A program: its own process.

It reads an `Attack` as JSON from its standard input, sends all of it, and prints a `Report` as
JSON. So the measurements of the test do not share its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import sys
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson
from pamqp.commands import Basic
from standardwebhooks import Webhook

from tests.raw_amqp import RawChannel

WORKERS = 32
STREAMS = 96
"""More than the relay allows."""
UNREAD = 128
"""Connections that stay open, and whose response nobody reads."""
MESSAGES_AT_ONCE = 500
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_LENGTH = re.compile(rb"Content-Length: (\d+)")


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

    statuses: dict[str, int] = field(default_factory=dict)
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
        self._unread: deque[asyncio.StreamWriter] = deque()
        self._signers = {client.name: Webhook(client.secret) for client in attack.clients}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(self._keep_stream(number)) for number in range(STREAMS)]
            senders = [group.create_task(self._publish(client)) for client in self._attack.clients]
            senders += [group.create_task(self._work(number)) for number in range(WORKERS)]
            await asyncio.wait(senders)
            for stream in streams:
                stream.cancel()
        for writer in self._unread:
            writer.close()

    # --- HTTP

    async def _work(self, worker: int) -> None:
        """Send requests, half of the workers on one connection each while the relay keeps it.

        Every fourth worker reads: the relay lets it wait, and the others must not wait with it.
        """
        keeps, reads = worker % 2 == 0, worker % 8 in (0, 1)
        connection = None
        while (number := next(self._numbers)) < self._attack.requests:
            kind, request = self._request(number, reads=reads)
            ended = "no answer"
            try:
                async with asyncio.timeout(30):
                    connection = connection or await self._connect()
                    connection[1].write(request)
                    if kind == "unread":
                        self._leave_unread(connection[1])
                        connection, ended = None, "unread"
                    else:
                        ended, stays = await _read_answer(connection[0])
                        if not (keeps and stays):
                            connection[1].close()
                            connection = None
            except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
                if connection is not None:
                    connection[1].close()
                    connection = None
                ended = type(error).__name__
            self._sent += 1
            self._progressed.set()
            self.report.statuses[ended] = self.report.statuses.get(ended, 0) + 1
        if connection is not None:
            connection[1].close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._attack.port)

    def _leave_unread(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a socket's
        self._unread.append(writer)
        if len(self._unread) > UNREAD:
            self._unread.popleft().close()

    def _request(self, number: int, *, reads: bool) -> tuple[str, bytes]:
        attack = self._attack
        client = attack.clients[number % len(attack.clients)]
        vote = {"eventId": attack.event_id, "decision": "approve", "revision": attack.revision}
        decisions = (
            ("vote", "/v1/approvals", vote),
            ("hold", "/v1/approvals", {**vote, "decision": "hold"}),
            ("release", "/v1/approvals", {**vote, "decision": "release"}),
            ("unknown event", "/v1/approvals", {**vote, "eventId": f"none-{number}"}),
            ("no decision", "/v1/approvals", {"a": "b" * 60_000}),
            ("callback", f"/v1/callbacks/{client.name}", vote),
        )
        pages = (
            ("events", "/v1/events", None),
            ("event", f"/v1/events/{attack.event_id}", None),
            ("deliveries", "/v1/deliveries?limit=500", None),
            ("unread", "/v1/deliveries?limit=500", None),
        )
        kinds = pages if reads else decisions
        kind, path, body = kinds[number // len(attack.clients) % len(kinds)]
        fields = [f"Authorization: Bearer {client.key}", f"Idempotency-Key: {number}"]
        content = b"" if body is None else orjson.dumps(body)
        if kind == "callback":
            moment = datetime.now(UTC)
            signature = self._signers[client.name].sign(str(number), moment, content.decode())
            fields = [
                f"webhook-id: {number}",
                f"webhook-timestamp: {int(moment.timestamp())}",
                f"webhook-signature: {signature}",
            ]
        return kind, _request_bytes(path, fields, content)

    async def _keep_stream(self, number: int) -> None:
        """Keep an event stream open from the beginning of the journal. Every other is not read."""
        client = self._attack.clients[number % len(self._attack.clients)]
        fields = [f"Authorization: Bearer {client.key}", "Last-Event-ID: 0"]
        while True:
            with contextlib.suppress(OSError, EOFError):
                reader, writer = await self._connect()
                try:
                    writer.write(_request_bytes("/v1/stream", fields, b""))
                    head = await reader.readuntil(b"\r\n\r\n")
                    if b" 200 " in head:
                        await self._hold_stream(reader, is_read=number // 8 % 2 == 0)
                finally:
                    writer.close()
            await asyncio.sleep(0.5)

    async def _hold_stream(self, reader: asyncio.StreamReader, *, is_read: bool) -> None:
        self._open_streams += 1
        self.report.streams = max(self.report.streams, self._open_streams)
        try:
            while is_read and await reader.read(65536):
                pass
            if not is_read:
                await asyncio.sleep(30)
        finally:
            self._open_streams -= 1

    # --- AMQP

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
            body = {
                "eventId": attack.event_id,
                "decision": decision,
                "revision": attack.revision,
            }
            properties = [
                Basic.Properties(message_id=str(id_), user_id=client.name, delivery_mode=2)
                for id_ in ids
            ]
            async with RawChannel(client.amqp_url) as channel:
                await channel.publish_all(
                    attack.exchange, attack.routing_key, orjson.dumps(body), properties
                )
            self.report.messages += len(ids)


def _request_bytes(path: str, fields: list[str], content: bytes) -> bytes:
    method = "POST" if content else "GET"
    head = [f"{method} {path} HTTP/1.1", "Host: relay.example.com", *fields]
    if content:
        head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*head, "", ""]).encode() + content


async def _read_answer(reader: asyncio.StreamReader) -> tuple[str, bool]:
    """Return the status, and whether the connection stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, length = _STATUS.match(head), _LENGTH.search(head)
    if status is None or length is None:
        return "no HTTP", False
    await reader.readexactly(int(length[1]))
    return status[1].decode(), b"Connection: close" not in head


async def _main() -> None:
    fields = orjson.loads(sys.stdin.buffer.read())
    clients = [WeakClient(**client) for client in fields.pop("clients")]
    flood = Flood(Attack(clients=clients, **fields))
    await flood.run()
    sys.stdout.buffer.write(orjson.dumps(flood.report))


if __name__ == "__main__":
    asyncio.run(_main())
