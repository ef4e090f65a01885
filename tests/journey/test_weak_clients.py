"""Known clients without rights flood every way in at once; nobody else waits, and little is kept.

There are 100,000 requests, 20,000 of them over AMQP, so only `make chaos-tests` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from pamqp.commands import Basic

from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.background_tasks import BackgroundTasks
from tests.depth import CHAOS
from tests.eventually import eventually
from tests.journey.bus import KEY, RULE, Bus, System, relay_document, unused_exchange
from tests.journey.relay_process import (
    CLIENT_SECRET,
    RelayProcess,
    client,
    inbox,
    name_of,
    relay,
    signed_headers,
    webhook,
)
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel

REQUESTS, MESSAGES = 80_000, 20_000
NORMAL_SAMPLES = 20
WORKERS = 32
STREAMS = 96
"""More than the relay allows."""
UNREAD = 128
"""Responses that stay open, and that nobody reads."""
UNREAD_PATH = "/v1/deliveries?limit=500#unread"
"""The path of these. Its fragment is not sent."""
MESSAGES_AT_ONCE = 500
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
    weak: list[dict[str, Any]]
    """The sections of the clients without rights."""
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


class Flood:
    """Known clients without rights, who send all that they can over every way in."""

    def __init__(self, stage: Scene, decision: dict[str, Any]) -> None:
        """``decision`` approves an event."""
        self._url = stage.process.url
        self._bus = stage.system.bus
        self._clients = stage.weak
        self._vote = decision
        self.statuses: Counter[int | str] = Counter()
        """Of requests, by status, or how else they ended."""
        self.messages = 0
        self.most_streams = 0
        self._numbers = itertools.count()
        self._progressed = asyncio.Event()
        self._open_streams = 0
        self._unread: deque[aiohttp.ClientResponse] = deque()

    def _session(self, **connector: Any) -> aiohttp.ClientSession:
        """Return a session that makes as many connections as it is asked for."""
        return aiohttp.ClientSession(
            self._url,
            connector=aiohttp.TCPConnector(limit=0, **connector),
            timeout=aiohttp.ClientTimeout(total=30),
        )

    async def run(self) -> None:
        async with (
            self._session() as keeping,
            self._session(force_close=True) as closing,
            BackgroundTasks(*(self._keep_stream(closing, number) for number in range(STREAMS))),
            asyncio.TaskGroup() as senders,
        ):
            for client in self._clients:
                senders.create_task(self._publish(client["name"]))
            for worker in range(WORKERS):
                session = keeping if worker % 2 == 0 else closing
                senders.create_task(self._work(session, worker % 8 in (0, 1)))

    async def _work(self, session: aiohttp.ClientSession, reads: bool) -> None:
        """Send requests.

        Every fourth worker reads: the relay lets it wait, and the others must not wait with it.
        """
        while (number := next(self._numbers)) < REQUESTS:
            path, headers, body = self._request(number, reads)
            method = "GET" if body is None else "POST"
            ended: int | str = "unread"
            try:
                response = await session.request(method, path, headers=headers, data=body)
                if path == UNREAD_PATH:
                    self._unread.append(response)
                    if len(self._unread) > UNREAD:
                        self._unread.popleft().close()
                else:
                    await response.read()
                    ended = response.status
            except (aiohttp.ClientError, TimeoutError) as error:
                ended = type(error).__name__
            self.statuses[ended] += 1
            self._progressed.set()

    def _request(self, number: int, reads: bool) -> tuple[str, dict[str, str], bytes | None]:
        """Return the path of a request, its headers and its body."""
        client = self._clients[number % len(self._clients)]
        callback = f"/v1/callbacks/{client['name']}"
        kinds: tuple[tuple[str, dict[str, str] | None], ...] = (
            ("/v1/approvals", self._vote),
            ("/v1/approvals", {**self._vote, "decision": "hold"}),
            ("/v1/approvals", {**self._vote, "decision": "release"}),
            ("/v1/approvals", {**self._vote, "eventId": f"none-{number}"}),
            ("/v1/approvals", {"a": "b" * 60_000}),
            (callback, self._vote),
        )
        if reads:
            kinds = (
                ("/v1/events", None),
                (f"/v1/events/{self._vote['eventId']}", None),
                ("/v1/deliveries?limit=500", None),
                (UNREAD_PATH, None),
            )
        path, decision = kinds[number // len(self._clients) % len(kinds)]
        headers = {"Authorization": f"Bearer {client['key']}", "Idempotency-Key": str(number)}
        if decision is None:
            return path, headers, None
        body = orjson.dumps(decision)
        if path == callback:
            headers = signed_headers(body, client["secrets"][0], message_id=str(number))
        return path, {**headers, "Content-Type": "application/json"}, body

    async def _keep_stream(self, session: aiohttp.ClientSession, number: int) -> None:
        """Keep an event stream open from the beginning of the journal. Every other is not read."""
        client = self._clients[number % len(self._clients)]
        headers = {"Authorization": f"Bearer {client['key']}", "Last-Event-ID": "0"}
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get("/v1/stream", headers=headers) as response:
                    if response.status == 200:
                        await self._hold_stream(response, is_read=number // 8 % 2 == 0)
            await asyncio.sleep(0.5)

    async def _hold_stream(self, response: aiohttp.ClientResponse, *, is_read: bool) -> None:
        self._open_streams += 1
        self.most_streams = max(self.most_streams, self._open_streams)
        try:
            while is_read and await response.content.readany():
                pass
            if not is_read:
                await asyncio.sleep(30)
        finally:
            self._open_streams -= 1

    async def _publish(self, user: str) -> None:
        """Publish a share of the messages, as the requests progress."""
        share = MESSAGES // len(self._clients)
        decisions = itertools.cycle(("approve", "hold", "release"))
        for start in range(0, share, MESSAGES_AT_ONCE):
            while self.statuses.total() < REQUESTS * start // share:
                self._progressed.clear()
                await self._progressed.wait()
            ids = range(start, min(start + MESSAGES_AT_ONCE, share))
            decision = {**self._vote, "decision": next(decisions)}
            await self._bus.send_all(decision, map(str, ids), user=user)
            self.messages += len(ids)


def define_weak_clients(node: Broker) -> list[dict[str, Any]]:
    """Make four clients that may only read, and four whose machines are others, in the broker too.

    Return their sections of the configuration.
    """
    sections: list[dict[str, Any]] = []
    for number in range(4):
        for kind, rights in (
            ("reader", {"can": ["read"]}),
            ("outsider", {"can": ["read", "approve", "hold"], "resources": ["db-*"]}),
        ):
            name = f"{kind}-{number}"
            node.add_user(name, name)
            secret = f"{CLIENT_SECRET[:-3]}{len(sections)}o="
            key = f"imdsr_bearer-test-key-of-{name}"
            sections.append(client(name, key=key, secrets=[secret], amqp_user=name, **rights))
    return sections


@asynccontextmanager
async def scene(node: Broker, folder: Path) -> AsyncIterator[Scene]:
    """Run a relay with a webhook and RabbitMQ in both directions."""
    weak = define_weak_clients(node)
    node.add_user("honest", "honest")
    bus = Bus(node, unused_exchange())
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
        box = await stack.enter_async_context(inbox())
        honest = client("honest", key=HONEST_KEY, amqp_user="honest", can=["approve", "hold"])
        clients = [honest, *weak]
        voters = [f"client:{each['name']}" for each in clients if "approve" in each["can"]]
        document = relay_document(node, bus.exchange)
        document["source"] = {"url": sim.url}
        document["sinks"].append(webhook(box.url))
        document["approvals"]["rules"] = [RULE | {"approve": {"votes": 1, "from": voters}}]
        document["api"] = {"clients": clients}
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
            weak=weak,
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
        flood = Flood(stage, target)
        flooding = asyncio.create_task(flood.run())
        flooded = await stage.measure(lambda _: not flooding.done())
        await flooding
        # It was a flood: everything was sent, and no decision was accepted.
        assert flood.statuses.total() == REQUESTS
        assert flood.messages == MESSAGES
        assert flood.statuses[429] > 0
        assert 202 not in flood.statuses
        assert flood.most_streams >= 32
        assert not [each for each in flood.statuses if isinstance(each, int) and each >= 500]
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
