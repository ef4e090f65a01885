"""Known clients without rights flood every way in at once; nobody else waits, and little is kept.

There are 100,000 requests, 20,000 of them over AMQP, so only `make chaos-tests` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aio_pika.exceptions import ChannelNotFoundEntity
from pamqp.commands import Basic

from relay.simulator import VM, Event, Plan, Setup, Simulator
from relay.store.chain import verify_journal
from relay.store.file import open_for_reading
from tests.depth import CHAOS
from tests.eventually import eventually
from tests.journey.bus import KEY, SCOPE, Bus, unused_exchange
from tests.journey.relay_process import (
    CLIENT_SECRET,
    Inbox,
    RelayProcess,
    client,
    inbox,
    name_of,
    relay,
    webhook,
)
from tests.journey.weak_clients import Attack, Report, WeakClient
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel

REQUESTS, MESSAGES = 80_000, 20_000
NORMAL_SAMPLES = 20
HONEST_KEY = "imdsr_bearer-test-key-of-the-honest"
LATEST = 10.0
"""Seconds: ten times the aim for what must not wait longer than a second."""
MAX_GROWTH_OF_MEMORY = 50 * 2**20
MAX_GROWTH_OF_STATE = 20 * 2**20


@dataclass(slots=True)
class Figures:
    """Seconds that each honest action took, and the largest sizes in bytes."""

    notices: list[float] = field(default_factory=list)
    holds_over_http: list[float] = field(default_factory=list)
    holds_over_amqp: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory: int = 0
    state: int = 0

    @property
    def times(self) -> dict[str, list[float]]:
        """The seconds of each action."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, list)}


