"""A relay for the API to stand before: a real store, gate, dispatcher and server; Azure is what a test says that it is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import aiohttp
import orjson
from standardwebhooks import Webhook
from typing_extensions import override
from yarl import URL

from relay.api import ApiSettings, Relay
from relay.api.server.http_server import Server
from relay.api.server.limits import ServerLimits
from relay.approvals import ApprovalsSettings
from relay.approvals.gate import Gate
from relay.approvals.service import ApprovalService
from relay.clock import SystemClock
from relay.delivery.dispatcher import Dispatcher
from relay.delivery.routing import matching_sinks
from relay.errors import Deferred, Rejected
from relay.events.build import Origin, relay_event
from relay.events.cloudevent import CloudEvent
from relay.events.model import Document, Event
from relay.events.timestamps import format_rfc3339
from relay.ingest.recorder import PollResult, Recorder
from relay.outbox import Identity, StoreSettings
from relay.outbox.sqlite import Store, open_store
from relay.sinks import Receipt, SinkSettings
from tests.api.openapi_oracle import Description

T = TypeVar("T")
SCOPE = "prod-vmss-a-1f0c33ab"
ORIGIN = Origin(SCOPE, "westno-0")
EVENT_ID = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
OTHER_SECRET = "whsec_AfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="

ALICE = {"name": "alice", "key": "key-of-alice", "can": ["read", "approve", "hold", "operate"]}
BOB = {"name": "bob", "key": "key-of-bob", "can": ["read", "approve", "hold"]}
DRAIN = {"name": "drain", "secrets": [SECRET], "can": ["approve", "hold"], "key": "key-of-drain"}
READER = {"name": "reader", "key": "key-of-reader", "can": ["read"]}
MUTE = {"name": "mute", "key": "key-of-mute", "can": []}
DATABASES = {
    "name": "databases",
    "key": "key-of-databases",
    "can": ["read", "approve", "hold"],
    "resources": ["db-*"],
}
CLIENTS = (ALICE, BOB, DRAIN, READER, MUTE, DATABASES)

TWO_VOTES = {
    "name": "two",
    "match": {"event_type": ["Reboot"]},
    "approve": {
        "votes": 2,
        "from": ["group:oncall", "client:drain", "client:databases"],
        "close_before": "60s",
    },
}
AUTOMATIC = {"name": "harmless", "match": {"event_type": ["Freeze"]}, "approve": "automatic"}
APPROVALS = {
    "tell_first": "0s",
    "rules": [TWO_VOTES, AUTOMATIC],
    "groups": {"oncall": ["client:alice", "client:bob"]},
}


async def eventually(condition: Callable[[], bool], *, within: float = 60.0) -> None:
    """Wait until the condition holds. Raises TimeoutError where it takes too long."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.005)


async def until(look: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """Look until it holds of what is seen, and return that. Raises TimeoutError where it takes too long."""
    async with asyncio.timeout(60):
        while True:
            found = await look()
            if holds(found):
                return found
            await asyncio.sleep(0.02)


class Shifted(SystemClock):
    """The machine's clocks, moved ahead by as many seconds as a test says; the one for intervals can be stopped."""

    ahead = 0.0
    _stopped: float | None = None

    @override
    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.ahead)

    @override
    def monotonic(self) -> float:
        return (super().monotonic() if self._stopped is None else self._stopped) + self.ahead

    def stop(self) -> None:
        """From now on no interval passes by itself.

        It stops at a whole second. With fractions, `(now + 300.0) - now` can be a little less than 300.0: floats are rounded.
        """
        self._stopped = float(math.ceil(super().monotonic()))


