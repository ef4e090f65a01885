"""``demo``: shows the relay's main job from end to end on this machine alone.

It starts a simulated Azure, a webhook receiver and a relay, and follows one event from its
announcement to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, TypeVar

from aiohttp import web

from relay.app import start_relay
from relay.cli._exit_codes import CommandFailed
from relay.cli._options import option
from relay.cli._output import format_local_time, pluralize, print_lines
from relay.cli.client import connect
from relay.cli.decide import decide
from relay.cli.init import make_random_bearer_key, new_signing_secret
from relay.clock import Clock, SystemClock
from relay.config import Config
from relay.events.cloudevent import CloudEvent
from relay.signals import run_until_stopped
from relay.signature import SignatureRefused, verify
from relay.simulator import VM, Plan, Setup, Simulator
from relay.store.chain import verify_journal
from relay.store.file import open_for_reading

T = TypeVar("T")
STEP_TIMEOUT: Final = 10.0
"""Seconds that one step may take."""
_VM_NAME = "demo-vm"


def demo(
    *,
    stay: Annotated[
        bool, option("--stay", None, "Keep running afterwards for your own trials, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the main job on this machine alone: no Azure, no broker, nothing to set up.

    A simulated Azure announces a reboot. The relay tells a webhook receiver, a client approves
    over the HTTP API, Azure starts the event and ends it. The demo takes some seconds.
    """
    was_stopped = asyncio.run(run_until_stopped(run_demo(stay=stay)))
    if was_stopped and not stay:
        raise CommandFailed("stopped before the demo had ended")


class WebhookReceiver:
    """Keeps each event once, and calls ``on_event`` with each new one."""

    def __init__(self, secret: str, clock: Clock, on_event: Callable[[CloudEvent], None]) -> None:
        self.url = ""
        self.events: dict[str, CloudEvent] = {}
        """The events received, by their id."""
        self.rejected_requests = 0
        """How many requests had no valid signature."""
        self._secret = secret
        self._clock = clock
        self._on_event = on_event
        self._received = asyncio.Event()

    async def wait_for(self, name: str, event_id: str) -> CloudEvent:
        """Wait for the event with this ``<family>.<change>`` and EventId."""
        while True:
            self._received.clear()
            for event in self.events.values():
                if (event.name, event.subject) == (name, event_id):
                    return event
            await self._received.wait()

    async def handle(self, request: web.Request) -> web.Response:
        """Answer 204, or 401 to a request without a valid signature."""
        body = await request.read()
        try:
            verify([self._secret], request.headers, body, self._clock.now())
        except SignatureRefused:
            self.rejected_requests += 1
            return web.Response(status=401)
        event = CloudEvent.parse(body)
        if event.id not in self.events:
            self.events[event.id] = event
            self._on_event(event)
            self._received.set()
        return web.Response(status=204)


