"""What reaches the queue if the relay is killed during confirms, or the broker is down for long.

`make chaos-tests` kills 20 times and lets 10,000 changes wait. `make test` kills once and lets 200
wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import aio_pika
import orjson
import pytest
from aio_pika.abc import AbstractQueue

from relay.simulator import VM, Event, Plan, Setup, Simulator
from relay.sinks.rabbitmq.sink import RabbitMQ
from tests.counting_proxy import counting_proxy
from tests.depth import depth
from tests.eventually import eventually
from tests.journey.bus import consumed, unused_exchange
from tests.journey.relay_process import Inbox, RelayProcess, rabbitmq, relay
from tests.rabbitmq import Broker
from tests.store.open_store import read_column

KILLS = depth(20, 1)
CHANGES = depth(10_000, 200)
EVENTS = depth(200, 100)
"""Events that change together: more than are ever in flight."""
GROWTH = 8_000 * 1024
"""Bytes by which memory may grow. Those of `make chaos-tests` have ten times that."""
MARKER: dict[str, Any] = {"id": "marker", "subject": "everything before has arrived", "data": {}}
_log = logging.getLogger(__name__)


def versions(box: Inbox) -> dict[str, list[int]]:
    """Return the states of each event in the order in which they came, without repeats."""
    return {
        subject: [int(event["data"]["description"]) for event in events]
        for subject, events in box.by_subject().items()
        if subject != MARKER["subject"]
    }


def repeats(box: Inbox, version: int) -> int:
    """Return how many copies of events with this version came after the first copy."""
    ids = [event["id"] for event in box.events if event["data"].get("description") == str(version)]
    return len(ids) - len(set(ids))


async def catch_up(queue: AbstractQueue, box: Inbox) -> None:
    """Wait until the consumer has received everything that is in its queue now."""
    marker = aio_pika.Message(orjson.dumps(MARKER))
    await queue.channel.default_exchange.publish(marker, queue.name)
    await eventually(lambda: box.events[-1] == MARKER)


def document(sim: Simulator, url: str, exchange: str) -> dict[str, Any]:
    source = {"url": sim.url, "interval": "500ms"}
    return {"scope": "journey", "source": source, "sinks": [rabbitmq(url, exchange)]}


def appear(sim: Simulator) -> list[Event]:
    """Events that stay, in their first state; the description numbers it."""
    return [
        sim.schedule(Plan(resources=("vm-0",), notice=3600.0, description="0"))
        for _ in range(EVENTS)
    ]


def change(sim: Simulator, events: list[Event], version: int) -> None:
    """All of them move to their next state at once."""
    for event in events:
        sim.update_event(event, description=str(version))


@pytest.mark.timeout(depth(480, 180))
async def test_killed_in_the_middle_of_confirms_again_and_again_it_loses_nothing(
    own_broker: Broker, tmp_path: Path
) -> None:
    """The order per event is kept, and each kill repeats at most the open deliveries.

    See docs/guarantees.md#a-crash-repeats-at-most-64-deliveries-per-sink. Only the kill with the
    same number can repeat the events of a version: they are first sent before this kill, and all
    are recorded as delivered before the next version comes.
    """
    exchange, box = unused_exchange("killed"), Inbox()
    async with (
        counting_proxy(own_broker.amqp_url()) as (proxy, url),
        Simulator(Setup(vms=(VM("vm-0"),))) as sim,
        consumed(own_broker.amqp_url(), exchange, box) as queue,
        relay(tmp_path / "relay", document(sim, url, exchange)) as process,
    ):
        events = appear(sim)
        await process.start()
        await eventually(lambda: _delivered(process) == EVENTS, every=0.1)
        for kill in range(1, KILLS + 1):
            recorded = EVENTS * (kill + 1)
            proxy.to_client.clear()
            change(sim, events, kill)
            await eventually(lambda count=recorded: _is_full(process, box, count), every=0.1)
            for _ in range(kill % 4):
                delivered = _delivered(process)
                while _delivered(process) == delivered:
                    proxy.release_answers()
                    await asyncio.sleep(0.1)
                await eventually(lambda count=recorded: _is_full(process, box, count), every=0.1)
            await process.kill()
            proxy.cut()
            proxy.to_client.set()
            await process.start()
            await eventually(lambda count=recorded: _delivered(process) == count, every=0.1)
        await catch_up(queue, box)
        assert versions(box) == {event.event_id: list(range(KILLS + 1)) for event in events}
        assert repeats(box, 0) == 0
        counts = [repeats(box, kill) for kill in range(1, KILLS + 1)]
        assert all(0 < count <= RabbitMQ.concurrency for count in counts), counts


def _is_full(process: RelayProcess, box: Inbox, recorded: int) -> bool:
    """Return whether the consumer has everything that the relay can send without more confirms."""
    delivered = _delivered(process)
    return len({event["id"] for event in box.events}) == min(
        delivered + RabbitMQ.concurrency, recorded
    )


@pytest.mark.timeout(depth(480, 180))
async def test_a_broker_that_was_gone_finds_everything(own_broker: Broker, tmp_path: Path) -> None:
    """Memory stays flat. Then the first message comes within five seconds, and all in order."""
    exchange, box = unused_exchange("gone"), Inbox()
    async with (
        Simulator(Setup(vms=(VM("vm-0"),))) as sim,
        consumed(own_broker.amqp_url(), exchange, box),
        relay(tmp_path / "relay", document(sim, own_broker.amqp_url(), exchange)) as process,
    ):
        events = appear(sim)
        await process.start()
        await eventually(lambda: len(versions(box)) == EVENTS)
        await asyncio.to_thread(own_broker.stop)
        last, memory = CHANGES // EVENTS, 0
        for version in range(1, last + 1):
            change(sim, events, version)
            await eventually(lambda now=version: _recorded(process) >= EVENTS * (now + 1))
            if version == max(1, last // 5):
                memory = process.memory()
        grown = process.memory() - memory
        assert grown < GROWTH
        got = len(box.events)
        await asyncio.to_thread(own_broker.start)
        back = time.monotonic()
        await eventually(lambda: len(box.events) > got, every=0.01)
        first = time.monotonic() - back
        assert first < 5 + 15  # for a machine that stands still
        await eventually(lambda: all(states[-1] == last for states in versions(box).values()))
        assert versions(box) == {event.event_id: list(range(last + 1)) for event in events}
        _log.info(
            "memory grew by %d bytes; the first came after %.1f s, all %d after %.1f s",
            grown,
            first,
            CHANGES,
            time.monotonic() - back,
        )


def _recorded(process: RelayProcess) -> int:
    """Return how many states of events are in the file for the sink."""
    return _count(process, "type LIKE 'event.%'")


def _delivered(process: RelayProcess) -> int:
    """Return how many states of events the file holds as delivered."""
    return _count(process, "type LIKE 'event.%' AND state = 'delivered'")


def _count(process: RelayProcess, condition: str) -> int:
    query = f"SELECT count(*) FROM entry WHERE {condition}"  # noqa: S608  # our own text
    (count,) = read_column(process.store, query)
    return int(count)
