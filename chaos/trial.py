"""One trial: a relay as a process, its far sides, and a load. Faults act on it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aio_pika
import orjson
from aio_pika.abc import AbstractIncomingMessage

from chaos.judge import Counts, events_to_deliver, judge, read_journal
from chaos.load import CLIENTS, RULE, Load
from relay.simulator import VM, Setup, Simulator
from tests.counting_proxy import CountingProxy, counting_proxy
from tests.eventually import eventually
from tests.journey.bus import declare_service_queue, unused_exchange
from tests.journey.relay_process import Inbox, RelayProcess, client, inbox, relay, webhook
from tests.rabbitmq import Broker

SETTLE_TIMEOUT = 180.0
"""Seconds in which all must have arrived after the last fault."""


@dataclass(slots=True)
class Queue:
    """A durable queue that a service reads after the trial."""

    broker: Broker
    exchange: str
    events: list[dict[str, Any]] = field(default_factory=list)

    async def declare(self) -> None:
        """Make the queue before anything is published."""
        async with await aio_pika.connect(self.broker.amqp_url()) as connection:
            channel = await connection.channel()
            await declare_service_queue(channel, self.exchange, "#")

    @asynccontextmanager
    async def consuming(self) -> AsyncIterator[None]:
        async with await aio_pika.connect(self.broker.amqp_url()) as connection:
            channel = await connection.channel()
            queue = await channel.get_queue(f"{self.exchange}.service")
            await queue.consume(self._take, no_ack=True)
            yield

    async def _take(self, message: AbstractIncomingMessage) -> None:
        self.events.append(orjson.loads(message.body))


@dataclass(slots=True, kw_only=True)
class Wiring:
    """What a fault puts between the relay and its far sides. By default, nothing."""

    proxied: bool = False
    """Whether the relay reaches its far sides through proxies."""
    prefix: tuple[str, ...] = ()
    """Put before the command of the relay."""
    store: Path | None = None
    """The state file, if it is not in the folder of the trial."""
    more_sinks: Sequence[Mapping[str, Any]] = ()
    """Sinks beside those that are judged."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """A relay under load. ``chance`` is seeded, so that a round can be run again."""

    broker: Broker
    chance: random.Random
    azure: Simulator
    box: Inbox
    queue: Queue
    proxies: Mapping[str, CountingProxy]
    """By far side: imds, webhook and amqp; none if the fault needs none."""
    process: RelayProcess
    load: Load
    loading: asyncio.Task[None]

    async def pause(self, longest: float) -> None:
        await asyncio.sleep(self.chance.random() * longest)

    async def settle(self) -> Counts:
        """End the load, wait until all has arrived, stop the relay, and judge."""
        self.load.stop()
        problems, dead_letters = [], 0
        async with self.queue.consuming():
            try:
                async with asyncio.timeout(SETTLE_TIMEOUT):
                    await self.loading
                dead_letters = await self._send_dead_letters_again()
                await eventually(self._has_arrived, within=SETTLE_TIMEOUT, every=0.2)
            except TimeoutError:
                problems.append(f"not all arrived within {SETTLE_TIMEOUT:g} s")
            if await self.process.stop() != 0:
                problems.append("the relay did not end with 0")
        counts = judge(
            self.load.offer,
            self.process.store,
            {"drain": self.box.events, "bus": self.queue.events},
            self.azure.start_requests,
        )
        counts.dead_letters = dead_letters
        counts.problems = problems + counts.problems
        return counts

    async def _send_dead_letters_again(self) -> int:
        """Send again what the relay gave up, as an operator does. Return how much that was.

        A receiver that refuses an event, such as one whose signature has a time that is wrong, gets
        it no more once no NotBefore is ahead.
        """
        number = 0
        for sink in ("drain", "bus"):
            status, answer = await self.process.call(
                "POST", "/v1/dead-letters/redeliver", {"sink": sink}
            )
            assert status == 202, answer
            number += answer["redelivered"]
        return number

    def _has_arrived(self) -> bool:
        wanted = events_to_deliver(read_journal(self.process.store))
        return all(
            wanted <= {each["id"] for each in events}
            for events in (self.box.events, self.queue.events)
        )


@asynccontextmanager
async def trial(
    folder: Path, broker: Broker, chance: random.Random, wiring: Wiring | None = None
) -> AsyncIterator[Trial]:
    wiring = wiring or Wiring()
    await asyncio.to_thread(broker.heal)
    queue = Queue(broker, unused_exchange("chaos"))
    await queue.declare()
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(inbox())
        azure = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
        urls = {"imds": azure.url, "webhook": box.url, "amqp": broker.amqp_url()}
        proxies: dict[str, CountingProxy] = {}
        if wiring.proxied:
            for name, url in urls.items():
                proxied = counting_proxy(url)
                proxies[name], urls[name] = await stack.enter_async_context(proxied)
        document = _document(urls, queue.exchange, wiring)
        process = await stack.enter_async_context(relay(folder, document, prefix=wiring.prefix))
        await process.start()
        load = Load(azure, process, chance)
        loading = asyncio.create_task(load.run(), name="load")
        stack.callback(loading.cancel)
        yield Trial(
            broker=broker,
            chance=chance,
            azure=azure,
            box=box,
            queue=queue,
            proxies=proxies,
            process=process,
            load=load,
            loading=loading,
        )


def _document(urls: Mapping[str, str], exchange: str, wiring: Wiring) -> dict[str, Any]:
    document: dict[str, Any] = {
        "scope": "chaos",
        "relay": "vm-0",
        "source": {"url": urls["imds"], "interval": "500ms", "timeout": "3s"},
        "sinks": [
            webhook(urls["webhook"], events=["*"], timeout="3s"),
            {
                "kind": "rabbitmq",
                "name": "bus",
                "url": urls["amqp"],
                "exchange": exchange,
                "timeout": "3s",
            },
            *wiring.more_sinks,
        ],
        "approvals": {"tell_first": "0s", "rules": [RULE]},
        "api": {"clients": [*CLIENTS, client("operator")]},
    }
    if wiring.store is not None:
        document["store"] = {"path": str(wiring.store)}
    return document
