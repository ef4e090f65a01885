"""A hub and agents on a real RabbitMQ, with a simulated Azure for each scope, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aio_pika
import aiohttp

from relay.app import RunningRelay, start_relay
from relay.clock import SystemClock
from relay.config import Config
from relay.fleet.hub.link import HubLink
from relay.fleet.hub.roster import Roster
from relay.fleet.routing import agent_publish_exchange_name, report_queue_name
from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.eventually import eventually
from tests.fleet.hub_side import (
    AGENT_USER,
    HUB_USER,
    agent_document,
    define_users,
    publish_as,
    unused_exchange,
)
from tests.journey.relay_process import Inbox, call_api, client, inbox, webhook
from tests.rabbitmq import Broker

DOMAINS = ({"user": AGENT_USER, "scopes": ["vmss-a-*"]},)
"""The trust domains of the hub, unless a test names others."""
AUTOMATIC = {"approvals": {"tell_first": "0s", "rules": [{"name": "all", "approve": "automatic"}]}}


def one_vote(*voters: str) -> dict[str, Any]:
    """Return the section of a hub for which one vote is enough, at once."""
    rule = {"name": "one", "approve": {"votes": 1, "from": list(voters)}}
    return {"approvals": {"tell_first": "0s", "rules": [rule]}}


@dataclass(slots=True)
class RunningFleet:
    """The parts of a fleet. ``agents`` are by scope and name of the VM."""

    broker: Broker
    exchange: str
    directory: Path
    inbox: Inbox
    azures: dict[str, Simulator] = field(default_factory=dict)
    agents: dict[tuple[str, str], AsyncExitStack] = field(default_factory=dict)
    relays: dict[tuple[str, str], RunningRelay] = field(default_factory=dict)
    """The running agents."""
    hub: RunningRelay | None = None
    hub_stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    hub_settings: Mapping[str, Any] = field(default_factory=dict)
    domains: Sequence[Mapping[str, Any]] = DOMAINS
    interval: str = "500ms"
    """Between two polls of an agent."""
    hub_file: Path | None = None
    """The state file of the hub, if it is not in the directory of the fleet."""

    @property
    def azure(self) -> Simulator:
        """That of the first scope."""
        return next(iter(self.azures.values()))

    async def scheduled(self, vm: str, **plan: Any) -> Event:
        """Let the first scope schedule an event for a VM, and wait until the hub has told it."""
        event = self.azure.schedule(Plan(resources=(vm,), **plan))
        await eventually(lambda: self.told(event.event_id) == ["event.scheduled"])
        return event

    @property
    def running_hub(self) -> RunningRelay:
        assert self.hub is not None
        return self.hub

    @property
    def roster(self) -> Roster:
        roster = self.running_hub.relay.roster
        assert roster is not None
        return roster

    async def start_hub(self) -> RunningRelay:
        """Start the hub on the state file that it had before."""
        config = self.hub_config(self.hub_file or self.directory / "hub.db")
        self.hub_stack = AsyncExitStack()
        self.hub = await self.hub_stack.enter_async_context(start_relay(config, SystemClock()))
        return self.hub

    def hub_config(self, state_file: Path) -> Config:
        return Config.model_validate(self.hub_document(state_file))

    def hub_document(self, state_file: Path) -> dict[str, Any]:
        return {
            "relay": "hub-0",
            "fleet": {
                "role": "hub",
                "url": self.broker.amqp_url(HUB_USER),
                "exchange": self.exchange,
                "domains": list(self.domains),
            },
            "store": {"path": str(state_file)},
            "sinks": [
                webhook(self.inbox.url, "box"),
                {
                    "kind": "rabbitmq",
                    "name": "bus",
                    "url": self.broker.amqp_url(HUB_USER),
                    "exchange": self.exchange,
                },
            ],
            "api": {"listen": "127.0.0.1:0", "clients": [client("ops")]},
            **self.hub_settings,
        }

    async def stop_hub(self) -> None:
        await self.hub_stack.aclose()
        self.hub = None

    async def start_agent(self, scope: str, relay: str) -> RunningRelay:
        """Start the agent of a VM on the state file that it had before."""
        config = Config.model_validate(self.agent_document(scope, relay))
        stack = AsyncExitStack()
        agent = await stack.enter_async_context(start_relay(config, SystemClock()))
        self.agents[scope, relay] = stack
        self.relays[scope, relay] = agent
        return agent

    def agent_document(self, scope: str, relay: str) -> dict[str, Any]:
        return agent_document(
            self.broker,
            self.exchange,
            scope=scope,
            relay=relay,
            source={"url": self.azures[scope].urls[relay], "interval": self.interval},
            store={"path": str(self.directory / f"{scope}-{relay}.db")},
            api={"listen": "127.0.0.1:0", "socket": str(self._socket(scope, relay))},
        )

    async def start_plain_relay(self, stack: AsyncExitStack, scope: str, vm: str, url: str) -> None:
        """Start a relay without a fleet on the state file of a VM's agent; it tells a webhook."""
        document = self.agent_document(scope, vm)
        document |= {"fleet": None, "sinks": [webhook(url)], "approvals": {"enabled": False}}
        config = Config.model_validate(document)
        await stack.enter_async_context(start_relay(config, SystemClock()))

    async def wait_until_reported(self) -> None:
        """Wait until every agent has told the hub what it knows, and the hub has read it."""
        agents = [agent.relay.store for agent in self.relays.values()]

        async def is_reported() -> bool:
            for store in agents:
                if await store.read(lambda tx: tx.deliveries.waiting_entries("hub")):
                    return False
            return await self.count_waiting(report_queue_name(self.exchange)) == 0

        await eventually(is_reported, every=0.2, what="all reports")

    async def stop_agent(self, scope: str, relay: str) -> None:
        del self.relays[scope, relay]
        await self.agents.pop((scope, relay)).aclose()

    async def wait_until_connected(self) -> None:
        source = self.running_hub.relay.source
        assert isinstance(source, HubLink)
        await eventually(lambda: source.is_connected, what="the hub is connected")

    async def wait_until_heard(self) -> None:
        def is_heard() -> bool:
            heard = (agent for agent in self.roster if agent.last_pulse is not None)
            return {(agent.scope, agent.relay) for agent in heard} >= set(self.agents)

        await eventually(is_heard, what="a pulse of each agent")

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.running_hub.server.port}{path}"
        return await call_api(method, url, body)

    async def vote_for(self, scope: str, event_id: str) -> dict[str, str]:
        """Return the body of a vote for an event as the hub knows it."""
        _, event = await self.call("GET", f"/v1/events/{event_id}?scope={scope}")
        return {"eventId": event_id, "decision": "approve", "revision": event["revision"]}

    async def approve(self, scope: str, event_id: str) -> tuple[int, Any]:
        vote = await self.vote_for(scope, event_id)
        return await self.call("POST", "/v1/approvals", vote | {"scope": scope})

    def _socket(self, scope: str, relay: str) -> Path:
        """Return the local socket of an agent. Its path must be short."""
        return self.directory / f"{relay}.{list(self.azures).index(scope)}"

    async def decide_on_vm(
        self,
        scope: str,
        relay: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """POST /v1/approvals on the agent of a VM, as a program on that VM does."""
        connector = aiohttp.UnixConnector(str(self._socket(scope, relay)))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post("http://agent/v1/approvals", json=body, headers=headers) as answer,
        ):
            return answer.status, await answer.json(content_type=None)

    async def publish(
        self,
        key: str,
        body: bytes,
        *,
        user: str = AGENT_USER,
        exchange: str | None = None,
        **more: Any,
    ) -> None:
        name = agent_publish_exchange_name(self.exchange) if exchange is None else exchange
        await publish_as(self.broker, user, name, key, body, **more)

    async def count_waiting(self, queue: str) -> int:
        connection = await aio_pika.connect(self.broker.amqp_url())
        async with connection, connection.channel() as channel:
            declared = await channel.declare_queue(queue, passive=True)
            return declared.declaration_result.message_count or 0

    async def count_dead(self) -> int:
        return await self.count_waiting(f"{self.exchange}.dead")

    def told(self, event_id: str) -> list[str]:
        """Return the types of what the webhook got about an EventId, each once, in order."""
        return self.inbox.types_of(event_id)


