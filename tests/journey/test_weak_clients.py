"""Known clients without rights flood every way in at once; nobody else waits, and little is kept.

There are 100,000 requests, 20,000 of them over AMQP, so only `make chaos-tests` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from pamqp.commands import Basic

from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.depth import CHAOS
from tests.eventually import eventually
from tests.journey.bus import KEY, RULE, Bus, System, relay_document, unused_exchange
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
    """Seconds that each honest action took, by its name, and the largest sizes in bytes."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    memory: int = 0
    state: int = 0


@dataclass(slots=True, kw_only=True)
class Scene:
    """A relay in its own process, its surroundings, and an honest client."""

    system: System
    process: RelayProcess
    honest: RawChannel
    """The connection of the honest client to the broker."""
    box: Inbox
    weak: list[WeakClient]
    arrivals: dict[tuple[str, str], float] = field(default_factory=dict)
    """When the webhook first got each type of event about each EventId."""

    async def schedule(self) -> tuple[Event, dict[str, Any]]:
        """Schedule a reboot. Return it, and the decision that approves it."""
        return await self.system.schedule_reboot(notice=7200.0)

    def note_arrival(self, event: dict[str, Any]) -> None:
        self.arrivals.setdefault((name_of(event), str(event.get("subject"))), time.monotonic())

    async def notice(self) -> float:
        """Return the seconds from a change in Azure to its arrival at the webhook."""
        event = self.system.sim.schedule(Plan(type="Freeze", resources=("vm-0",), lasts=None))
        began = time.monotonic()
        key = ("event.scheduled", event.event_id)
        await eventually(lambda: key in self.arrivals, within=120)
        self.system.sim.cancel(event)
        return self.arrivals[key] - began

    async def hold_over_http(self) -> float:
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
        self.system.sim.cancel(event)
        return seconds

    async def hold_over_amqp(self) -> float:
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
                self.system.bus.approvals_exchange, KEY, hold, [header]
            )

        await eventually(is_taken, within=120)
        await self.system.bus.wait_for_event("approval.recorded", cause=message_id, within=120)
        seconds = time.monotonic() - began
        self.system.sim.cancel(event)
        return seconds

    async def ask_health(self) -> float:
        """Return the seconds that /healthz takes, on a new connection."""
        began = time.monotonic()
        status, _body = await self.process.call("GET", "/healthz")
        assert status == 200
        return time.monotonic() - began

    async def measure(self, go_on: Callable[[Figures], bool]) -> Figures:
        """Repeat all honest actions side by side, and sample the sizes."""
        figures = Figures()

        async def repeat(action: Callable[[], Awaitable[float]]) -> None:
            while go_on(figures):
                figures.times[action.__name__].append(await action())
                await asyncio.sleep(0.25)  # an honest client stays below its rate

        async def watch_sizes() -> None:
            while go_on(figures):
                figures.memory = max(figures.memory, self.process.memory())
                figures.state = max(figures.state, self.state())
                await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as group:
            group.create_task(watch_sizes())
            for action in (self.notice, self.hold_over_http, self.hold_over_amqp, self.ask_health):
                group.create_task(repeat(action))
        return figures

    def started(self) -> list[str]:
        return [event_id for call in self.system.sim.start_requests for event_id in call.event_ids]

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
            exchange=self.system.bus.approvals_exchange,
            routing_key=KEY,
        )
        program = (sys.executable, "-m", "tests.journey.weak_clients")
        pipe = asyncio.subprocess.PIPE
        attackers = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe)
        try:
            talk = asyncio.create_task(attackers.communicate(orjson.dumps(attack)))
            figures = await self.measure(lambda _: not talk.done())
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
    for name in (*names, "honest"):
        node.add_user(name, name)
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
        names = [f"client:{name}" for name in ("honest", *voters)]
        document = relay_document(node, bus.exchange)
        document["source"] = {"url": sim.url}
        document["sinks"].append(webhook(box.url))
        document["approvals"]["rules"] = [RULE | {"approve": {"votes": 1, "from": names}}]
        document["api"] = {"clients": [honest, *(section for _, section in clients)]}
        process = await stack.enter_async_context(relay(folder, document))
        await process.start()

        system = System(sim, bus)
        await eventually(system.is_consuming, every=0.1)
        # The flood fills the dead letters. Events must not wait for them on their way to this test.
        await bus.listen(stack, dead_letters=False)
        made = Scene(
            system=system,
            process=process,
            honest=await stack.enter_async_context(RawChannel(node.amqp_url("honest"))),
            box=box,
            weak=[client for client, _ in clients],
        )
        box.on_event = made.note_arrival
        yield made


@pytest.mark.skipif(not CHAOS, reason="takes minutes: make chaos-tests")
@pytest.mark.timeout(900)
async def test_weak_clients_delay_none_and_leave_little(own_broker: Broker, tmp_path: Path) -> None:
    async with scene(own_broker, tmp_path) as stage:
        _, target = await stage.schedule()
        last, vote = await stage.schedule()
        normal = await stage.measure(lambda now: len(now.times["notice"]) < NORMAL_SAMPLES)
        report, flooded = await stage.flood(target)
        # It was a flood: everything was sent, and no decision was accepted.
        assert sum(report.statuses.values()) == REQUESTS
        assert report.messages == MESSAGES
        assert report.statuses.get("429", 0) > 0
        assert "202" not in report.statuses
        assert report.streams >= 32
        assert not [status for status in report.statuses if status.startswith("5")]
        assert flooded.times.keys() == normal.times.keys()
        for name, samples in flooded.times.items():
            assert max(samples) < max(normal.times[name]) + LATEST, name
        assert flooded.memory < normal.memory + MAX_GROWTH_OF_MEMORY
        assert flooded.state < normal.state + MAX_GROWTH_OF_STATE
        assert stage.started() == []
        # A vote of the honest client counts, and is the only one.
        headers = {"Authorization": f"Bearer {HONEST_KEY}"}
        status, _ = await stage.process.call("POST", "/v1/approvals", vote, headers)
        assert status == 202
        await stage.system.sim.wait_until_approved(last, within=60)
        assert stage.started() == [last.event_id]
        assert await stage.process.stop() == 0
        assert "Traceback" not in stage.process.log
        assert stage.process.journal()
