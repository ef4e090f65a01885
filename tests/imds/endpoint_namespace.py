"""A program for a network namespace that is a VM without a virtual network.

Its network card has the addresses of Azure's hosts, and a real DHCP server listens at port 67. The
client and a whole relay search the metadata service there. The results are written as JSON.
`test_endpoint` runs the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from relay.errors import SourceError
from relay.imds import SourceSettings
from relay.imds.client import SEARCH_AFTER, ImdsClient
from relay.imds.discover import DHCP_INTERVAL, CandidateFinder
from relay.net.egress import is_refused
from relay.simulator import VM, Plan, Setup, Simulator
from tests.cli.command import environment
from tests.clocks import ShiftedClock
from tests.imds.dhcp_server import Answer, offer_endpoint, run_dhcp_server

PRIVATE, SHARED = "10.9.8.9", "100.65.96.130"
COMMANDS = (
    "mount -t sysfs sysfs /sys",  # shows the network cards of this namespace
    "ip link set lo up",
    "ip link add veth0 type veth peer name veth1",
    "ip address add 10.9.8.4/24 dev veth0",
    "ip link set veth0 up",
    "ip link set veth1 up",
    "ip route add default via 10.9.8.1 dev veth0",
    "ip route add unreachable 169.254.169.254",
    *(f"ip address add {address}/32 dev veth0" for address in (PRIVATE, SHARED)),
)
"""A new network namespace has no device but loopback, and broadcasts need another."""


@contextlib.asynccontextmanager
async def dhcp(answer: Answer) -> AsyncIterator[list[bytes]]:
    """Run a DHCP server on the ports of DHCP, and yield the requests."""
    everywhere = ("255.255.255.255", 68)
    async with run_dhcp_server(answer, address=("0.0.0.0", 67), client=everywhere) as (server, _):
        yield server.requests


def azure(address: str, port: int = 80) -> Simulator:
    """Return the metadata service at an address, with a name for each VM."""
    return Simulator(Setup(vms=(VM("vm-0"),), rate_limit=None), host=address, port=port)


async def failure(opened: ImdsClient) -> str:
    """Return why a read failed."""
    try:
        await opened.read_document_bytes()
    except SourceError as error:
        return error.reason
    return "it was read"


async def moved() -> dict[str, Any]:
    """The service moves to another address and port: it is found again, after a while."""
    clock = ShiftedClock()
    finder = CandidateFinder(clock, leases=lambda: ())  # not those that this machine may have
    settings = SourceSettings(url="discover", timeout=30.0, first_timeout=30.0)
    async with ImdsClient(settings, clock, finder) as opened:
        async with azure(PRIVATE), dhcp(offer_endpoint(PRIVATE)):
            await opened.read_document_bytes()
            first = opened.base_url
        async with azure(SHARED, 8080), dhcp(offer_endpoint(SHARED)) as requests:
            at_once = await failure(opened)
            asked_at_once = len(requests)
            clock.monotonic_ahead += max(SEARCH_AFTER, DHCP_INTERVAL)
            await opened.read_document_bytes()
            return {
                "urls": [first, opened.base_url],
                "at_once": at_once,
                "asked": [asked_at_once, len(requests)],
                "guarded": [is_refused(IPv4Address(at)) for at in (PRIVATE, SHARED)],
            }


async def delivery_reasons(config: Path) -> list[str]:
    """Return why deliveries of the running relay failed so far."""
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "relay", "deliveries", "--config", str(config), "--json"),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await command.communicate()
    items = json.loads(out)["items"]
    return sorted({item["reason"] for item in items if item["reason"] is not None})


async def whole_relay(folder: Path) -> dict[str, Any]:
    """Run a relay: it approves in the oldest version, and its sink cannot reach the service."""
    config = folder / "relay.yaml"
    config.write_text(
        "scope: classic\nrelay: one\n"
        'source: {url: discover, api_version: "2017-03-01", interval: 500ms}\n'
        f"store: {{path: {folder}/relay.db}}\n"
        "sinks:\n"
        f'  - {{kind: webhook, name: thief, url: "http://{PRIVATE}/sim/cancel", '
        f'secrets: ["whsec_{"A" * 44}"], allow_http: true}}\n'
        "approvals:\n  tell_first: 0s\n  rules:\n"
        '    - {name: ours, match: {resources: ["vm-*"]}, approve: automatic}\n'
        f'api: {{listen: "127.0.0.1:0", socket: {folder}/relay.sock}}\n'
    )
    async with azure(PRIVATE) as sim, dhcp(offer_endpoint(PRIVATE)):
        sim.schedule(Plan(type="Reboot", lasts=None))
        relay = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relay", "run", "--config", str(config)),
            env=environment(),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await sim.wait_until_approved(sim.events[0], within=60)
            async with asyncio.timeout(60):
                while not (reasons := await delivery_reasons(config)):
                    pass
        finally:
            relay.terminate()
            _, log = await relay.communicate()
        return {
            "log": log.decode(),
            "reasons": reasons,
            "bodies": [json.loads(call.body) for call in sim.start_requests],
            "versions": sorted({call.query for call in sim.calls if call.path.endswith("events")}),
            "cancels": [call.path for call in sim.calls if "cancel" in call.path],
            "code": relay.returncode,
        }


async def main() -> None:
    """Show it."""
    with tempfile.TemporaryDirectory() as folder:
        report = {"moved": await moved(), "whole_relay": await whole_relay(Path(folder))}
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    for command in COMMANDS:
        subprocess.run(command.split(), check=True)
    asyncio.run(main())
