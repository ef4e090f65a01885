"""A relay as its users run it, with a service that hangs: it stops in time, its log says nothing of URLs, and nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from relay.simulator import VM, Plan, Setup, Simulator
from tests.chat.apprise_server import PASSWORD, TOKEN, Service, service
from tests.journey.relay_process import eventually, relay


def document(azure: Simulator, there: Service) -> dict[str, Any]:
    """A relay that polls this Azure and tells this service."""
    sink = {
        "kind": "apprise",
        "name": "pager",
        "urls": [there.url],
        "allow_http": True,
        "timeout": "60s",
    }
    return {
        "scope": "prod",
        "relay": "vm-0",
        "source": {"url": azure.url, "interval": "500ms"},
        "sinks": [sink],
    }


async def test_a_thread_that_hangs_keeps_no_relay_from_its_end(tmp_path: Path) -> None:
    """Nor does its service: of what is tried at that moment, the next life tells."""
    async with service() as there, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        there.dripping = True
        async with relay(tmp_path, document(azure, there)) as one:
            await one.start()
            azure.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
            await eventually(lambda: there.calls != [])
            began = asyncio.get_running_loop().time()
            assert await one.stop() == 0
            assert asyncio.get_running_loop().time() - began < 10 + 15
            there.dripping = False
            await one.start()
            await eventually(lambda: there.messages != [])
        assert there.messages[0].startswith("Reboot of vm-0\n")
        assert TOKEN not in one.log
        assert PASSWORD not in one.log
