"""A relay as its users run it: the real command, a configuration file, signals and kills; and a receiver that checks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from standardwebhooks import Webhook

from tests.ports import reserve

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
KEY = "a-bearer-key-for-tests-only"


async def eventually(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]],
    *,
    within: float = 60.0,
    every: float = 0.02,
    what: str = "",
) -> None:
    """Wait until the condition holds. Fails where it takes too long."""
    async with asyncio.timeout(within) as limit:
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            assert limit.when() is not None, what
            await asyncio.sleep(every)


def name_of(event: dict[str, Any]) -> str:
    """``<family>.<change>``."""
    return str(event["type"]).removeprefix("io.imdsrelay.").removesuffix(".v1")


@dataclass(slots=True)
class Inbox:
    """A webhook receiver that verifies every signature with the reference library, and remembers what came, in order."""

    url: str = ""
    status: int = 204
    events: list[dict[str, Any]] = field(default_factory=list)
    forged: int = 0
    on_event: Callable[[dict[str, Any]], None] | None = None

    def types_of(self, event_id: str) -> list[str]:
        """The types that came about one event, repeats left out, in the order of arrival."""
        seen = {
            event["id"]: event["type"].split(".", 2)[2].removesuffix(".v1")
            for event in self.events
            if event.get("subject") == event_id
        }
        return list(seen.values())

    def by_subject(self) -> dict[str, list[dict[str, Any]]]:
        """What came, repeats left out, by EventId."""
        found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for event in self.events:
            found[event.get("subject", "")].setdefault(event["id"], event)
        return {subject: list(events.values()) for subject, events in found.items()}

    async def receive(self, request: web.Request) -> web.Response:
        """The handler."""
        body = await request.read()
        try:
            Webhook(SECRET).verify(body, dict(request.headers))
        except Exception:  # noqa: BLE001  # the library raises more than its own errors on bad headers
            self.forged += 1
            return web.Response(status=401)
        if self.status < 300:
            event = orjson.loads(body)
            self.events.append(event)
            if self.on_event is not None:
                self.on_event(event)
        return web.Response(status=self.status)


@asynccontextmanager
async def inbox(port: int = 0) -> AsyncIterator[Inbox]:
    """A receiver that listens."""
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
    """One relay in a directory of its own; it can be killed and started again on the same store."""

    directory: Path
    document: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    process: asyncio.subprocess.Process | None = None
    port: int = 0

    @property
    def store(self) -> Path:
        """The state file."""
        return self.directory / "relay.db"

    @property
    def log(self) -> str:
        """Everything that it wrote, over all its lives."""
        return (self.directory / "log").read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        """Where its API listens."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self, *, ready: bool = True) -> None:
        """Start it; wait until it is ready, unless told not to."""
        self.port = self.port or reserve(1)[0]
        document = {"store": {"path": str(self.store)}, "api": {}, **self.document}
        document["api"] = {"listen": f"127.0.0.1:{self.port}", **document["api"]}
        (self.directory / "relay.yaml").write_bytes(orjson.dumps(document))  # JSON is YAML
        with (self.directory / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.prefix,
                sys.executable,
                "-m",
                "relay",
                "run",
                "--config",
                str(self.directory / "relay.yaml"),
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )
        if ready:
            await eventually(self.ready)

    async def ready(self) -> bool:
        """Whether it says that it is ready. Fails when it has ended."""
        assert self.process is not None
        assert self.process.returncode is None, self.log
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{self.url}/readyz") as answer,
            ):
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def kill(self) -> None:
        """End it as a power cut would."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> int:
        """End it as systemd does; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(
            10 + 15
        ):  # that it takes ten at the most is promised; the rest is for a machine that stands still
            return await self.process.wait()

    async def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """One call to its API with the key; status and JSON."""
        sent = {"Authorization": f"Bearer {KEY}", **(headers or {})}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, json=body, headers=sent) as answer,
        ):
            text = await answer.read()
            return answer.status, orjson.loads(text) if text else None


@asynccontextmanager
async def relay(
    directory: Path, document: dict[str, Any], **options: Any
) -> AsyncIterator[RelayProcess]:
    """A relay that runs in this context; whatever happens, it is gone afterwards."""
    directory.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  # a test may wait for the disk
    process = RelayProcess(directory, document, **options)
    try:
        yield process
    finally:
        if process.process is not None:
            await process.kill()


def webhook(url: str, name: str = "drain", **more: Any) -> dict[str, Any]:
    """A webhook sink's section."""
    return {
        "kind": "webhook",
        "name": name,
        "url": url,
        "allow_http": True,
        "secrets": [SECRET],
        **more,
    }


def client(name: str = "drain", **more: Any) -> dict[str, Any]:
    """A client's section, with every right and the key of these tests."""
    return {"name": name, "key": KEY, "can": ["read", "approve", "hold", "operate"], **more}
