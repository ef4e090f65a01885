"""A relay that takes approvals from RabbitMQ, and the view of a service on the broker."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aio_pika
import orjson
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import ChannelNotFoundEntity
from pamqp.commands import Basic
from yarl import URL

from relay.amqp.connection import GuardedConnection
from relay.amqp.topology import approvals_queue, declare_topology, events_topology
from relay.app import RunningRelay, start_relay
from relay.clock import SystemClock
from relay.config import Config
from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.eventually import eventually
from tests.journey.relay_process import Inbox, client, name_of, rabbitmq
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel

SCOPE = "journey"
KEY = f"approve.{SCOPE}"
"""The routing key of approvals."""
USERS = ("drain", "holder", "stranger", "watcher", "pretender")
"""RabbitMQ users: two clients that may approve, one that the relay does not know, one that may only
read, and one that may set any user_id."""
RULE = {
    "name": "reboots",
    "match": {"event_type": ["Reboot"]},
    "approve": {"votes": 1, "from": ["client:drain", "client:watcher", "client:operator"]},
}
_numbers = itertools.count()


def define_users(broker: Broker) -> None:
    """Make the users, with every right that the broker itself can give."""
    for user in USERS:
        broker.add_user(user, user, tags="impersonator" if user == "pretender" else "")


def unused_exchange(prefix: str = "journey") -> str:
    """The name of an exchange that no other test uses."""
    return f"{prefix}.{next(_numbers)}"


async def declare_service_queue(
    channel: AbstractChannel, exchange: str, key: str = "event.#"
) -> AbstractQueue:
    """Make the queue of a service, and the exchange as a relay makes it."""
    arguments: dict[str, Any] = {"alternate-exchange": f"{exchange}.unrouted"}
    await channel.declare_exchange(exchange, "topic", durable=True, arguments=arguments)
    queue = await channel.declare_queue(
        f"{exchange}.service", durable=True, arguments={"x-queue-type": "quorum"}
    )
    await queue.bind(exchange, key)
    return queue


@asynccontextmanager
async def consumed(url: str, exchange: str, box: Inbox) -> AsyncIterator[AbstractQueue]:
    """Collect the events about Azure's events in a box, also when the broker was gone.

    What the broker gives again because the consumer's connection broke is no repeat of the relay.
    """
    seen: set[str] = set()

    async def take(message: AbstractIncomingMessage) -> None:
        event = orjson.loads(message.body)
        if not (message.redelivered and event["id"] in seen):
            box.events.append(event)
            seen.add(event["id"])
        await message.ack()

    async with (
        await aio_pika.connect_robust(url, reconnect_interval=0.1) as connection,
        connection.channel() as channel,
    ):
        await channel.set_qos(prefetch_count=100)
        queue = await declare_service_queue(channel, exchange)
        await queue.consume(take)
        yield queue


def relay_document(broker: Broker, exchange: str, **amqp: Any) -> dict[str, Any]:
    """The YAML document of a relay with RabbitMQ in both directions.

    ``amqp`` are more settings of ``approvals.amqp``.
    """
    return {
        "scope": SCOPE,
        "relay": "vm-0",
        "sinks": [rabbitmq(broker.amqp_url(), exchange)],
        "approvals": {
            "amqp": {"url": broker.amqp_url(), **amqp},
            "tell_first": "0s",
            "rules": [RULE],
        },
        "api": {
            "listen": "127.0.0.1:0",
            "clients": [
                client("operator", key="a-third-key-for-tests-only"),  # has no RabbitMQ user
                client("drain", amqp_user="drain", resources=["vm-*"]),
                client("holder", key="a-fourth-key-for-tests-only", amqp_user="holder"),
                client(
                    "watcher", key="another-key-for-tests-only", amqp_user="watcher", can=["read"]
                ),
            ],
        },
    }


@dataclass(slots=True)
class Bus:
    """The view of a service on RabbitMQ: all events, all dead letters, and a way to send."""

    broker: Broker
    exchange: str
    events: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, Any]] = field(default_factory=list)
    """Those of each event."""
    dead_letters: list[AbstractIncomingMessage] = field(default_factory=list)

    @property
    def queue(self) -> str:
        return f"{self.exchange}.approvals.{SCOPE}"

    @property
    def approvals_exchange(self) -> str:
        return f"{self.exchange}.approvals"

    async def make(self) -> None:
        """Make the exchanges and the queues, as a relay does when it connects."""
        topology = (
            *events_topology(self.exchange),
            *approvals_queue(self.exchange, SCOPE).topology,
        )
        async with self.connection() as connection:
            await declare_topology(connection, topology, True)

    async def send(
        self,
        decision: Mapping[str, Any] | bytes,
        message_id: str | None = "m",
        *,
        user: str = "drain",
        key: str = KEY,
        exchange: str | None = None,
        **properties: Any,
    ) -> None:
        """Publish as a user, with the user's own ``user_id``; usually to the approvals exchange."""
        body = decision if isinstance(decision, bytes) else orjson.dumps(decision)
        header = Basic.Properties(
            **{"message_id": message_id, "user_id": user, "delivery_mode": 2, **properties}
        )
        async with RawChannel(self.broker.amqp_url(user)) as channel:
            await channel.publish(
                self.approvals_exchange if exchange is None else exchange, key, body, header
            )

    async def send_all(
        self, decision: Mapping[str, Any], message_ids: Iterable[str], *, user: str
    ) -> int:
        """Publish as fast as the broker reads; return how many messages it did not take."""
        properties = [
            Basic.Properties(message_id=each, user_id=user, delivery_mode=2) for each in message_ids
        ]
        body = orjson.dumps(decision)
        async with RawChannel(self.broker.amqp_url(user)) as channel:
            return await channel.publish_all(self.approvals_exchange, KEY, body, properties)

    async def waiting(self) -> tuple[int, int]:
        """How many approvals wait in the queue, and how many consumers it has."""
        async with self.channel() as channel:
            declared = (await channel.declare_queue(self.queue, passive=True)).declaration_result
            return declared.message_count or 0, declared.consumer_count or 0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[GuardedConnection]:
        # The relay's own connection: some dead letters would end any other.
        connection = GuardedConnection(URL(self.broker.amqp_url()), "journey")
        await connection.connect()
        async with connection:
            yield connection

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[AbstractChannel]:
        async with self.connection() as connection, connection.channel() as channel:
            yield channel

    async def listen(self, stack: AsyncExitStack, *, dead_letters: bool = True) -> None:
        """Collect events and dead letters from now on.

        Both arrive on one connection: an event waits behind the dead letters before it.
        """
        channel = await stack.enter_async_context(self.channel())
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(self.exchange, "#")

        async def keep_event(message: AbstractIncomingMessage) -> None:
            self.events.append(orjson.loads(message.body))
            self.headers.append(message.headers)

        async def keep_dead_letter(message: AbstractIncomingMessage) -> None:
            self.dead_letters.append(message)

        await queue.consume(keep_event, no_ack=True)
        if not dead_letters:
            return
        dead_letter_queue = await channel.get_queue(f"{self.exchange}.dead")
        await dead_letter_queue.consume(keep_dead_letter, no_ack=True)

    def events_of_type(
        self, name: str, event: Event | None = None, cause: str | None = None
    ) -> list[dict[str, Any]]:
        """The collected events of one type, about this event, caused by this message."""
        return [
            collected
            for collected in self.events
            if name_of(collected) == name
            and (event is None or collected["subject"] == event.event_id)
            and (cause is None or collected.get("causationid") == cause)
        ]

    async def wait_for_event(
        self, name: str, event: Event | None = None, cause: str | None = None, *, within: float = 60
    ) -> dict[str, Any]:
        await eventually(lambda: bool(self.events_of_type(name, event, cause)), within=within)
        return self.events_of_type(name, event, cause)[0]