@dataclass(slots=True)
class Azure:
    """The way to IMDS: remembers what it was asked to start. ``lost``, ``polls`` and ``failures`` are the poller's."""

    started: list[tuple[str, ...]] = field(default_factory=list)
    lost: bool = False
    polls: int = 7
    failures: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, a StartRequest hangs on its way."""

    def __post_init__(self) -> None:
        self.open.set()

    async def read_fresh(self) -> None:
        """Nothing has changed."""

    async def start(self, event_ids: Sequence[str]) -> None:
        """Accepted."""
        self.started.append(tuple(event_ids))
        await self.open.wait()


class BoxSettings(SinkSettings):
    """A sink of these tests."""

    kind: Literal["box"] = "box"


@dataclass(slots=True)
class Box:
    """A sink that keeps what it gets, or fails as it is told."""

    got: list[CloudEvent] = field(default_factory=list)
    trouble: Deferred | Rejected | None = None
    concurrency: int = 4
    longest_pause: float = 300.0
    give_up_after: float = 86400.0

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Keep it."""
        if self.trouble is not None:
            raise self.trouble
        self.got.append(event)
        return Receipt(204)

    def names(self) -> list[str]:
        """What came."""
        return [event.name for event in self.got]


@dataclass(slots=True)
class Answer:
    """What a call was answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, read."""
        return orjson.loads(self.body)


