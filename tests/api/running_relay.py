"""Runs a relay behind its API: a real store, gate, dispatcher and server.

The tests play Azure: they say which events its document holds, and see the StartRequests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import aiohttp
import orjson
from standardwebhooks import Webhook
from yarl import URL

from relay.api.connections import ServerLimits
from relay.api.server import Server
from relay.api.settings import ApiSettings
from relay.api.state import Relay
from relay.approvals import ApprovalsSettings, ClaimedGrant
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.clock import Histogram
from relay.delivery.dispatcher import Dispatcher, matching_sinks
from relay.errors import Deferred, Rejected
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.model import Document, ScheduledEvent
from relay.events.timestamps import format_rfc3339
from relay.ingest import EventNews, Recorder, SuccessfulPoll
from relay.roles.parts import make_relay_event_recorder
from relay.sinks import Receipt, SinkSettings
from relay.store import Grant, StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import Store, open_store
from tests.api.openapi_oracle import Description
from tests.background_tasks import BackgroundTasks
from tests.clocks import ShiftedClock

T = TypeVar("T")
SCOPE = "prod-vmss-a-1f0c33ab"
ORIGIN = Origin(SCOPE, "westno-0")
EVENT_ID = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
OTHER_SECRET = "whsec_AfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="


def client(name: str, *can: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "key": f"bearer-test-key-of-{name}", "can": can, **more}


CLIENTS = (
    client("alice", "read", "approve", "hold", "operate"),
    client("bob", "read", "approve", "hold"),
    client("drain", "approve", "hold", secrets=[SECRET]),
    client("reader", "read"),
    client("mute"),
    client("databases", "read", "approve", "hold", resources=["db-*"]),
)
VOTERS = ["group:oncall", "client:drain", "client:databases"]
QUORUM = {"votes": 2, "from": VOTERS, "close_before": "60s"}
TWO_VOTES = {"name": "two", "match": {"event_type": ["Reboot"]}, "approve": QUORUM}
AUTOMATIC = {"name": "harmless", "match": {"event_type": ["Freeze"]}, "approve": "automatic"}
APPROVALS = {
    "tell_first": "0s",
    "rules": [TWO_VOTES, AUTOMATIC],
    "groups": {"oncall": ["client:alice", "client:bob"]},
}


@dataclass(slots=True)
class ScriptedAzure:
    """Stands in for IMDS and the poller, and records the StartRequests."""

    started: list[str] = field(default_factory=list)
    started_in: list[str] = field(default_factory=list)
    """The scope of each StartRequest."""
    lost: bool = False
    polls: int = 7
    failures: int = 0
    lost_reason: str = "the metadata service gives no usable answer"
    poll_seconds: Histogram | None = None
    read_age: float | None = None
    clock_offset: float | None = None
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, StartRequests get no response."""

    def __post_init__(self) -> None:
        self.may_answer.set()

    async def refresh_event(self, _scope: str, _grant: Grant) -> None:
        """Return: the document has not changed."""

    def choose_agent(self, _scope: str, _grant: Grant) -> None:
        """IMDS itself executes each StartRequest."""

    async def send_start_request(self, scope: str, claim: ClaimedGrant) -> None:
        self.started_in.append(scope)
        self.started.append(claim.event_id)
        await self.may_answer.wait()


class RecordingSinkSettings(SinkSettings):
    kind: str = "box"


@dataclass(slots=True)
class RecordingSink:
    """A sink that records its events, or raises `failure`."""

    delivered: list[CloudEvent] = field(default_factory=list)
    failure: Deferred | Rejected | None = None
    concurrency: int = 4
    longest_pause: float = 300.0
    give_up_after: float = 86400.0

    async def deliver(self, event: CloudEvent) -> Receipt:
        if self.failure is not None:
            raise self.failure
        self.delivered.append(event)
        return Receipt(204)

    def delivered_names(self) -> list[str]:
        return [event.name for event in self.delivered]


