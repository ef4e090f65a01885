"""One trial: a metadata endpoint, a receiver, and between them the relay or the bare outbox.

The relay runs as its users run it: the command `run` with a configuration file.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from bench import EXCHANGE, SECRET
from bench.bare_outbox import Configuration
from bench.imds import MetadataEndpoint, metadata_endpoint, not_before, scheduled_events
from bench.receiver import Receiver, receiver
from tests.journey.relay_process import RelayProcess
from tests.journey.relay_process import relay as relay_process

SenderName = Literal["relay", "bare outbox"]
WARM_UP_EVENTS = 20
TIMEOUT = 120.0
"""Seconds in which a sender must start, or deliver what it was told."""
RECORDED_POLL = 0.005
"""Seconds between two looks at the file."""
SHOWN = 50
"""Events of before that a document goes on to show."""

_runs = itertools.count(os.getpid())


class Sender(Protocol):
    """The relay or the bare outbox, in a process of its own."""

    @property
    def pid(self) -> int:
        """The process."""

    @property
    def file(self) -> Path:
        """The SQLite file that holds what was recorded."""

    @property
    def table(self) -> str:
        """The table of that file with a row for each event."""


@dataclass(slots=True)
class RelaySender:
    """The relay."""

    process: RelayProcess
    table = "journal"

    @property
    def pid(self) -> int:
        """The process."""
        assert self.process.process is not None  # noqa: S101  # it was started
        return self.process.process.pid

    @property
    def file(self) -> Path:
        """The state file."""
        return self.process.store


@dataclass(frozen=True, slots=True)
class BareSender:
    """The bare outbox."""

    process: asyncio.subprocess.Process
    file: Path
    table = "event"

    @property
    def pid(self) -> int:
        """The process."""
        return self.process.pid


def next_run() -> int:
    """Return the number of a new run."""
    return next(_runs) % 0x10000


@dataclass(slots=True)
class Trial:
    """What a measurement uses."""

    endpoint: MetadataEndpoint
    receiver: Receiver
    sender: Sender
    targets: int
    run: int = 0
    started_after: float = 0.0
    """Seconds until the sender was ready."""
    _number: int = 0
    _due: str = ""

    async def warm_up(self) -> None:
        """Return when some events have reached every target, and a poll waits."""
        await self.begin()
        self.tell(WARM_UP_EVENTS)
        await self.received(WARM_UP_EVENTS)
        await self.clear()

    async def begin(self) -> None:
        """Begin a run: events get new EventIds, and the receiver forgets those of before."""
        self.run, self._number, self._due = next_run(), 0, not_before()
        await self.receiver.begin(self.run)
        await self.endpoint.poll_waits()

    def tell(self, count: int, *, keep: int = 0) -> int:
        """Show so many new events beside the last ``keep`` ones. Return the time in nanoseconds."""
        kept = range(max(0, self._number - keep), self._number)
        new = range(self._number, self._number + count)
        self._number += count
        return self.endpoint.tell(scheduled_events(self.run, [*kept, *new], self._due))

    async def clear(self) -> None:
        """Show no event any more, and wait until their end was recorded."""
        await self.endpoint.poll_waits()
        self.endpoint.tell([])
        await asyncio.sleep(0.3)
        await self.endpoint.poll_waits()

    async def received(self, events: int, *, ignored: int | None = None) -> None:
        """Wait until so many events have arrived at each target. Raises if they do not."""
        wanted = events * (self.targets - (ignored is not None))
        arrived = await self.receiver.wait(wanted, TIMEOUT, ignored)
        if arrived < wanted:
            raise RuntimeError(f"expected {wanted} deliveries within {TIMEOUT:g} s, got {arrived}")

    def last_position(self) -> int:
        """Return the position of the last recorded row; 0 if there is none."""
        with contextlib.closing(
            sqlite3.connect(f"{self.sender.file.as_uri()}?mode=ro", uri=True)
        ) as connection:
            row = connection.execute(f"SELECT max(rowid) FROM {self.sender.table}").fetchone()  # noqa: S608  # our own text
        return int(row[0] or 0)

    async def recorded(self, position: int) -> None:
        """Wait until the row at a position is on disk."""
        async with asyncio.timeout(TIMEOUT):
            while self.last_position() < position:  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(RECORDED_POLL)


@asynccontextmanager
async def trial(
    sender: SenderName,
    endpoints: int,
    *,
    amqp_url: str | None = None,
    folder: Path | None = None,
    backlog_of: int | None = None,
    interval: str = "500ms",
) -> AsyncIterator[Trial]:
    """Yield a trial whose sender delivers to so many HTTP endpoints, or to the broker.

    The sender has delivered some events before, except with ``backlog_of``: ``folder`` then holds
    a state file with events of that run that wait.
    """
    async with AsyncExitStack() as stack:
        directory = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint = await stack.enter_async_context(metadata_endpoint())
        target = await stack.enter_async_context(receiver(endpoints, amqp_url))
        start = _start_relay if sender == "relay" else _start_bare_outbox
        if backlog_of is not None:
            await target.begin(backlog_of)
        sinks = _sinks(target.urls, amqp_url)
        configuration = Configuration(
            source=endpoint.url,
            path=str(directory / "bare.db"),
            endpoints=target.urls,
            amqp_url=amqp_url,
        )
        began = time.monotonic()
        process = await stack.enter_async_context(start(directory, configuration, sinks, interval))
        made = Trial(endpoint, target, process, endpoints or 1)
        made.started_after = time.monotonic() - began
        if backlog_of is None:
            await made.warm_up()
        yield made


def _sinks(urls: Sequence[str], amqp_url: str | None) -> list[dict[str, Any]]:
    events = {"events": ["event.scheduled"]}
    if amqp_url is not None:
        return [
            {"kind": "rabbitmq", "name": "bus", "url": amqp_url, "exchange": EXCHANGE, **events}
        ]
    return [webhook(url, f"hook-{number}", **events) for number, url in enumerate(urls)]


def webhook(url: str, name: str, **more: Any) -> dict[str, Any]:
    """Return the section of a webhook."""
    return {
        "kind": "webhook",
        "name": name,
        "url": url,
        "allow_http": True,
        "secrets": [SECRET],
        **more,
    }


@asynccontextmanager
async def _start_relay(
    directory: Path, configuration: Configuration, sinks: list[dict[str, Any]], interval: str
) -> AsyncIterator[Sender]:
    document = {
        "scope": "bench",
        "relay": "vm-0",
        "source": {"url": configuration.source, "interval": interval},
        "sinks": sinks,
    }
    async with relay_process(directory, document) as process:
        await process.start()
        yield RelaySender(process)


@asynccontextmanager
async def _start_bare_outbox(
    directory: Path, configuration: Configuration, _: list[dict[str, Any]], __: str
) -> AsyncIterator[Sender]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.bare_outbox", orjson.dumps(asdict(configuration)).decode()
    )
    try:
        yield BareSender(process, directory / "bare.db")
    finally:
        process.kill()
        await process.wait()