@dataclass(slots=True)
class Running:
    """A relay that runs, and how to call it."""

    server: Server
    store: Store
    gate: Gate
    dispatcher: Dispatcher
    relay: Relay
    azure: Azure
    clock: Shifted
    boxes: dict[str, Box]
    session: aiohttp.ClientSession

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        by: str | None = "alice",
        headers: Mapping[str, str] | None = None,
        session: aiohttp.ClientSession | None = None,
    ) -> Answer:
        """Call the API with a client's key, and compare the answer with the description in /openapi.json."""
        sent = {"Authorization": f"Bearer key-of-{by}"} if by is not None else {}
        data = body if isinstance(body, bytes) or body is None else orjson.dumps(body)
        if data is not None:
            sent["Content-Type"] = "application/json"
        url = URL(f"http://127.0.0.1:{self.server.port}{path}", encoded=True)
        async with (session or self.session).request(
            method, url, data=data, headers={**sent, **(headers or {})}
        ) as response:
            answer = Answer(response.status, response.headers, await response.read())
        (await self._description()).check(
            method,
            path.partition("?")[0],
            answer.status,
            answer.headers.get("Content-Type", ""),
            answer.body,
        )
        return answer

    async def _description(self) -> Description:
        if not _DESCRIPTION:
            async with self.session.get(
                f"http://127.0.0.1:{self.server.port}/openapi.json"
            ) as described:
                _DESCRIPTION.append(Description(await described.json()))
        return _DESCRIPTION[0]

    async def decide(
        self,
        decision: str = "approve",
        *,
        by: str = "alice",
        headers: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> Answer:
        """POST /v1/approvals about the event of `document`, with ``changes`` to the body; None takes a field away."""
        return await self.call(
            "POST", "/v1/approvals", self.wish(decision, **changes), by=by, headers=headers
        )

    def wish(self, decision: str = "approve", **changes: Any) -> dict[str, Any]:
        """The body of a decision about `event()`."""
        body = {"eventId": EVENT_ID, "decision": decision, "revision": event().revision} | changes
        return {name: value for name, value in body.items() if value is not None}

    async def callback(
        self, body: bytes, *, client: str = "drain", secret: str = SECRET, **headers: str | None
    ) -> Answer:
        """POST /v1/callbacks/{client} as the reference library signs it; ``headers`` (with _ for -) replace or, with None, take away."""
        now = datetime.now(UTC)
        signed: dict[str, str | None] = {
            "webhook-id": "msg_1",
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Webhook(secret).sign("msg_1", now, body.decode("latin-1"))
            if body.isascii()
            else "v1,",
        }
        signed |= {name.replace("_", "-"): value for name, value in headers.items()}
        kept = {name: value for name, value in signed.items() if value is not None}
        return await self.call("POST", f"/v1/callbacks/{client}", body, by=None, headers=kept)

    def spoil_disk(self) -> None:
        """From now on nothing can be written, as on a disk that was mounted read-only after an error."""
        self.store._opened.connection.execute("PRAGMA query_only = ON")  # noqa: SLF001  # how SQLite is made to fail

    async def see(self, *events: Event) -> None:
        """Azure's document holds these events, and the relay has read it."""
        recorder = Recorder(ORIGIN, "boot", frozenset({"westno-0"}))
        sighting = PollResult(Document(1, events), self.clock.now(), gap=False)
        await self.store.transact(lambda tx: recorder.record(tx, sighting))

    async def said(self, name: str) -> list[dict[str, Any]]:
        """What was journalled under this name, oldest first."""
        found = await self.store.read(lambda tx: tx.journal.events_after(0, 10_000))
        return [orjson.loads(said.body) for _, said in found if said.name == name]


def event(**changes: Any) -> Event:
    """A reboot of two machines, two hours from when these tests were begun."""
    fields: dict[str, Any] = {
        "event_id": EVENT_ID,
        "event_type": "Reboot",
        "event_status": "Scheduled",
        "resource_type": "VirtualMachine",
        "resources": ("WestNO_0", "WestNO_1"),
        "not_before": format_rfc3339(_BEGUN + timedelta(hours=2)),
        "description": "Host maintenance: påvirker «WestNO»",
        "event_source": "Platform",
        "duration": 5,
    }
    return Event(**fields | changes)


_DESCRIPTION: list[Description] = []
"""/openapi.json, once it was asked for: it is the same of every relay."""
_BEGUN = datetime.now(UTC).replace(microsecond=0)


@asynccontextmanager
async def running(
    folder: Path,
    *,
    approvals: Mapping[str, Any] | None = None,
    sinks: Sequence[str] = ("box",),
    attached: bool = True,
    limits: ServerLimits | None = None,
    **api: Any,
) -> AsyncIterator[Running]:
    """A relay whose API listens on a free port of loopback. ``approvals`` and ``api`` are its sections of the YAML document."""
    settings = ApiSettings.model_validate({"listen": "127.0.0.1:0", "clients": CLIENTS} | api)
    rules = ApprovalsSettings.model_validate({**APPROVALS, **(approvals or {})})
    clock, azure = Shifted(), Azure()
    boxes = {name: Box() for name in sinks}
    kinds = [BoxSettings(name=name) for name in sinks]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(settings, clock, limits))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        store = await stack.enter_async_context(
            open_store(
                StoreSettings(path=folder / "relay.db"),
                Identity(SCOPE, "vm"),
                clock,
                lambda said: tuple(matching_sinks(said, kinds)),
            )
        )

        def say(name: str, sink: str | None, reason: str, count: int) -> None:
            at = clock.now()
            store.submit(
                lambda tx: tx.record(
                    relay_event(
                        name, ORIGIN, at, sink=sink, reason=reason, count=count, head=str(tx.head())
                    ),
                    at,
                ),
                fail_open=True,
            )

        dispatcher = Dispatcher(
            {one.name: (one, boxes[one.name]) for one in kinds}, store, clock, say
        )
        await dispatcher.start()
        gate = Gate(
            ApprovalService(rules, ORIGIN, client_resources=settings.client_resources),
            store,
            azure,
            clock,
            lambda _: True,
        )
        relay = Relay(
            store=store,
            gate=gate,
            dispatcher=dispatcher,
            source=azure,
            origin=ORIGIN,
            clock=clock,
        )
        async with _beside(gate.run(), dispatcher.run()):
            if attached:
                server.attach(relay)
            yield Running(server, store, gate, dispatcher, relay, azure, clock, boxes, session)
            server.detach()


class _beside:  # noqa: N801  # reads as what it does
    """Runs these while the context is entered."""

    def __init__(self, *work: Awaitable[None]) -> None:
        self._tasks = [asyncio.ensure_future(one) for one in work]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        done, _ = await asyncio.wait(self._tasks)
        for task in done:
            if not task.cancelled():
                task.result()
