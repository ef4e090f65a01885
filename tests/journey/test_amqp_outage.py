"""What reaches the queue if the relay is killed during confirms, or the broker is down for long.

`make chaos` kills 20 times and lets 10,000 changes wait. `make test` kills twice and lets 400 wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aio_pika
import orjson
import pytest
from aio_pika.abc import AbstractIncomingMessage

from relay.outbox.file import open_for_reading
from relay.simulator import VM, Event, Plan, Setup, Simulator
from relay.sinks.rabbitmq import RabbitMQ
from tests.journey.bus import unused_exchange
from tests.journey.held_connection import held_connection
from tests.journey.relay_process import RelayProcess, eventually, relay
from tests.rabbitmq import Broker

CHAOS = bool(os.environ.get("RELAY_TEST_CHAOS"))
KILLS = 20 if CHAOS else 2
CHANGES = 10_000 if CHAOS else 400
EVENTS = 200
"""Events that change together: more than are ever in flight."""
GROWTH = 8_000
"""Kilobytes by which memory may grow. The changes of `make chaos` have more than ten times that."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ledger:
    """What a consumer with a queue of its own has got, in order; it was there all along."""

    got: list[dict[str, Any]] = field(default_factory=list)

    async def note(self, message: AbstractIncomingMessage) -> None:
        """One message."""
        self.got.append(orjson.loads(message.body))
        await message.ack()

    def versions(self) -> dict[str, list[int]]:
        """The states of each event in the order in which they came, repeats left out."""
        seen: set[str] = set()
        revisions: dict[str, list[int]] = {}
        for event in self.got:
            if event["id"] not in seen and event["data"].get("description") is not None:
                seen.add(event["id"])
                revisions.setdefault(event["subject"], []).append(int(event["data"]["description"]))
        return revisions

    def repeats(self) -> int:
        """How many came once more than needed."""
        return sum(count - 1 for count in Counter(event["id"] for event in self.got).values())


@asynccontextmanager
async def consumer(broker: Broker, exchange: str) -> AsyncIterator[Ledger]:
    """A consumer of a quorum queue that starts before the relay, and reconnects."""
    ledger = Ledger()
    async with (
        await aio_pika.connect_robust(broker.amqp_url(), reconnect_interval=0.1) as connection,
        connection.channel() as channel,
    ):
        await channel.set_qos(prefetch_count=100)
        arguments: dict[str, Any] = {"alternate-exchange": f"{exchange}.unrouted"}
        await channel.declare_exchange(exchange, "topic", durable=True, arguments=arguments)
        queue = await channel.declare_queue(
            f"{exchange}.consumer", durable=True, arguments={"x-queue-type": "quorum"}
        )
        await queue.bind(exchange, "event.#")
        await queue.consume(ledger.note)
        yield ledger


def document(sim: Simulator, url: str, exchange: str) -> dict[str, Any]:
    """A relay that tells of everything, and decides nothing."""
    sink = {"kind": "rabbitmq", "name": "bus", "url": url, "exchange": exchange}
    return {"scope": "journey", "source": {"url": sim.url, "interval": "500ms"}, "sinks": [sink]}


def appear(sim: Simulator) -> list[Event]:
    """Events that stay, in their first state; the description numbers it."""
    return [
        sim.schedule(Plan(resources=("vm-0",), notice=3600.0, description="0"))
        for _ in range(EVENTS)
    ]


def change(sim: Simulator, events: list[Event], version: int) -> None:
    """All of them move to their next state at once."""
    for event in events:
        sim.update(event, description=str(version))


@pytest.mark.timeout(480 if CHAOS else 180)
async def test_killed_in_the_middle_of_confirms_again_and_again_it_loses_nothing(
    own_broker: Broker, tmp_path: Path
) -> None:
    """Order per event is kept, and what comes twice is at most what was in flight."""
    exchange = unused_exchange("killed")
    async with (
        held_connection(own_broker) as held_way,
        Simulator(Setup(vms=(VM("vm-0"),))) as sim,
        consumer(own_broker, exchange) as ledger,
        relay(tmp_path / "relay", document(sim, held_way.url, exchange)) as process,
    ):
        events = appear(sim)
        await process.start()
        await eventually(lambda: len(ledger.versions()) == EVENTS)
        for kill in range(1, KILLS + 1):
            repeats = ledger.repeats()
            held_way.to_relay.clear()
            change(sim, events, kill)
            await _in_flight(ledger)
            for _ in range(kill % 4):
                held_way.release_answers()
                await _in_flight(ledger)
            await process.kill()
            await held_way.cut()
            held_way.to_relay.set()
            await process.start()
            await eventually(
                lambda now=kill: all(states[-1] == now for states in ledger.versions().values())
            )
            assert 0 < ledger.repeats() - repeats <= RabbitMQ.concurrency
        assert ledger.versions() == {event.event_id: list(range(KILLS + 1)) for event in events}


async def _in_flight(ledger: Ledger) -> None:
    """Return when as much is in flight as may be: no more comes, as confirms are held back."""
    before = 0
    got = len(ledger.got)
    await eventually(lambda: len(ledger.got) > got)
    while before != len(ledger.got):
        before = len(ledger.got)
        await asyncio.sleep(0.3)


@pytest.mark.timeout(480 if CHAOS else 180)
async def test_a_broker_that_is_gone_for_long_finds_everything_on_its_return(
    own_broker: Broker, tmp_path: Path
) -> None:
    """Memory stays flat. Then the first message comes within five seconds, and all in order."""
    exchange = unused_exchange("gone")
    async with (
        Simulator(Setup(vms=(VM("vm-0"),))) as sim,
        consumer(own_broker, exchange) as ledger,
        relay(tmp_path / "relay", document(sim, own_broker.amqp_url(), exchange)) as process,
    ):
        events = appear(sim)
        await process.start()
        await eventually(lambda: len(ledger.versions()) == EVENTS)
        await asyncio.to_thread(own_broker.stop)
        last, memory = CHANGES // EVENTS, 0
        for version in range(1, last + 1):
            change(sim, events, version)
            await eventually(lambda now=version: _recorded(process) >= EVENTS * (now + 1))
            if version == max(1, last // 5):
                memory = _memory(process)
        grown = _memory(process) - memory
        assert grown < GROWTH
        got = len(ledger.got)
        await asyncio.to_thread(own_broker.start)
        back = time.monotonic()
        await eventually(lambda: len(ledger.got) > got, every=0.01)
        first = time.monotonic() - back
        assert first < 5 + 15  # for a machine that stands still
        await eventually(lambda: all(states[-1] == last for states in ledger.versions().values()))
        assert ledger.versions() == {event.event_id: list(range(last + 1)) for event in events}
        _log.info(
            "memory grew by %d kB; the first came after %.1f s, all %d after %.1f s",
            grown,
            first,
            CHANGES,
            time.monotonic() - back,
        )


def _recorded(process: RelayProcess) -> int:
    """How many states of events are in the file for the sink."""
    with contextlib.closing(open_for_reading(process.store)) as connection:
        return int(
            connection.execute("SELECT count(*) FROM entry WHERE type LIKE 'event.%'").fetchone()[0]
        )


def _memory(process: RelayProcess) -> int:
    """Kilobytes that the relay has in memory."""
    assert process.process is not None
    lines = Path(f"/proc/{process.process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
