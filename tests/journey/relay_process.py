"""Runs the relay as its users do: the real command, a configuration file, signals and kills.

It also has a webhook receiver that verifies signatures.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from standardwebhooks import Webhook

from relay.simulator import VM, Event, Setup, Simulator
from relay.store.journal import JournalRow
from tests.eventually import eventually
from tests.forked_relay import Process, start_relay
from tests.ports import reserve
from tests.store.open_store import read_journal

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
"""Signs what the relay sends to webhooks."""
CLIENT_SECRET = "whsec_BfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
"""Signs a client's callbacks."""
KEY = "a-bearer-key-for-tests-only"


async def after_polls(azure: Simulator, count: int = 2) -> None:
    """Wait until the relay has polled so often again: it had time for what it must not do."""
    moment = azure.calls[-1].at
    await eventually(
        lambda: sum(call.at > moment and call.method == "GET" for call in azure.calls) >= count
    )


async def call_api(
    method: str, url: str, body: Any = None, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, Any]:
    """Call the API of a relay with the test key. Return the status and the JSON body."""
    all_headers = {"Authorization": f"Bearer {KEY}", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body, headers=all_headers) as response,
    ):
        text = await response.read()
        return response.status, orjson.loads(text) if text else None


def name_of(event: dict[str, Any]) -> str:
    """Return the short type of an event: ``<family>.<change>``."""
    return str(event["type"]).removeprefix("io.imdsrelay.").removesuffix(".v1")


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class Inbox:
    """A webhook receiver that verifies signatures with the reference library.

    It keeps every valid event in the order of arrival.
    """

    url: str = ""
    status: int = 204
    may_answer: asyncio.Event = field(default_factory=_set_event)
    """A test that clears it keeps the answers back."""
    events: list[dict[str, Any]] = field(default_factory=list)
    forged: int = 0
    on_event: Callable[[dict[str, Any]], None] | None = None
    headers: list[Mapping[str, str]] = field(default_factory=list)
    """Those of each event that arrived."""

    def types_of(self, event_id: str) -> list[str]:
        """Return the types of the events about an EventId, in order of arrival, each once."""
        seen = {
            event["id"]: name_of(event) for event in self.events if event.get("subject") == event_id
        }
        return list(seen.values())

    def by_subject(self) -> dict[str, list[dict[str, Any]]]:
        """Return the events that arrived by EventId, without repeats."""
        received: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for event in self.events:
            received[event.get("subject", "")].setdefault(event["id"], event)
        return {subject: list(events.values()) for subject, events in received.items()}

    async def receive(self, request: web.Request) -> web.Response:
        """Answer 401 to a forged request; otherwise keep the event and answer ``status``."""
        body = await request.read()
        try:
            Webhook(SECRET).verify(body, dict(request.headers))
        except Exception:  # noqa: BLE001  # the library raises more than its own errors on bad headers
            self.forged += 1
            return web.Response(status=401)
        status = self.status  # a test may change it while the answer waits
        if status < 300:
            event = orjson.loads(body)
            self.events.append(event)
            self.headers.append(dict(request.headers))
            if self.on_event is not None:
                self.on_event(event)
        await self.may_answer.wait()
        return web.Response(status=status)


@asynccontextmanager
async def inbox(port: int = 0) -> AsyncIterator[Inbox]:
    box = Inbox()
    application = web.Application()
    application.router.add_post("/", box.receive)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    box.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        yield box
    finally:
        await runner.cleanup()


