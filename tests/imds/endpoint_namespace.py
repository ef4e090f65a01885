"""A program for a network namespace that is a VM without a virtual network.

A real DHCP server listens at port 67, and a whole relay searches the metadata service there.
`test_discover` runs the program, which fails if an assertion does.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from relay.simulator import VM, Plan, Setup, Simulator
from tests.cli.command import start_process
from tests.imds.dhcp_server import offer_endpoint, run_dhcp_server

PRIVATE = "10.9.8.9"
COMMANDS = (
    "mount -t sysfs sysfs /sys",  # shows the network cards of this namespace
    "ip link set lo up",
    "ip link add veth0 type veth peer name veth1",
    "ip address add 10.9.8.4/24 dev veth0",
    "ip link set veth0 up",
    "ip link set veth1 up",
    "ip route add default via 10.9.8.1 dev veth0",
    "ip route add unreachable 169.254.169.254",
    f"ip address add {PRIVATE}/32 dev veth0",
)
"""A new network namespace has no device but loopback, and broadcasts need another."""


async def whole_relay(folder: Path) -> None:
    """Run a relay: it approves in the oldest version."""
    config = folder / "relay.yaml"
    config.write_text(
        "scope: classic\nrelay: one\n"
        'source: {url: discover, api_version: "2017-03-01", interval: 500ms}\n'
        f"store: {{path: {folder}/relay.db}}\n"
        "approvals:\n  tell_first: 0s\n  rules:\n"
        '    - {name: ours, match: {resources: ["vm-*"]}, approve: automatic}\n'
        'api: {listen: "127.0.0.1:0"}\n'
    )
    ports: dict[str, Any] = {"address": ("0.0.0.0", 67), "client": ("255.255.255.255", 68)}
    setup = Setup(vms=(VM("vm-0"),), rate_limit=None)
    async with (
        Simulator(setup, host=PRIVATE, port=80) as sim,
        run_dhcp_server(offer_endpoint(PRIVATE), **ports),
        start_process("run", "--config", str(config)) as relay,
    ):
        sim.schedule(Plan(type="Reboot", lasts=None))
        await sim.wait_until_approved(sim.events[0], within=60)
        relay.send_signal(signal.SIGTERM)
        log = (await relay.communicate())[1].decode()
    assert relay.returncode == 0, log
    assert "the metadata service is at http://10.9.8.9, option 245 of DHCP" in log
    assert "Traceback" not in log
    assert [list(json.loads(call.body)) for call in sim.start_requests] == [["StartRequests"]]
    calls = [call for call in sim.calls if call.path.endswith("events")]
    assert {call.query for call in calls} == {"api-version=2017-03-01"}


if __name__ == "__main__":
    for command in COMMANDS:
        subprocess.run(command.split(), check=True)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(whole_relay(Path(folder)))
