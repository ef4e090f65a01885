"""``demo`` shows the relay's main job on this machine alone; ``simulate`` simulates Azure alone.

``demo`` starts a simulated Azure, a webhook receiver and a relay, and follows one event from its
announcement to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from aiohttp import web

from relay.app import start_relay
from relay.cli._options import ListAsJson, argument, option
from relay.cli._output import CommandFailed, format_local_time, pluralize, print_json, print_lines
from relay.cli._tables import print_table
from relay.cli.client import connect
from relay.cli.decide import decide
from relay.cli.events import vote_count
from relay.cli.init import make_random_bearer_key, new_signing_secret
from relay.clock import SystemClock
from relay.config import Config
from relay.events.cloudevent import CloudEvent
from relay.process import run_until_stopped
from relay.signature import SignatureRefused, verify
from relay.simulator import VM, Plan, Setup, Simulator, load_packaged_playbooks
from relay.simulator.playbook import Playbook, load_playbook, play_playbook
from relay.store.audit import verify_journal
from relay.store.file import open_for_reading

STEP_TIMEOUT = 10.0
"""Seconds that one step may take."""
_VM_NAME = "demo-vm"
DEFAULT_PORT = 8169


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


class Demo:
    """The steps so far, and the webhook receiver, which takes each event once."""

    def __init__(self) -> None:
        self.started_at = self._last_at = time.monotonic()
        self.secret = new_signing_secret()
        self.event_ids: set[str] = set()
        self._received: asyncio.Queue[CloudEvent] = asyncio.Queue()

    def print(self, text: str) -> None:
        """Print a step that is done, with the seconds since the start and since the last step."""
        now = time.monotonic()
        seconds = now - self._last_at
        took = f"+{seconds:.2f} s" if seconds >= 1 else f"+{seconds * 1000:.0f} ms"
        print_lines(f"{now - self.started_at:6.2f} s  {took:>8}  {text}")
        self._last_at = now

    async def wait_for(self, name: str) -> CloudEvent:
        """Wait until the receiver has an event, and print it. Raises CommandFailed if it is late.

        The events of one EventId come in order, so what is before it is about something else.
        """
        try:
            async with asyncio.timeout(STEP_TIMEOUT):
                while (event := await self._received.get()).name != name:
                    pass
        except TimeoutError as error:
            raise CommandFailed(
                f"expected {name} at the receiver within {STEP_TIMEOUT:g} s, it did not come"
            ) from error
        self._print_received(event)
        return event

    async def print_all(self) -> None:
        while True:
            self._print_received(await self._received.get())

    def _print_received(self, event: CloudEvent) -> None:
        self.print(f"the receiver has {event.name}, its signature is good")

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer 204, or 401 to a request without a valid signature."""
        body = await request.read()
        try:
            verify([self.secret], request.headers, body, datetime.now(UTC))
        except SignatureRefused:
            return web.Response(status=401)  # nothing is received, so its step fails
        event = CloudEvent.parse(body)
        if event.id not in self.event_ids:
            self.event_ids.add(event.id)
            self._received.put_nowait(event)
        return web.Response(status=204)

    @asynccontextmanager
    async def receive(self) -> AsyncIterator[str]:
        server = web.Server(self.handle, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
        finally:
            await runner.cleanup()


async def run_demo(*, stay: bool) -> None:
    """Run the demo. Raises CommandFailed if a step does not come in time."""
    demo, key = Demo(), make_random_bearer_key()
    with TemporaryDirectory(prefix="imds-relay-demo-") as folder:
        store = Path(folder, "relay.db")
        async with Simulator(Setup(vms=(VM(_VM_NAME),))) as azure, demo.receive() as receiver_url:
            demo.print(f"an Azure is simulated at {azure.url}, with one VM: {_VM_NAME}")
            demo.print(f"a webhook receiver listens at {receiver_url}")
            config = _configuration(azure.url, receiver_url, demo.secret, key, store)
            async with start_relay(config, SystemClock()) as running:
                url = f"http://127.0.0.1:{running.server.port}"
                demo.print(f"the relay runs, its API is at {url}")
                await _follow_one_event(demo, azure, store, url, key)
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
                    await demo.print_all()


def _configuration(azure_url: str, receiver_url: str, secret: str, key: str, store: Path) -> Config:
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


async def _follow_one_event(demo: Demo, azure: Simulator, store: Path, url: str, key: str) -> None:
    planned = azure.schedule(Plan(type="Reboot", starts_after=1.0, lasts=2.0))
    event_id = planned.event_id

    not_before = format_local_time(planned.not_before.isoformat())
    demo.print(f"Azure announces a Reboot of {_VM_NAME}, not before {not_before}")
    await demo.wait_for("event.scheduled")
    async with connect(url=url, key=key) as relay:
        event: dict[str, Any] = await relay.get("events", event_id)
        approval = event["approval"]
        missing = pluralize(approval["missing"], "vote")
        demo.print(f"GET /v1/events/{event_id[:8]}…: {approval['state']}, {missing} missing")
        answer = await decide(relay, event, "approve", reason="drained")
    demo.print(f"POST /v1/approvals by client:operator: {answer['state']}, {vote_count(answer)}")
    if answer["state"] != "granted":
        raise CommandFailed(f"expected the approval to be granted, it is {answer['state']}")
    await demo.wait_for("approval.recorded")
    await demo.wait_for("approval.granted")
    await azure.wait_until_approved(event_id, within=STEP_TIMEOUT)
    demo.print("Azure has the StartRequest")
    await demo.wait_for("startrequest.accepted")
    await azure.wait_for(event_id, "started", within=STEP_TIMEOUT)
    demo.print("Azure starts the event")
    await demo.wait_for("event.started")
    await azure.wait_for(event_id, "gone", within=STEP_TIMEOUT)
    demo.print("the event is over, Azure shows it no more")
    ended = await demo.wait_for("event.ended")
    with closing(open_for_reading(store)) as connection:
        head, count = verify_journal(connection)
    demo.print(f"the journal has {count} rows, and its hash chain holds: {head.hash[:16]}…")
    print_lines(
        f"done in {time.monotonic() - demo.started_at:.1f} s: "
        f"told in {len(demo.event_ids)} signed CloudEvents, "
        f"approved by client:operator, {ended.data['outcome']}"
    )


def simulate(
    playbook: Annotated[
        str | None,
        argument(
            "PLAYBOOK",
            "A name of --list, or a YAML file. "
            "Default: one VM, and events only by the control API.",
        ),
    ] = None,
    *,
    list_names: Annotated[
        bool, option("--list", None, "List the playbooks of the package.")
    ] = False,
    scale: Annotated[
        float | None,
        option("--scale", "N", "How many times faster than Azure; overrides the playbook's scale."),
    ] = None,
    host: Annotated[str, option("--host", "ADDRESS", "The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        option(
            "--port",
            "PORT",
            "The port of the first VM; the next VM has the next port. 0: free ports.",
            min=0,
            max=65535,
        ),
    ] = DEFAULT_PORT,
    as_json: ListAsJson = False,
    once: Annotated[
        bool, option("--once", None, "End with the playbook instead of at Ctrl-C.")
    ] = False,
) -> None:
    """Simulate Azure for tests.

    Serves the metadata service of one or more VMs, with the maintenance of a playbook.
    """
    if list_names:
        rows = [
            (name, playbook.description) for name, playbook in load_packaged_playbooks().items()
        ]
        if as_json:
            print_json([{"name": name, "description": description} for name, description in rows])
        else:
            print_table(("playbook", "what happens"), rows, empty="")
        return
    if scale is not None and not scale > 0:
        raise typer.BadParameter("expected more than 0", param_hint="--scale")
    if once and playbook is None:
        raise typer.BadParameter("expected a playbook that can end", param_hint="--once")
    loaded = load_playbook(playbook) if playbook is not None else None
    setup = loaded.azure if loaded is not None else Setup()
    if scale is not None:
        setup = replace(setup, scale=scale)
    azure = Simulator(setup, host=host, port=port, report=print_lines)
    try:
        asyncio.run(run_until_stopped(_simulate(azure, loaded, stay=not once)))
    except OSError as error:
        raise CommandFailed(
            f"cannot listen on {host} port {port}: {error.strerror or error}. "
            "--port 0 takes free ports"
        ) from error


async def _simulate(azure: Simulator, playbook: Playbook | None, *, stay: bool) -> None:
    async with azure:
        for name, url in azure.urls.items():
            azure.report_line_with_time(f"{name} finds its IMDS at {url}")
        if not azure.is_loopback:
            azure.report_line_with_time(
                f"{azure.host} is not a loopback address: "
                "everybody who reaches it can read and control this simulator"
            )
        if playbook is not None:
            azure.report_line_with_time(playbook.description)
            await play_playbook(azure, playbook)
            azure.report_line_with_time("the playbook has ended")
        if stay:
            await asyncio.Event().wait()