@dataclass(slots=True, kw_only=True)
class Scene:
    """A relay in its own process, its surroundings, and an honest client."""

    sim: Simulator
    process: RelayProcess
    bus: Bus
    honest: RawChannel
    """The connection of the honest client to the broker."""
    box: Inbox
    weak: list[WeakClient]
    arrivals: dict[tuple[str, str], float] = field(default_factory=dict)
    """When the webhook first got each type of event about each EventId."""

    async def schedule(self) -> tuple[Event, dict[str, Any]]:
        """Schedule a reboot. Return it, and the decision that approves it."""
        event = self.sim.schedule(
            Plan(type="Reboot", resources=("vm-0",), notice=7200.0, lasts=None)
        )
        data = (await self.bus.wait_for_event("event.scheduled", event))["data"]
        return event, {
            "eventId": data["eventId"],
            "decision": "approve",
            "revision": data["revision"],
        }

    def note_arrival(self, event: dict[str, Any]) -> None:
        self.arrivals.setdefault((name_of(event), str(event.get("subject"))), time.monotonic())

    async def notice(self, _: dict[str, Any]) -> float:
        """Return the seconds from a change in Azure to its arrival at the webhook."""
        event = self.sim.schedule(Plan(type="Freeze", resources=("vm-0",), lasts=None))
        began = time.monotonic()
        key = ("event.scheduled", event.event_id)
        await eventually(lambda: key in self.arrivals, within=120)
        self.sim.cancel(event)
        return self.arrivals[key] - began

    async def hold_over_http(self, _: dict[str, Any]) -> float:
        """Return the seconds that a hold of a new event takes, on a new connection.

        Of more than ten holds of an event within a minute, not each would be recorded.
        """
        event, decision = await self.schedule()
        began = time.monotonic()
        status, _ = await self.process.call(
            "POST",
            "/v1/approvals",
            {**decision, "decision": "hold"},
            {"Authorization": f"Bearer {HONEST_KEY}", "Idempotency-Key": uuid.uuid4().hex},
        )
        assert status == 202
        seconds = time.monotonic() - began
        self.sim.cancel(event)
        return seconds

    async def hold_over_amqp(self, _: dict[str, Any]) -> float:
        """Return the seconds from a message that holds a new event to its answer on the bus.

        The broker can refuse the message while the queue is full. Then it is sent again.
        """
        event, decision = await self.schedule()
        message_id = uuid.uuid4().hex
        hold = orjson.dumps({**decision, "decision": "hold"})
        header = Basic.Properties(message_id=message_id, user_id="honest", delivery_mode=2)
        began = time.monotonic()

        async def is_taken() -> bool:
            return not await self.honest.publish_all(
                self.bus.approvals_exchange, KEY, hold, [header]
            )

        await eventually(is_taken, within=120)
        await self.bus.wait_for_event("approval.recorded", cause=message_id, within=120)
        seconds = time.monotonic() - began
        self.sim.cancel(event)
        return seconds

    async def ask_health(self, _: dict[str, Any]) -> float:
        """Return the seconds that /healthz takes, on a new connection."""
        began = time.monotonic()
        status, _body = await self.process.call("GET", "/healthz")
        assert status == 200
        return time.monotonic() - began

    async def measure(self, decision: dict[str, Any], go_on: Callable[[Figures], bool]) -> Figures:
        """Repeat all honest actions side by side, and sample the sizes."""
        figures = Figures()
        actions: list[tuple[list[float], Callable[[dict[str, Any]], Awaitable[float]]]] = [
            (figures.notices, self.notice),
            (figures.holds_over_http, self.hold_over_http),
            (figures.holds_over_amqp, self.hold_over_amqp),
            (figures.health, self.ask_health),
        ]

        async def repeat(
            samples: list[float], action: Callable[[dict[str, Any]], Awaitable[float]]
        ) -> None:
            while go_on(figures):
                samples.append(await action(decision))
                await asyncio.sleep(0.25)  # an honest client stays below its rate

        async def watch_sizes() -> None:
            while go_on(figures):
                figures.memory = max(figures.memory, self.memory())
                figures.state = max(figures.state, self.state())
                await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as group:
            group.create_task(watch_sizes())
            for samples, action in actions:
                group.create_task(repeat(samples, action))
        return figures

    def started(self) -> list[str]:
        return [event_id for call in self.sim.start_requests for event_id in call.event_ids]

    def memory(self) -> int:
        assert self.process.process is not None
        status = Path(f"/proc/{self.process.process.pid}/status").read_text()
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert resident is not None
        return int(resident[1]) * 1024

    def state(self) -> int:
        """Return the size of the state file and of the files beside it in bytes."""
        total = 0
        for file in self.process.directory.glob("relay.db*"):
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    async def flood(self, decision: dict[str, Any]) -> tuple[Report, Figures]:
        """Let the weak clients attack, and measure meanwhile."""
        attack = Attack(
            port=self.process.port,
            clients=self.weak,
            event_id=decision["eventId"],
            revision=decision["revision"],
            requests=REQUESTS,
            messages=MESSAGES,
            exchange=self.bus.approvals_exchange,
            routing_key=KEY,
        )
        attackers = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.journey.weak_clients",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            talk = asyncio.create_task(attackers.communicate(orjson.dumps(attack)))
            figures = await self.measure(decision, lambda _: not talk.done())
            output, _ = await talk
            assert await attackers.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                attackers.kill()
        return Report(**orjson.loads(output)), figures


def define_weak_clients(node: Broker) -> list[tuple[WeakClient, dict[str, Any]]]:
    """Make four clients that may only read, and four whose machines are others, in the broker too.

    Return each with its section of the configuration.
    """
    found = []
    names = [f"{kind}-{number}" for number in range(4) for kind in ("reader", "outsider")]
    everything = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    node.define(
        {
            "users": [{"name": name, "password": name, "tags": ""} for name in (*names, "honest")],
            "permissions": [{"user": name, **everything} for name in (*names, "honest")],
        }
    )
    for number, name in enumerate(names):
        secret = f"{CLIENT_SECRET[:-3]}{number}o="
        weak = WeakClient(
            name=name,
            key=f"imdsr_bearer-test-key-of-{name}",
            secret=secret,
            amqp_url=node.amqp_url(name),
        )
        rights: dict[str, Any] = {"can": ["read"]}
        if name.startswith("outsider"):
            rights = {"can": ["read", "approve", "hold"], "resources": ["db-*"]}
        found.append((weak, client(name, key=weak.key, secrets=[secret], amqp_user=name, **rights)))
    return found


