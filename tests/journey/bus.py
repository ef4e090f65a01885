"""A relay that takes approvals from RabbitMQ, and what a service on the queue sees of it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aio_pika.exceptions import ChannelNotFoundEntity
from pamqp.commands import Basic
from yarl import URL

from relay.amqp.connection import Connection
from relay.app import Running, started
from relay.clock import SystemClock
from relay.config import Config
from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.journey.relay_process import client, eventually, name_of
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel

SCOPE = "journey"
USERS = ("drain", "stranger", "watcher", "pretender")
"""RabbitMQ users of these tests: a client that may approve, one whom the relay does not know, one that may only read, and one
who may vouch for anybody."""
RULE = {
    "name": "reboots",
    "match": {"event_type": ["Reboot"]},
    "approve": {"votes": 1, "from": ["client:drain", "client:watcher", "client:operator"]},
}
_numbers = itertools.count()


def define_users(broker: Broker) -> None:
    """Make the users, with every right that the broker itself can give."""
    everything = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    broker.define(
        {
            "users": [
                {
                    "name": user,
                    "password": user,
                    "tags": "impersonator" if user == "pretender" else "",
                }
                for user in USERS
            ],
            "permissions": [{"user": user, **everything} for user in USERS],
        }
    )


def unused(name: str = "journey") -> str:
    """The name of an exchange that no other test has."""
    return f"{name}.{next(_numbers)}"


def section(broker: Broker, exchange: str, **amqp: Any) -> dict[str, Any]:
    """The document of a relay that tells and takes approvals over RabbitMQ; ``amqp``: more of ``approvals.amqp``."""
    return {
        "scope": SCOPE,
        "relay": "vm-0",
        "sinks": [
            {"kind": "rabbitmq", "name": "bus", "url": broker.amqp_url(), "exchange": exchange}
        ],
        "approvals": {
            "amqp": {"url": broker.amqp_url(), **amqp},
            "tell_first": "0s",
            "rules": [RULE],
        },
        "api": {
            "listen": "127.0.0.1:0",
            "clients": [
                client("operator", key="a-third-key-for-tests-only"),  # whom RabbitMQ does not know
                client("drain", amqp_user="drain", resources=["vm-*"]),
                client(
                    "watcher", key="another-key-for-tests-only", amqp_user="watcher", can=["read"]
                ),
            ],
        },
    }


@dataclass(slots=True)
class Bus:
    """What a service on the queue has: everything that the relay says, the dead letters, and a way to send."""

    broker: Broker
    exchange: str
    said: list[dict[str, Any]] = field(default_factory=list)
    dead: list[AbstractIncomingMessage] = field(default_factory=list)

    @property
    def queue(self) -> str:
        """Where approvals wait."""
        return f"{self.exchange}.approvals.{SCOPE}"

    async def send(
        self,
        wish: Mapping[str, Any] | bytes,
        message_id: str | None = "m",
        *,
        user: str = "drain",
        key: str = f"approve.{SCOPE}",
        **more: Any,
    ) -> None:
        """Publish to the approvals exchange; ``user_id`` is the user's own unless another is given."""
        body = wish if isinstance(wish, bytes) else orjson.dumps(wish)
        properties = Basic.Properties(
            **{"message_id": message_id, "user_id": user, "delivery_mode": 2, **more}
        )
        async with RawChannel(self.broker.amqp_url(user)) as channel:
            await channel.publish(f"{self.exchange}.approvals", key, body, properties)

    async def waiting(self) -> tuple[int, int]:
        """How many approvals wait in the queue, and how many consumers it has."""
        async with self.channel() as channel:
            declared = (await channel.declare_queue(self.queue, passive=True)).declaration_result
            return declared.message_count or 0, declared.consumer_count or 0

    async def holds_one(self) -> bool:
        """Whether one approval waits in the queue, given to nobody."""
        return (await self.waiting())[0] == 1

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[AbstractChannel]:
        """A channel of somebody who may do everything."""
        connection = Connection(
            URL(self.broker.amqp_url()), "journey"
        )  # the relay's own: dead letters end any other
        await connection.connect()
        async with connection, connection.channel() as channel:
            yield channel

    async def listen(self, stack: AsyncExitStack) -> None:
        """From now on note what is said and what dies."""
        channel = await stack.enter_async_context(self.channel())
        said = await channel.declare_queue(exclusive=True)
        await said.bind(self.exchange, "#")

        async def hear(message: AbstractIncomingMessage) -> None:
            self.said.append(orjson.loads(message.body))

        async def bury(message: AbstractIncomingMessage) -> None:
            self.dead.append(message)

        await said.consume(hear, no_ack=True)
        await (await channel.get_queue(f"{self.exchange}.dead")).consume(bury, no_ack=True)

    def told(
        self, name: str, event: Event | None = None, cause: str | None = None
    ) -> list[dict[str, Any]]:
        """The events of one type that the relay said, about one event, caused by one message."""
        return [
            one
            for one in self.said
            if name_of(one) == name
            and (event is None or one["subject"] == event.event_id)
            and (cause is None or one.get("causationid") == cause)
        ]

    async def hears(
        self, name: str, event: Event | None = None, cause: str | None = None, *, within: float = 60
    ) -> dict[str, Any]:
        """The first such event, waited for."""
        await eventually(lambda: bool(self.told(name, event, cause)), within=within)
        return self.told(name, event, cause)[0]


