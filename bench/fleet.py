"""Measures the hub of a fleet: a burst of changes beside the bare outbox, and a wave of them.

The hub, the broker and the receiver run in processes of their own. The agents are their messages:
what agents would publish is published over one connection.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aio_pika
from aio_pika.abc import AbstractConnection, AbstractExchange
from aio_pika.exceptions import ChannelNotFoundEntity

from bench import EXCHANGE
from bench.delivery import SETTLE_SECONDS, deliver_burst
from bench.imds import event_id, not_before
from bench.machine import cpu_seconds, resident_memory
from bench.receiver import Receiver, receiver
from bench.results import BARE, HUB, Options, Section, percentile
from bench.trial import next_run, trial
from relay.events.build import Origin, change_event, common_event_data, transition_digest
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.events.model import Change, ScheduledEvent
from relay.fleet.routing import agent_publish_exchange_name, report_key, report_queue_name
from tests.eventually import eventually
from tests.journey.relay_process import RelayProcess, webhook
from tests.journey.relay_process import relay as relay_process
from tests.rabbitmq import Broker

HUB_USER, AGENT_USER = "imds-hub", "vmss"
AGENTS, SCOPES = 1000, 20
BURST = 5000
WAVE_CHANGES, WAVE_SECONDS = 1000, 10.0
COPIES = 5
"""Agents of a scope that report each change of the wave."""
IN_FLIGHT = 256
"""Messages that are published at the same time to fill a queue."""
_trials = itertools.count(1)

Report = tuple[str, CloudEvent]
"""A routing key and what is published with it."""


@dataclass(slots=True)
class FleetTrial:
    """A hub that runs, with a receiver, and a connection as which all agents publish."""

    process: RelayProcess
    receiver: Receiver
    exchange: AbstractExchange
    """To which agents publish."""
    run: int

    @property
    def pid(self) -> int:
        assert self.process.process is not None  # noqa: S101  # it was started
        return self.process.process.pid

    async def publish(self, reports: Iterable[Report]) -> None:
        """Return when the broker has them all."""
        remaining = iter(reports)

        async def publish() -> None:
            for key, event in remaining:
                made = aio_pika.Message(
                    event.body,
                    message_id=event.id,
                    user_id=AGENT_USER,
                    content_type=CONTENT_TYPE,
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                )
                await self.exchange.publish(made, key)

        await asyncio.gather(*(publish() for _ in range(IN_FLIGHT)))

    async def received(self, count: int) -> dict[int, int]:
        """Wait for so many deliveries; return the moment of each in nanoseconds by its number."""
        if (arrived := await self.receiver.call("wait", count, 120.0)) < count:
            raise RuntimeError(f"expected {count} deliveries within 120 s, got {arrived}")
        arrivals = await self.receiver.call("arrivals")
        return {number: moment for _, number, moment in arrivals["first"]}


async def fleet(options: Options) -> Section:
    """Let a hub take changes from its queue: all at once, and in a wave."""
    count, changes = options.scaled(BURST), options.scaled(WAVE_CHANGES)
    section = Section(
        "A fleet",
        (HUB, BARE),
        f"Burst: {BURST:,} new events of {AGENTS:,} agents in {SCOPES} scopes wait in the queue of "
        "a hub that stands still and then goes on. From there to the last arrival at one webhook. "
        "The bare outbox delivers as many from a document. Wave: "
        f"{WAVE_CHANGES:,} changes in {WAVE_SECONDS:g} s, each reported by {COPIES} agents of its "
        "scope; from the first report to the arrival. The broker runs on the same machine, with "
        "one scheduler.",
    )
    for _ in options.rounds("a fleet"):
        async with trial("bare outbox", 1) as bare:
            await deliver_burst(bare, count, section, "burst, ")
        async with _hub(options.broker) as one:
            await _burst(one, count, section)
            await _wave(one, count, changes, section)
            section.add("resident memory, MB", HUB, resident_memory(one.pid)[0])
    return section


async def _burst(one: FleetTrial, count: int, section: Section) -> None:
    """Fill the queue while the hub stands still, and let it go on."""
    reports = [_report(one.run, number, 0) for number in range(count)]
    before = cpu_seconds(one.pid)
    os.kill(one.pid, signal.SIGSTOP)
    try:
        await one.publish(reports)
    finally:
        began = time.monotonic_ns()
        os.kill(one.pid, signal.SIGCONT)
    arrivals = await one.received(count)
    await asyncio.sleep(SETTLE_SECONDS)
    elapsed, cpu = (max(arrivals.values()) - began) / 1e9, cpu_seconds(one.pid) - before
    section.add("burst, deliveries, /s", HUB, count / elapsed)
    section.add("burst, CPU per delivery, ms", HUB, 1000 * cpu / count)


async def _wave(one: FleetTrial, first: int, changes: int, section: Section) -> None:
    told: dict[int, int] = {}
    began, before = time.monotonic(), cpu_seconds(one.pid)
    for index in range(changes):
        await asyncio.sleep(began + index * WAVE_SECONDS / WAVE_CHANGES - time.monotonic())
        told[first + index] = time.monotonic_ns()
        await one.publish([_report(one.run, first + index, copy) for copy in range(COPIES)])
    arrivals = await one.received(first + changes)
    await asyncio.sleep(SETTLE_SECONDS)
    times = [(arrivals[number] - moment) / 1e6 for number, moment in told.items()]
    section.add("wave, p50, ms", HUB, percentile(times, 50))
    section.add("wave, p99, ms", HUB, percentile(times, 99))
    cpu = cpu_seconds(one.pid) - before
    section.add("wave, CPU per change, ms", HUB, 1000 * cpu / changes)


def _report(run: int, number: int, copy: int) -> Report:
    """Return the change with this number as one of the agents of its scope reports it."""
    vm, scope = divmod(number % AGENTS, SCOPES)
    names = [f"bench-{scope}_{(vm + other) % (AGENTS // SCOPES)}" for other in (0, copy)]
    origin = Origin(f"bench-{scope}", names[1])
    event = ScheduledEvent(
        event_id=event_id(run, number),
        event_type="Reboot",
        event_status="Scheduled",
        resource_type="VirtualMachine",
        resources=(names[0],),
        not_before=not_before(),
        description="Host server is undergoing maintenance. The machine restarts once.",
        event_source="Platform",
        duration=9,
    )
    change = Change("scheduled", event, {})
    made = change_event(
        change,
        origin,
        datetime.now(UTC),
        data=common_event_data(event, 1),
        transition=transition_digest(change, origin),
        previous_count=0,
        approved_by_relay=False,
    )
    return report_key(made, origin), made


@asynccontextmanager
async def _hub(broker: Broker) -> AsyncIterator[FleetTrial]:
    """Run a hub with an empty state file, and with exchanges and queues of its own."""
    exchange = f"{EXCHANGE}.{next(_trials)}"
    every = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    users = [{"name": name, "password": name, "tags": ""} for name in (HUB_USER, AGENT_USER)]
    rights = [{"user": user["name"], **every} for user in users]
    await asyncio.to_thread(broker.define, {"users": users, "permissions": rights})
    with tempfile.TemporaryDirectory() as folder:
        async with receiver(1) as target:
            document = {
                "relay": "hub-0",
                "fleet": {
                    "role": "hub",
                    "url": broker.amqp_url(HUB_USER),
                    "exchange": exchange,
                    "domains": [{"user": AGENT_USER, "scopes": ["*"]}],
                },
                "sinks": [webhook(target.urls[0], "hook", events=["event.scheduled"])],
            }
            async with relay_process(Path(folder), document) as process:
                await process.start()
                connection = await aio_pika.connect(broker.amqp_url(AGENT_USER))
                async with connection:
                    await eventually(lambda: _listens(connection, report_queue_name(exchange)))
                    channel = await connection.channel()
                    reports = await channel.get_exchange(agent_publish_exchange_name(exchange))
                    one = FleetTrial(process, target, reports, next_run())
                    await target.call("begin", one.run)
                    yield one


async def _listens(connection: AbstractConnection, queue: str) -> bool:
    try:
        async with connection.channel() as channel:
            return bool((await channel.get_queue(queue)).declaration_result.consumer_count)
    except ChannelNotFoundEntity:  # the hub makes it when it connects
        return False