@dataclass(slots=True)
class System:
    """A simulated Azure, a relay, and RabbitMQ."""

    sim: Simulator
    bus: Bus
    _running: RunningRelay | None = None
    config: Config = field(default_factory=Config)
    scheduled: list[tuple[Event, dict[str, Any]]] = field(default_factory=list)
    marks: int = 0
    """Messages that were sent to be refused."""
    marked: dict[str, Any] = field(default_factory=dict)
    """A decision about the event that they are about."""

    @property
    def running(self) -> RunningRelay:
        """The relay, if it runs in this process."""
        assert self._running is not None
        return self._running

    async def schedule_reboot(self, **plan: Any) -> tuple[Event, dict[str, Any]]:
        """A scheduled reboot, and the decision that approves it."""
        if self.scheduled and not plan:
            return self.scheduled.pop()
        return await self._approval_of(self._schedule(**plan))

    async def wait_until_earlier_are_decided(self) -> None:
        """Send a message that is refused. The queue is first in, first out."""
        if self.marks % 8 == 0:
            _, self.marked = await self.schedule_reboot()
        self.marks += 1
        mark = f"mark {self.marks}"
        await self.bus.send({**self.marked, "revision": "none"}, mark)
        await self.bus.wait_for_event("approval.refused", cause=mark)

    async def schedule_reboots(self, number: int) -> None:
        """Schedule reboots for later calls of `schedule_reboot`, with one poll for all."""
        events = [self._schedule() for _ in range(number)]
        self.scheduled += [await self._approval_of(event) for event in events]

    def _schedule(self, **plan: Any) -> Event:
        return self.sim.schedule(
            Plan(**{"type": "Reboot", "resources": ("vm-0",), "lasts": None, **plan})
        )

    async def _approval_of(self, event: Event) -> tuple[Event, dict[str, Any]]:
        data = (await self.bus.wait_for_event("event.scheduled", event))["data"]
        return event, {
            "eventId": data["eventId"],
            "decision": "approve",
            "revision": data["revision"],
        }

    def starts(self, event: Event) -> int:
        return sum(event.event_id in call.event_ids for call in self.sim.start_requests)

    async def is_consuming(self) -> bool:
        try:
            return (await self.bus.waiting())[1] == 1
        except ChannelNotFoundEntity:  # the relay has not made the queue yet
            return False

    async def is_idle(self) -> bool:
        """Whether the relay consumes approvals, and none waits."""
        return await self.bus.waiting() == (0, 1)

    async def is_not_consuming(self) -> bool:
        return (await self.bus.waiting())[1] == 0


@asynccontextmanager
async def running_system(
    broker: Broker,
    directory: Path,
    exchange: str | None = None,
    *,
    wait: bool = True,
    clients: Sequence[Mapping[str, Any]] | None = None,
    approvals: Mapping[str, Any] = MappingProxyType({}),
    **amqp: Any,
) -> AsyncIterator[System]:
    """A relay in this process, and a bus that collects its events.

    ``wait``: until the relay consumes. ``clients`` replace the usual ones. ``approvals`` and
    ``amqp`` are more settings of ``approvals`` and of ``approvals.amqp``.
    """
    bus = Bus(broker, exchange or unused_exchange())
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
        document = relay_document(broker, bus.exchange, **amqp)
        document |= {"source": {"url": sim.url}, "store": {"path": str(directory / "relay.db")}}
        document["api"]["clients"] = clients or document["api"]["clients"]
        document["approvals"] |= approvals
        config = Config.model_validate(document)
        running = await stack.enter_async_context(start_relay(config, SystemClock()))
        system = System(sim, bus, running, config)
        if wait:
            await eventually(system.is_consuming, every=0.05)
            await bus.listen(stack)
        yield system