@asynccontextmanager
async def running_fleet(
    broker: Broker,
    directory: Path,
    scopes: Mapping[str, Sequence[str]],
    *,
    hub: Mapping[str, Any] | None = None,
    domains: Sequence[Mapping[str, Any]] = DOMAINS,
    setup: Setup | None = None,
    without_agents: Collection[str] = (),
    interval: str = "500ms",
) -> AsyncIterator[RunningFleet]:
    """Run a hub, and an agent for each VM of each scope.

    ``hub`` holds further sections of its configuration. ``setup`` says how each simulated Azure
    behaves; its VMs are replaced. ``without_agents`` names VMs that get no agent.
    """
    await asyncio.to_thread(broker.start)
    exchange = unused_exchange()
    await asyncio.to_thread(define_users, broker, exchange)
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(inbox())
        fleet = RunningFleet(
            *(broker, exchange, directory, box),
            hub_settings=hub or {},
            domains=domains,
            interval=interval,
        )
        for scope, vms in scopes.items():
            azure = Simulator(replace(setup or Setup(), vms=tuple(map(VM, vms))))
            fleet.azures[scope] = await stack.enter_async_context(azure)
        try:
            await fleet.start_hub()
            await fleet.wait_until_connected()
            for scope, vms in scopes.items():
                for vm in (vm for vm in vms if vm not in without_agents):
                    await fleet.start_agent(scope, vm)
            await fleet.wait_until_heard()
            yield fleet
        finally:
            for agent in [*fleet.agents.values(), fleet.hub_stack]:
                await agent.aclose()