@dataclass(slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass(slots=True, kw_only=True)
class RunningRelay:
    """A running relay with its parts, and a client for its API."""

    server: Server
    store: Store
    gate: Gate
    dispatcher: Dispatcher
    relay: Relay
    azure: ScriptedAzure
    clock: ShiftedClock
    sinks: dict[str, RecordingSink]
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
    ) -> Response:
        """Call the API with a client's key, and check the response against /openapi.json."""
        sent = {"Authorization": f"Bearer bearer-test-key-of-{by}"} if by is not None else {}
        data = body if isinstance(body, bytes) or body is None else orjson.dumps(body)
        if data is not None:
            sent["Content-Type"] = "application/json"
        url = URL(f"http://127.0.0.1:{self.server.port}{path}", encoded=True)
        async with (session or self.session).request(
            method, url, data=data, headers={**sent, **(headers or {})}, allow_redirects=False
        ) as response:
            answer = Response(response.status, response.headers, await response.read())
        description, media = await self._description(), answer.headers.get("Content-Type", "")
        description.check(method, path.partition("?")[0], answer.status, media, answer.body)
        return answer

    async def _description(self) -> Description:
        if not _DESCRIPTION:
            url = f"http://127.0.0.1:{self.server.port}/openapi.json"
            async with self.session.get(url) as described:
                _DESCRIPTION.append(Description(await described.json()))
        return _DESCRIPTION[0]

    async def decide(
        self,
        decision: str = "approve",
        *,
        by: str = "alice",
        headers: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> Response:
        """POST /v1/approvals about `make_event()`. A change to None removes a field."""
        return await self.call(
            "POST", "/v1/approvals", self.decision_body(decision, **changes), by=by, headers=headers
        )

    def decision_body(self, decision: str = "approve", **changes: Any) -> dict[str, Any]:
        revision = make_event().revision
        body = {"eventId": EVENT_ID, "decision": decision, "revision": revision} | changes
        return {name: value for name, value in body.items() if value is not None}

    async def hold_ahead(
        self, *, seconds: float = 600.0, headers: Mapping[str, str] | None = None, **changes: Any
    ) -> Response:
        """POST /v1/standing-holds: alice holds every event for so long."""
        ends = format_rfc3339(self.clock.now() + timedelta(seconds=seconds))
        body = {"match": {}, "ends": ends, "reason": "sale"} | changes
        return await self.call("POST", "/v1/standing-holds", body, headers=headers)

    def signed(self, body: bytes, secret: str = SECRET) -> dict[str, str]:
        """Return the headers with which the reference library signs a callback now."""
        now, signature = datetime.now(UTC), "v1,"
        if body.isascii():  # the library signs text only
            signature = Webhook(secret).sign("msg_1", now, body.decode())
        timestamp = {"webhook-timestamp": str(int(now.timestamp()))}
        return {"webhook-id": "msg_1", **timestamp, "webhook-signature": signature}

    async def post_callback(
        self, body: bytes, *, client: str = "drain", secret: str = SECRET, **headers: str | None
    ) -> Response:
        """POST /v1/callbacks/{client}, signed by the reference library.

        `headers` (with _ for -) replace a header or, with None, remove it.
        """
        signed: dict[str, str | None] = {**self.signed(body, secret)}
        signed |= {name.replace("_", "-"): value for name, value in headers.items()}
        kept = {name: value for name, value in signed.items() if value is not None}
        return await self.call("POST", f"/v1/callbacks/{client}", body, by=None, headers=kept)

    def use_up_rate(self, client: str | None = None) -> None:
        """Let no call of this client through, or no failed call of this machine; time stands."""
        self.clock.freeze_monotonic()
        rates = self.server.state.rates  # faster than a hundred calls
        buckets, key = rates.addresses, "loopback"
        if client is not None:
            buckets, key = rates.callers, f"client:{client}"
        while not buckets.take(key, self.clock.monotonic()):
            pass

    def make_store_read_only(self) -> None:
        """Make every write fail, as on a disk that was remounted read-only after an error."""
        connection = self.store._state_file.connection  # noqa: SLF001  # no other way to break the disk
        connection.execute("PRAGMA query_only = ON")

    async def observe(self, *events: ScheduledEvent) -> None:
        recorder = Recorder(ORIGIN, "boot", frozenset({"westno-0"}))
        sighting = SuccessfulPoll(Document(1, events), self.clock.now(), gap=False)
        await self.store.transact(lambda tx: recorder.record(tx, sighting))

    async def observe_in(self, scope: str, *events: ScheduledEvent) -> None:
        """Let a hub record that a scope shows these events."""
        now = self.clock.now()
        news = [EventNews(scope, now, event.event_id, event, 1) for event in events]
        recorder = Recorder(ORIGIN, None, None)
        await self.store.transact(lambda tx: recorder.record_observations(tx, news, now))

    def seconds_to_not_before(self) -> float:
        """Return how long it is, by the relay's clock, to NotBefore of `make_event()`."""
        due = make_event().not_before_time
        assert due is not None
        return (due - self.clock.now()).total_seconds()

    async def voters(self) -> list[str]:
        """Return whose decisions were recorded, in order."""
        return [
            event["data"]["principal"] for event in await self.recorded_events("approval.recorded")
        ]

    async def recorded_events(self, name: str) -> list[dict[str, Any]]:
        events = await self.store.read(lambda tx: tx.journal.events_after(0, 10_000))
        return [orjson.loads(event.body) for _, event in events if event.name == name]


def make_event(**changes: Any) -> ScheduledEvent:
    """Return a reboot of two machines, two hours after the start of the test run."""
    fields: dict[str, Any] = {
        "event_id": EVENT_ID,
        "event_type": "Reboot",
        "event_status": "Scheduled",
        "resource_type": "VirtualMachine",
        "resources": ("WestNO_0", "WestNO_1"),
        "not_before": format_rfc3339(_STARTED_AT + timedelta(hours=2)),
        "description": "Host maintenance: påvirker «WestNO»",
        "event_source": "Platform",
        "duration": 5,
    }
    return ScheduledEvent(**fields | changes)


def over_socket(path: Path) -> aiohttp.ClientSession:
    """Return a session whose calls go through a local socket."""
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)))


