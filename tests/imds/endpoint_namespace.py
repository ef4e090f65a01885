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
from collections.abc import AsyncIterator, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from relay.clock import SystemClock
from relay.errors import SourceError
from relay.imds import SourceSettings
from relay.imds.client import SEARCH_AFTER, ImdsClient
from relay.imds.discover import DHCP_INTERVAL, AskDhcp, CandidateFinder, ask_dhcp
from relay.net.egress import is_refused
from relay.simulator import VM, Plan, Setup, Simulator
from tests.cli.command import environment
from tests.clocks import ShiftedClock
from tests.imds.dhcp_server import Answer, offer_endpoint, run_dhcp_server

PRIVATE, SHARED, PUBLIC = "10.9.8.9", "100.65.96.130", "203.0.113.9"
METADATA, WIRE_SERVER = "169.254.169.254", "168.63.129.16"
COMMANDS = (
    "mount -t sysfs sysfs /sys",  # shows the network cards of this namespace
    "ip link set lo up",
    "ip link add veth0 type veth peer name veth1",
    "ip address add 10.9.8.4/24 dev veth0",
    "ip link set veth0 up",
    "ip link set veth1 up",
    "ip route add default via 10.9.8.1 dev veth0",
    f"ip route add unreachable {METADATA}",
    *(f"ip address add {address}/32 dev veth0" for address in (PRIVATE, SHARED, PUBLIC)),
)
"""A new network namespace has no device but loopback, and broadcasts need another."""


@contextlib.contextmanager
def address_of(address: str) -> Iterator[None]:
    """Give the network card another address for a while."""
    subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "veth0"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "address", "del", f"{address}/32", "dev", "veth0"], check=True)


@contextlib.asynccontextmanager
async def dhcp(answer: Answer) -> AsyncIterator[list[bytes]]:
    """Run a DHCP server on the ports of DHCP, and yield the requests."""
    everywhere = ("255.255.255.255", 68)
    async with run_dhcp_server(answer, address=("0.0.0.0", 67), client=everywhere) as (server, _):
        yield server.requests


def azure(address: str, port: int = 80) -> Simulator:
    """Return the metadata service at an address, with a name for each VM."""
    return Simulator(Setup(vms=(VM("vm-0"),), rate_limit=None), host=address, port=port)


@contextlib.asynccontextmanager
async def client(
    clock: SystemClock | None = None, ask: AskDhcp = ask_dhcp
) -> AsyncIterator[ImdsClient]:
    """Return a client that searches, without leases that this machine may have."""
    settings = SourceSettings(url="discover", timeout=30.0, first_timeout=30.0)
    used = clock or SystemClock()
    finder = CandidateFinder(used, leases=lambda: (), ask=ask)
    async with ImdsClient(settings, used, finder) as opened:
        yield opened


async def failure(opened: ImdsClient) -> str:
    """Return why a read failed."""
    try:
        await opened.read_document_bytes()
    except SourceError as error:
        return error.reason
    return "it was read"


async def in_a_virtual_network() -> dict[str, Any]:
    """Both answer: the address in a virtual network comes first, and DHCP is not asked."""
    with address_of(METADATA):
        async with (
            azure(METADATA),
            azure(PRIVATE) as other,
            dhcp(offer_endpoint(PRIVATE)) as requests,
            client() as opened,
        ):
            await opened.read_document_bytes()
            return {
                "url": opened.base_url,
                "outside": opened.is_outside_virtual_network,
                "asked": len(requests),
                "others": len(other.calls),
            }


async def public_address() -> dict[str, Any]:
    """An answer that names a public host is refused, and nothing is sent there."""
    async with azure(PUBLIC) as public, dhcp(offer_endpoint(PUBLIC)), client() as opened:
        return {
            "reason": await failure(opened),
            "calls": len(public.calls),
            "url": opened.base_url,
        }


async def moved() -> dict[str, Any]:
    """The service moves to another address and port: it is found again, after a while."""
    clock = ShiftedClock()
    async with client(clock) as opened:
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


async def nothing() -> dict[str, Any]:
    """Nobody answers. Then Azure's host does, though DHCP says nothing of it."""

    async def ask_briefly() -> IPv4Address | None:
        return await ask_dhcp(seconds=0.2)

    async with client(ask=ask_briefly) as opened, dhcp(lambda _: []) as requests:
        reason = await failure(opened)
        with address_of(WIRE_SERVER):
            async with azure(WIRE_SERVER):
                await opened.read_document_bytes()
                return {"reason": reason, "url": opened.base_url, "asked": len(requests)}


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
        report = {
            "in_a_virtual_network": await in_a_virtual_network(),
            "public_address": await public_address(),
            "moved": await moved(),
            "nothing": await nothing(),
            "whole_relay": await whole_relay(Path(folder)),
        }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    for command in COMMANDS:
        subprocess.run(command.split(), check=True)
    asyncio.run(main())