@asynccontextmanager
async def start_webhook_receiver(
    secret: str, clock: Clock, on_event: Callable[[CloudEvent], None]
) -> AsyncIterator[WebhookReceiver]:
    """Yield a receiver that listens on a free port of the loopback interface."""
    receiver = WebhookReceiver(secret, clock, on_event)
    application = web.Application()
    application.router.add_post("/", receiver.handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        yield receiver
    finally:
        await runner.cleanup()


class _Steps:
    """Prints each step as it happens, with the seconds since the start and since the last step."""

    def __init__(self, patience: float) -> None:
        self.started_at = self._last_at = time.monotonic()
        self.are_done = False
        """Whether the last step is done. Until then the steps are printed in a fixed order."""
        self.patience = patience

    def print(self, text: str) -> None:
        """Print a step that is done."""
        now = time.monotonic()
        seconds = now - self._last_at
        took = f"+{seconds:.2f} s" if seconds >= 1 else f"+{seconds * 1000:.0f} ms"
        print_lines(f"{now - self.started_at:6.2f} s  {took:>8}  {text}")
        self._last_at = now

    def print_received(self, event: CloudEvent) -> None:
        """Print that the receiver has verified a CloudEvent."""
        self.print(f"the receiver has {event.name}, its signature is good")

    async def wait(self, description: str, work: Awaitable[T]) -> T:
        """Wait for a step. Raises CommandFailed if it takes longer."""
        try:
            async with asyncio.timeout(self.patience):
                return await work
        except TimeoutError as error:
            raise CommandFailed(
                f"expected {description} within {self.patience:g} s, it did not come"
            ) from error


async def run_demo(*, stay: bool, patience: float = STEP_TIMEOUT) -> None:
    """Run the demo. Raises CommandFailed if a step does not come in ``patience`` seconds."""
    steps = _Steps(patience)
    clock = SystemClock()
    key, secret = make_random_bearer_key(), new_signing_secret()

    def on_event(event: CloudEvent) -> None:
        if steps.are_done:
            steps.print_received(event)

    with TemporaryDirectory(prefix="imds-relay-demo-") as folder:
        store = Path(folder, "relay.db")
        async with (
            Simulator(Setup(vms=(VM(_VM_NAME),))) as azure,
            start_webhook_receiver(secret, clock, on_event) as receiver,
        ):
            steps.print(f"an Azure is simulated at {azure.url}, with one VM: {_VM_NAME}")
            steps.print(f"a webhook receiver listens at {receiver.url}")
            config = _configuration(azure.url, receiver.url, secret=secret, key=key, store=store)
            async with start_relay(config, clock) as running:
                url = f"http://127.0.0.1:{running.api_port}"
                steps.print(f"the relay runs, its API is at {url}")
                await _follow_one_event(steps, azure, receiver, store, url, key)
                steps.are_done = True
                if stay:
                    event = '{"type": "Reboot", "notice": "5m", "lasts": "30s"}'
                    print_lines(
                        "\nThe relay runs until Ctrl-C. In another terminal:",
                        f"  export IMDS_RELAY_URL={url} IMDS_RELAY_KEY={key}",
                        "  imds-relay tail",
                        f"  curl {azure.url}/sim/schedule -d '{event}'",
                        "  imds-relay events",
                        "  imds-relay approve <event>",
                        f"Or open {url}/ in a browser, and enter the key from above.\n",
                    )
                    await asyncio.Event().wait()


def _configuration(
    azure_url: str, receiver_url: str, *, secret: str, key: str, store: Path
) -> Config:
    webhook = {
        "kind": "webhook",
        "name": "receiver",
        "url": receiver_url,
        "secrets": [secret],
        "allow_http": True,
    }
    rules = [
        {"name": "user-initiated", "match": {"event_source": ["User"]}, "approve": "automatic"},
        {"name": "everything-else", "approve": {"votes": 1, "from": ["client:operator"]}},
    ]
    operator = {"name": "operator", "key": key, "can": ["read", "approve", "hold", "operate"]}
    return Config.model_validate(
        {
            "source": {"url": azure_url, "interval": "500ms"},
            "store": {"path": store},
            "sinks": [webhook],
            "approvals": {"rules": rules},
            "api": {"listen": "127.0.0.1:0", "socket": None, "clients": [operator]},
        }
    )


async def _follow_one_event(
    steps: _Steps, azure: Simulator, receiver: WebhookReceiver, store: Path, url: str, key: str
) -> None:
    """Let Azure schedule an event, approve it, and wait until it has started and ended."""
    planned = azure.schedule(Plan(type="Reboot", starts_after=1.0, lasts=2.0))
    event_id = planned.event_id

    async def received(name: str) -> CloudEvent:
        event = await steps.wait(f"{name} at the receiver", receiver.wait_for(name, event_id))
        steps.print_received(event)
        return event

    not_before = format_local_time(planned.not_before.isoformat())
    steps.print(f"Azure announces a Reboot of {_VM_NAME}, not before {not_before}")
    await received("event.scheduled")
    async with connect(url=url, key=key) as relay:
        event: dict[str, Any] = await relay.get("events", event_id)
        approval = event["approval"]
        missing = pluralize(approval["missing"], "vote")
        steps.print(f"GET /v1/events/{event_id[:8]}…: {approval['state']}, {missing} missing")
        answer = await decide(relay, event, "approve", reason="drained")
    steps.print(
        f"POST /v1/approvals by client:operator: {answer['state']}, "
        f"{answer['votes']} of {answer['required']} votes"
    )
    if answer["state"] != "granted":
        raise CommandFailed(f"expected the approval to be granted, it is {answer['state']}")
    await received("approval.recorded")
    await received("approval.granted")
    await steps.wait(
        "a StartRequest at Azure", azure.wait_until_approved(event_id, within=steps.patience)
    )
    steps.print("Azure has the StartRequest")
    await received("startrequest.accepted")
    await steps.wait(
        "the event to start", azure.wait_until_started(event_id, within=steps.patience)
    )
    steps.print("Azure starts the event")
    await received("event.started")
    await steps.wait("the event to end", azure.wait_for(event_id, "gone", within=steps.patience))
    steps.print("the event is over, Azure shows it no more")
    ended = await received("event.ended")
    if receiver.rejected_requests:
        raise CommandFailed(
            f"expected only valid signatures, {receiver.rejected_requests} were not valid"
        )
    with closing(open_for_reading(store)) as connection:
        head, count = verify_journal(connection)
    steps.print(f"the journal has {count} rows, and its hash chain holds: {head.hash[:16]}…")
    print_lines(
        f"done in {time.monotonic() - steps.started_at:.1f} s: "
        f"told in {len(receiver.events)} signed CloudEvents, "
        f"approved by client:operator, {ended.data['outcome']}"
    )
