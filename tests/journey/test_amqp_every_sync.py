"""Killed at any sync on the way from a message to a StartRequest: what was sent once counts once.

`make chaos-tests` kills at every sync of the path; `make test` at one of them.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import pytest

from relay.simulator import VM, Setup, Simulator
from tests.depth import CHAOS, depth
from tests.eventually import eventually
from tests.journey.bus import Bus, System, define_users, relay_document, unused_exchange
from tests.journey.relay_process import RelayProcess, relay
from tests.programs import killed_at_sync, needs_strace
from tests.rabbitmq import Broker


async def story(broker: Broker, folder: Path, sync: int) -> bool:
    """Send one message to a relay that dies at that sync, and return whether it died."""
    bus = Bus(broker, unused_exchange("synced"))
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
        document = relay_document(broker, bus.exchange) | {
            "source": {"url": sim.url, "interval": "500ms"}
        }
        document["api"] = {"clients": document["api"]["clients"]}
        await bus.make()  # the relay would only make them if it lived
        await bus.listen(stack)
        system = System(sim, bus)
        process = await stack.enter_async_context(relay(folder, document))
        await process.start()
        # strace counts system calls per thread, so the file must exist before.
        await process.kill()
        process.prefix = killed_at_sync(sync)
        await process.start(ready=False)
        next_life = asyncio.create_task(_next_life(process))
        event, decision = await system.schedule_reboot()
        await bus.send(decision, "once")
        await bus.wait_for_event("startrequest.accepted", event)
        await eventually(system.is_idle, every=0.1)
        died = next_life.done()
        next_life.cancel()
        for name in ("approval.recorded", "approval.granted"):
            assert len({told["id"] for told in bus.events_of_type(name, event, "once")}) == 1
        assert not bus.dead_letters
        assert 1 <= system.starts(event) <= 1 + died
    return died


async def _next_life(process: RelayProcess) -> None:
    assert process.process is not None
    await process.process.wait()
    process.prefix = ()
    await process.start()


@needs_strace
@pytest.mark.timeout(depth(1200, 60))
async def test_killed_at_a_sync_a_message_counts_once(own_broker: Broker, tmp_path: Path) -> None:
    """At every single one, until one life gets through: then there was no further sync."""
    define_users(own_broker)
    for sync in count(1) if CHAOS else (4,):
        if not await story(own_broker, tmp_path / f"{sync}", sync):
            print(f"syncs of the path: {sync - 1}")  # noqa: T201  # a number for pytest -s
            assert sync > 4
            return
