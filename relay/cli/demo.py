"""``demo``: the main job from end to end on this machine alone, with a simulated Azure and a receiver that checks."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, TypeVar

import typer

from relay.app import started
from relay.cli._client import Client, connected
from relay.cli._exit_codes import CommandFailed
from relay.cli._output import format_local_time, pluralize, print_output
from relay.cli._signals import until_stopped
from relay.cli._webhook_receiver import Receiver, receiving
from relay.clock import SystemClock
from relay.config import Config
from relay.events.cloudevent import CloudEvent
from relay.outbox.file import open_for_reading
from relay.outbox.journal import verify_journal
from relay.signature import PREFIX
from relay.simulator import VM, Plan, Setup, Simulator

T = TypeVar("T")

STEP: Final = 10.0
"""Seconds that one step may take."""
_NAME = "demo-vm"


def demo(
    *,
    stay: Annotated[
        bool,
        typer.Option("--stay", help="Keep running afterwards, to be played with, until Ctrl-C."),
    ] = False,
) -> None:
    """Show the main job on this machine alone: no Azure, no broker, nothing to set up.

    A simulated Azure announces a reboot. The relay tells a webhook receiver, a client approves over the HTTP API, Azure starts the
    event and ends it. Ends by itself after some seconds.
    """
    if asyncio.run(until_stopped(perform(Steps(), stay=stay))) and not stay:
        raise CommandFailed("stopped before the demo had ended")


@dataclass(slots=True)
class Steps:
    """Prints each step as it happens, with the time since the start and since the step before."""

    began: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)
    ended: bool = False
    """Whether all steps are done. Until then each waits for its turn, so that their order is always the same."""

    def done(self, text: str) -> None:
        """A step is done."""
        now = time.monotonic()
        took = now - self.last
        print_output(
            f"{now - self.began:6.2f} s  {f'+{took:.2f} s' if took >= 1 else f'+{took * 1000:.0f} ms':>8}  {text}"
        )
        self.last = now

    def received(self, name: str) -> None:
        """The receiver has a CloudEvent and has checked its signature."""
        self.done(f"the receiver has {name}, its signature is good")

    async def wait(self, what: str, work: Awaitable[T]) -> T:
        """Wait for a step. Raises CommandFailed where it does not come in time."""
        try:
            async with asyncio.timeout(STEP):
                return await work
        except TimeoutError as error:
            raise CommandFailed(f"expected {what} within {STEP:g} s, it did not come") from error


@dataclass(frozen=True, slots=True)
class _Set:
    """Everything that takes part."""

    azure: Simulator
    receiver: Receiver
    relay: Client
    store: Path
    url: str
    key: str


async def perform(steps: Steps, *, stay: bool) -> None:
    """Do it all. Raises CommandFailed where a step does not come in time."""
    async with _set_up(steps) as parts:
        event_id = await _announce(parts, steps)
        await _approve(parts, steps, event_id)
        outcome = await _watch(parts, steps, event_id)
        count = len(parts.receiver.events)
        print_output(
            f"done in {time.monotonic() - steps.began:.1f} s: told in {count} signed CloudEvents, approved by client:operator, {outcome}"
        )
        steps.ended = True
        if stay:
            _invite(parts)
            await asyncio.Event().wait()


@asynccontextmanager
async def _set_up(steps: Steps) -> AsyncIterator[_Set]:
    clock = SystemClock()
    key, secret = (
        f"imdsr_{secrets.token_urlsafe(32)}",
        PREFIX + base64.b64encode(secrets.token_bytes(32)).decode(),
    )

    def told(event: CloudEvent) -> None:
        if steps.ended:
            steps.received(event.name)

    with TemporaryDirectory(prefix="imds-relay-demo-") as folder:
        store = Path(folder, "relay.db")
        async with (
            Simulator(Setup(vms=(VM(_NAME),))) as azure,
            receiving(secret, clock, told) as receiver,
        ):
            steps.done(f"an Azure is simulated at {azure.url}, with one VM: {_NAME}")
            steps.done(f"a webhook receiver listens at {receiver.url}")
            async with started(
                _config(azure.url, receiver.url, secret, key, store), clock
            ) as running:
                url = f"http://127.0.0.1:{running.api_port}"
                steps.done(f"the relay runs, its API is at {url}")
                async with connected(config=None, url=url, key=key, key_file=None) as relay:
                    yield _Set(azure, receiver, relay, store, url, key)


def _config(azure: str, receiver: str, secret: str, key: str, store: Path) -> Config:
    return Config.model_validate(
        {
            "source": {"url": azure, "interval": "500ms"},
            "store": {"path": store},
            "sinks": [
                {
                    "kind": "webhook",
                    "name": "receiver",
                    "url": receiver,
                    "secrets": [secret],
                    "allow_http": True,
                }
            ],
            "approvals": {
                "rules": [
                    {
                        "name": "user-initiated",
                        "match": {"event_source": ["User"]},
                        "approve": "automatic",
                    },
                    {
                        "name": "everything-else",
                        "approve": {"votes": 1, "from": ["client:operator"]},
                    },
                ]
            },
            "api": {
                "listen": "127.0.0.1:0",
                "clients": [
                    {"name": "operator", "key": key, "can": ["read", "approve", "hold", "operate"]}
                ],
            },
        }
    )


async def _announce(parts: _Set, steps: Steps) -> str:
    event = parts.azure.schedule(Plan(type="Reboot", starts_after=1.0, lasts=2.0))
    steps.done(
        f"Azure announces a Reboot of {_NAME}, not before {format_local_time(event.not_before.isoformat())}"
    )
    await _receive(parts, steps, "event.scheduled", event.event_id)
    return event.event_id


async def _receive(parts: _Set, steps: Steps, name: str, event_id: str) -> CloudEvent:
    """Wait until the receiver has this CloudEvent."""
    event = await steps.wait(f"{name} at the receiver", parts.receiver.has(name, event_id))
    steps.received(name)
    return event


async def _approve(parts: _Set, steps: Steps, event_id: str) -> None:
    event: dict[str, Any] = await parts.relay.get("events", event_id)
    steps.done(
        f"GET /v1/events/{event_id[:8]}…: {event['approval']['state']}, {pluralize(event['approval']['missing'], 'vote')} missing"
    )
    body = {
        "eventId": event_id,
        "decision": "approve",
        "revision": event["revision"],
        "reason": "drained",
    }
    answer = await parts.relay.post("approvals", body=body)
    steps.done(
        f"POST /v1/approvals by client:operator: {answer['state']}, {answer['votes']} of {answer['required']} votes"
    )
    if answer["state"] != "granted":
        raise CommandFailed(f"expected the approval to be granted, it is {answer['state']}")
    await _receive(parts, steps, "approval.recorded", event_id)
    await _receive(parts, steps, "approval.granted", event_id)
    await steps.wait("a StartRequest at Azure", parts.azure.approved(event_id, within=STEP))
    steps.done("Azure has the StartRequest")
    await _receive(parts, steps, "startrequest.accepted", event_id)


async def _watch(parts: _Set, steps: Steps, event_id: str) -> str:
    await steps.wait("the event to start", parts.azure.started(event_id, within=STEP))
    steps.done("Azure starts the event")
    await _receive(parts, steps, "event.started", event_id)
    await steps.wait("the event to end", parts.azure.ended(event_id, within=STEP))
    steps.done("the event is over, Azure shows it no more")
    ended = await _receive(parts, steps, "event.ended", event_id)
    if parts.receiver.forged:
        raise CommandFailed(
            f"expected every signature to be good, {parts.receiver.forged} were not"
        )
    connection = open_for_reading(parts.store)
    try:
        head, count = verify_journal(connection)
    finally:
        connection.close()
    steps.done(f"the journal has {count} rows, and its hash chain holds: {head.hash[:16]}…")
    return str(ended.data["outcome"])


def _invite(parts: _Set) -> None:
    print_output(
        "\nThe relay runs on until Ctrl-C. Elsewhere:\n"
        f"  export IMDS_RELAY_URL={parts.url} IMDS_RELAY_KEY={parts.key}\n"
        "  imds-relay tail\n"
        f"""  curl {parts.azure.url}/sim/schedule -d '{{"type": "Reboot", "notice": "5m", "lasts": "30s"}}'\n"""
        "  imds-relay events\n"
        "  imds-relay approve <event>\n"
    )