@dataclass(slots=True)
class RelayProcess:
    """A relay in its own directory. A test can kill it and start it again on the same store."""

    directory: Path
    document: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    process: Process | None = None
    port: int = 0

    @property
    def store(self) -> Path:
        return Path(self.document.get("store", {}).get("path", self.directory / "relay.db"))

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, *, ready: bool = True) -> None:
        """Start the relay. Wait until it is ready if ``ready`` is true."""
        self.port = self.port or reserve(1)[0]
        self.write_document()
        (self.directory / "log").touch()  # a fork opens it a moment later
        self.process = await start_relay(
            *("run", "--config", str(self.directory / "relay.yaml")),
            environment={**os.environ, **self.environment},
            prefix=self.prefix,
            output=self.directory / "log",
        )
        if ready:
            await eventually(self.ready)

    def write_document(self) -> None:
        """Write the configuration file as `document` says now."""
        document = {"store": {"path": str(self.store)}, "api": {}, **self.document}
        document["api"] = {"listen": f"127.0.0.1:{self.port}", **document["api"]}
        (self.directory / "relay.yaml").write_bytes(orjson.dumps(document))  # JSON is YAML

    async def ready(self) -> bool:
        """Return whether /readyz answers 200. Fails if the process has ended."""
        assert self.process is not None
        assert self.process.returncode is None, self.log
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{self.url}/readyz") as response,
            ):
                return response.status == 200
        except aiohttp.ClientError:
            return False

    def hang_up(self) -> None:
        """Send SIGHUP: the relay reads its configuration again."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> int:
        """End the process with SIGTERM, as systemd does. Return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        # The relay promises to end within 10 s. The other 15 s are for a machine that stalls.
        async with asyncio.timeout(10 + 15):
            return await self.process.wait()

    async def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        return await call_api(method, self.url + path, body, headers or {})

    async def shown(self, event: Event, state: str | None = None) -> dict[str, Any]:
        """Return the event as the API shows it, once the relay knows it, and in this state."""
        shown: dict[str, Any] = {}

        async def is_shown() -> bool:
            status, body = await self.call("GET", f"/v1/events/{event.event_id}")
            shown.update(body if status == 200 else {})
            return status == 200 and state in (None, body["approval"]["state"])

        await eventually(is_shown, every=0.2)  # the API allows a client ten calls a second
        return shown

    async def approve(self, event: Event) -> tuple[int, Any]:
        """Vote for the event as the API shows it. Return the status and the JSON body."""
        revision = (await self.shown(event))["revision"]
        vote = {"eventId": event.event_id, "decision": "approve", "revision": revision}
        return await self.call("POST", "/v1/approvals", vote)

    def journal(self) -> list[JournalRow]:
        """Verify the journal on disk and return its rows."""
        return read_journal(self.store)

    def memory(self) -> int:
        """Return how many bytes of memory the process has."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert resident is not None
        return int(resident[1]) * 1024


@asynccontextmanager
async def relay(
    directory: Path, document: dict[str, Any], **options: Any
) -> AsyncIterator[RelayProcess]:
    """Make a relay in a directory. The process is killed at the end if it still runs."""
    directory.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  # a test may wait for the disk
    process = RelayProcess(directory, document, **options)
    try:
        yield process
    finally:
        if process.process is not None:
            await process.kill()


@asynccontextmanager
async def told_relay(
    directory: Path, *, machines: Sequence[str] = ("vm-0",), **document: Any
) -> AsyncIterator[tuple[Inbox, Simulator, RelayProcess]]:
    """Start a relay with a receiver and a simulated Azure; ``document`` are more sections."""
    async with inbox() as receiver, Simulator(Setup(vms=tuple(map(VM, machines)))) as sim:
        usual = {
            "source": {"url": sim.url, "interval": "500ms"},
            "sinks": [webhook(receiver.url)],
            "api": {"clients": [client(secrets=[CLIENT_SECRET])]},
        }
        async with relay(directory, usual | document) as process:
            await process.start()
            yield receiver, sim, process


def webhook(url: str, name: str = "drain", **more: Any) -> dict[str, Any]:
    return {
        "kind": "webhook",
        "name": name,
        "url": url,
        "allow_http": True,
        "secrets": [SECRET],
        **more,
    }


def rabbitmq(url: str, exchange: str) -> dict[str, Any]:
    return {"kind": "rabbitmq", "name": "bus", "url": url, "exchange": exchange}


def signed_headers(
    body: bytes,
    secret: str = CLIENT_SECRET,
    *,
    message_id: str = "msg_1",
    at: datetime | None = None,
) -> dict[str, str]:
    """Return the headers with which the reference library signs a callback, now or ``at``."""
    moment = at or datetime.now(UTC)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(moment.timestamp())),
        "webhook-signature": Webhook(secret).sign(message_id, moment, body.decode()),
    }


def client(name: str = "drain", **more: Any) -> dict[str, Any]:
    """Return the configuration section of a client with every right and the test key."""
    return {"name": name, "key": KEY, "can": ["read", "approve", "hold", "operate"], **more}
