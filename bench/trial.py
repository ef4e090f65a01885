"""One trial: a metadata endpoint, a receiver, and between them the relay or the bare outbox.

The relay runs as its users run it: the command `run` with a configuration file.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from bench import EXCHANGE
from bench.bare_outbox import Configuration
from bench.imds import MetadataEndpoint, metadata_endpoint, not_before, scheduled_events
from bench.receiver import Receiver, receiver
from tests.journey.relay_process import relay as relay_process
from tests.journey.relay_process import webhook

SenderName = Literal["relay", "bare outbox"]
WARM_UP_EVENTS = 20
TIMEOUT = 120.0
"""Seconds in which a sender must start, or deliver what it was told."""
SHOWN = 50
"""Events of before that a document goes on to show."""

_runs = itertools.count(os.getpid())


@dataclass(frozen=True, slots=True)
class Sender:
    """The relay or the bare outbox, in a process of its own."""

    name: SenderName
    pid: int


def next_run() -> int:
    return next(_runs) % 0x10000


@dataclass(slots=True)
class Trial:
    endpoint: MetadataEndpoint
    receiver: Receiver
    sender: Sender
    targets: int
    run: int = 0
    _number: int = 0
    _due: str = ""

    async def warm_up(self) -> None:
        """Return when some events have reached every target, and a poll waits."""
        await self.begin()
        self.tell(WARM_UP_EVENTS)
        await self.received(WARM_UP_EVENTS)
        await self.endpoint.poll_waits()
        self.endpoint.tell([])
        await asyncio.sleep(0.3)
        await self.endpoint.poll_waits()

    async def begin(self) -> None:
        """Begin a run: events get new EventIds, and the receiver forgets those of before."""
        self.run, self._number, self._due = next_run(), 0, not_before()
        await self.receiver.call("begin", self.run)
        await self.endpoint.poll_waits()

    def tell(self, count: int, *, keep: int = 0) -> int:
        """Show so many new events beside the last ``keep`` ones. Return the time in nanoseconds."""
        kept = range(max(0, self._number - keep), self._number)
        new = range(self._number, self._number + count)
        self._number += count
        return self.endpoint.tell(scheduled_events(self.run, [*kept, *new], self._due))

    async def received(self, events: int) -> None:
        """Wait until so many events have arrived at each target. Raises if they do not."""
        wanted = events * self.targets
        arrived = await self.receiver.call("wait", wanted, TIMEOUT)
        if arrived < wanted:
            raise RuntimeError(f"expected {wanted} deliveries within {TIMEOUT:g} s, got {arrived}")


@asynccontextmanager
async def trial(
    sender: SenderName, endpoints: int, *, amqp_url: str | None = None, interval: str = "500ms"
) -> AsyncIterator[Trial]:
    """Yield a trial whose sender delivers to so many HTTP endpoints, or to the broker.

    The sender has delivered some events before.
    """
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        endpoint = await stack.enter_async_context(metadata_endpoint())
        target = await stack.enter_async_context(receiver(endpoints, amqp_url))
        configuration = Configuration(
            source=endpoint.url,
            path=str(Path(directory, "bare.db")),
            endpoints=target.urls,
            amqp_url=amqp_url,
        )
        started = _relay(configuration, interval) if sender == "relay" else _bare(configuration)
        process = await stack.enter_async_context(started)
        made = Trial(endpoint, target, process, endpoints or 1)
        await made.warm_up()
        yield made


def _sinks(urls: Sequence[str], amqp_url: str | None) -> list[dict[str, Any]]:
    events = {"events": ["event.scheduled"]}
    if amqp_url is not None:
        return [
            {"kind": "rabbitmq", "name": "bus", "url": amqp_url, "exchange": EXCHANGE, **events}
        ]
    return [webhook(url, f"hook-{number}", **events) for number, url in enumerate(urls)]


@asynccontextmanager
async def _relay(configuration: Configuration, interval: str) -> AsyncIterator[Sender]:
    document = {
        "scope": "bench",
        "relay": "vm-0",
        "source": {"url": configuration.source, "interval": interval},
        "sinks": _sinks(configuration.endpoints, configuration.amqp_url),
    }
    async with relay_process(Path(configuration.path).parent, document) as relay:
        await relay.start()
        assert relay.process is not None  # noqa: S101  # it was started
        yield Sender("relay", relay.process.pid)


@asynccontextmanager
async def _bare(configuration: Configuration) -> AsyncIterator[Sender]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.bare_outbox", orjson.dumps(asdict(configuration)).decode()
    )
    try:
        yield Sender("bare outbox", process.pid)
    finally:
        process.kill()
        await process.wait()