@asynccontextmanager
async def scene(node: Broker, folder: Path) -> AsyncIterator[Scene]:
    """Run a relay with a webhook and RabbitMQ in both directions."""
    clients = define_weak_clients(node)
    bus = Bus(node, unused_exchange())
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
        box = await stack.enter_async_context(inbox())
        honest = client("honest", key=HONEST_KEY, amqp_user="honest", can=["approve", "hold"])
        voters = [section["name"] for _, section in clients if "approve" in section["can"]]
        rule = {
            "name": "reboots",
            "match": {"event_type": ["Reboot"]},
            "approve": {"votes": 1, "from": [f"client:{name}" for name in ("honest", *voters)]},
        }
        amqp_url = node.amqp_url()
        document = {
            "scope": SCOPE,
            "relay": "vm-0",
            "source": {"url": sim.url},
            "sinks": [
                webhook(box.url),
                {"kind": "rabbitmq", "name": "bus", "url": amqp_url, "exchange": bus.exchange},
            ],
            "approvals": {"amqp": {"url": amqp_url}, "tell_first": "0s", "rules": [rule]},
            "api": {
                "clients": [honest, *(section for _, section in clients)],
            },
        }
        process = await stack.enter_async_context(relay(folder, document))
        await process.start()

        async def is_consuming() -> bool:
            with contextlib.suppress(ChannelNotFoundEntity):
                return (await bus.waiting())[1] == 1
            return False

        await eventually(is_consuming, every=0.1)
        # The flood fills the dead letters. Events must not wait for them on their way to this test.
        await bus.listen(stack, dead_letters=False)
        made = Scene(
            sim=sim,
            process=process,
            bus=bus,
            honest=await stack.enter_async_context(RawChannel(node.amqp_url("honest"))),
            box=box,
            weak=[client for client, _ in clients],
        )
        box.on_event = made.note_arrival
        yield made


@pytest.mark.skipif(not CHAOS, reason="takes minutes: make chaos-tests")
@pytest.mark.timeout(900)
async def test_known_clients_without_rights_delay_nobody_and_leave_little(
    own_broker: Broker, tmp_path: Path
) -> None:
    async with scene(own_broker, tmp_path) as stage:
        _, target = await stage.schedule()
        last, vote = await stage.schedule()
        normal = await stage.measure(target, lambda now: len(now.notices) < NORMAL_SAMPLES)
        report, flooded = await stage.flood(target)
        # It was a flood: everything was sent, and no decision was accepted.
        assert sum(report.statuses.values()) == REQUESTS
        assert report.messages == MESSAGES
        assert report.statuses.get("429", 0) > 0
        assert "202" not in report.statuses
        assert report.streams >= 32
        assert not [status for status in report.statuses if status.startswith("5")]
        for name, samples in flooded.times.items():
            assert samples
            assert max(samples) < max(normal.times[name]) + LATEST, name
        assert flooded.memory < normal.memory + MAX_GROWTH_OF_MEMORY
        assert flooded.state < normal.state + MAX_GROWTH_OF_STATE
        assert stage.started() == []
        # A vote of the honest client counts, and is the only one.
        headers = {"Authorization": f"Bearer {HONEST_KEY}"}
        status, _ = await stage.process.call("POST", "/v1/approvals", vote, headers)
        assert status == 202
        await stage.sim.wait_until_approved(last, within=60)
        assert stage.started() == [last.event_id]
        assert await stage.process.stop() == 0
        assert "Traceback" not in stage.process.log
        with contextlib.closing(open_for_reading(stage.process.store)) as reader:
            verify_journal(reader)