_DESCRIPTION: list[Description] = []
"""A cache of /openapi.json, which is the same for every relay."""
_STARTED_AT = datetime.now(UTC).replace(microsecond=0)


@asynccontextmanager
async def run_relay(
    folder: Path,
    *,
    approvals: Mapping[str, Any] | None = None,
    sinks: Sequence[str] = ("box",),
    kinds: Mapping[str, str] = MappingProxyType({}),
    attached: bool = True,
    is_hub: bool = False,
    limits: ServerLimits | None = None,
    **api: Any,
) -> AsyncIterator[RunningRelay]:
    """Run a relay whose API listens on a free port of 127.0.0.1.

    `approvals` and `api` are sections of its configuration. The store of a hub has many scopes.
    `kinds` are what some sinks say that they are.
    """
    settings = ApiSettings.model_validate({"listen": "127.0.0.1:0", "clients": CLIENTS} | api)
    rules = ApprovalsSettings.model_validate({**APPROVALS, **(approvals or {})})
    clock, azure = ShiftedClock(), ScriptedAzure()
    recording_sinks = {name: RecordingSink() for name in sinks}
    kinds = dict.fromkeys(sinks, "box") | dict(kinds)
    sink_settings = [RecordingSinkSettings(name=name, kind=kinds[name]) for name in sinks]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(settings, clock, limits))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        path, whose = folder / "relay.db", StateFileScopeAndVm(SCOPE, "vm", is_hub=is_hub)
        route = partial(matching_sinks, sinks=sink_settings)
        store = await stack.enter_async_context(
            open_store(StoreSettings(path=path), whose, clock, route)
        )
        report = make_relay_event_recorder(store, ORIGIN, clock)
        connected = {each.name: (each, recording_sinks[each.name]) for each in sink_settings}
        dispatcher = Dispatcher(connected, store, clock, report)
        await dispatcher.begin()
        resources = settings.resources_by_client_principal
        engine = ApprovalEngine(rules, ORIGIN, client_resources=resources)
        gate = Gate(engine, store, azure, clock, lambda _: True)
        relay = Relay(
            store=store, gate=gate, dispatcher=dispatcher, source=azure, origin=ORIGIN, clock=clock
        )
        stack.enter_context(gate.in_force())
        async with BackgroundTasks(gate.run(), dispatcher.run()):
            if attached:
                server.state.attach_relay(relay)
            yield RunningRelay(
                server=server,
                store=store,
                gate=gate,
                dispatcher=dispatcher,
                relay=relay,
                azure=azure,
                clock=clock,
                sinks=recording_sinks,
                session=session,
            )
            server.state.detach_relay()