@dataclass(slots=True)
class Stage:
    """Azure, the relay and the queue."""

    sim: Simulator
    bus: Bus
    _running: Running | None = None
    config: Config = field(default_factory=Config)
    prepared: list[tuple[Event, dict[str, Any]]] = field(default_factory=list)

    @property
    def running(self) -> Running:
        """The relay, where it runs in this process."""
        assert self._running is not None
        return self._running

    async def wish(self, **plan: Any) -> tuple[Event, dict[str, Any]]:
        """A reboot that is coming, and the wish to approve it as the relay told of it."""
        return (
            self.prepared.pop()
            if self.prepared and not plan
            else await self._wish(self._schedule(**plan))
        )

    async def prepare(self, number: int) -> None:
        """Have so many reboots come at once, for whoever asks next: with one poll instead of one for each."""
        self.prepared += [
            await self._wish(event) for event in [self._schedule() for _ in range(number)]
        ]

    def _schedule(self, **plan: Any) -> Event:
        return self.sim.schedule(
            Plan(**{"type": "Reboot", "resources": ("vm-0",), "lasts": None, **plan})
        )

    async def _wish(self, event: Event) -> tuple[Event, dict[str, Any]]:
        data = (await self.bus.hears("event.scheduled", event))["data"]
        return event, {
            "eventId": data["eventId"],
            "decision": "approve",
            "revision": data["revision"],
        }

    def starts(self, event: Event) -> int:
        """How many StartRequests Azure got for an event."""
        return sum(event.event_id in call.event_ids for call in self.sim.start_requests)

    async def is_consuming(self) -> bool:
        """Whether the relay takes approvals."""
        try:
            return (await self.bus.waiting())[1] == 1
        except ChannelNotFoundEntity:  # it has not made the queue yet
            return False

    async def is_idle(self) -> bool:
        """Whether it takes approvals, and none waits."""
        return await self.bus.waiting() == (0, 1)

    async def is_not_consuming(self) -> bool:
        """Whether nobody takes approvals."""
        return (await self.bus.waiting())[1] == 0


@asynccontextmanager
async def stage(
    broker: Broker, directory: Path, exchange: str | None = None, *, wait: bool = True, **amqp: Any
) -> AsyncIterator[Stage]:
    """A relay in this process, which tells and takes approvals, and a listener to all that comes of it.

    ``wait``: until it consumes; ``amqp``: more of ``approvals.amqp``.
    """
    bus = Bus(broker, exchange or unused())
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
        document = section(broker, bus.exchange, **amqp)
        document |= {"source": {"url": sim.url}, "store": {"path": str(directory / "relay.db")}}
        config = Config.model_validate(document)
        running = await stack.enter_async_context(started(config, SystemClock()))
        here = Stage(sim, bus, running, config)
        if wait:
            await eventually(here.is_consuming, every=0.05)
            await bus.listen(stack)
        yield here
