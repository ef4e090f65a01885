"""The relay's process with an Apprise service that hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from relay.simulator import VM, Plan, Setup, Simulator
from tests.chat.apprise_server import PASSWORD, TOKEN, AppriseService, running_service
from tests.eventually import eventually
from tests.journey.relay_process import relay


def make_document(azure: Simulator, service: AppriseService) -> dict[str, Any]:
    """Return the YAML document of a relay that notifies one service."""
    sink = {
        "kind": "apprise",
        "name": "pager",
        "urls": [service.url],
        "allow_http": True,
        "timeout": "60s",
    }
    return {
        "scope": "prod",
        "relay": "vm-0",
        "source": {"url": azure.url, "interval": "500ms"},
        "sinks": [sink],
    }


async def test_a_hanging_thread_does_not_delay_the_stop_and_its_notice_is_sent_after_restart(
    tmp_path: Path,
) -> None:
    """The relay's log contains no secret of the URL."""
    async with running_service() as service, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        service.is_dripping = True
        async with relay(tmp_path, make_document(azure, service)) as process:
            await process.start()
            azure.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
            await eventually(lambda: service.calls != [])
            started_at = asyncio.get_running_loop().time()
            assert await process.stop() == 0
            assert asyncio.get_running_loop().time() - started_at < 10 + 15
            service.is_dripping = False
            await process.start()
            await eventually(lambda: service.messages != [])
        assert service.messages[0].startswith("Reboot of vm-0\n")
        assert TOKEN not in process.log
        assert PASSWORD not in process.log
