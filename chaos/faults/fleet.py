"""A hub, its agents and their broker are killed in turns."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from chaos.faults import Fault, Place
from chaos.judge import Counts
from chaos.load import CLIENTS, RULE, Load
from chaos.trial import Queue, Trial
from relay.simulator import VM, Setup, Simulator
from tests.fleet.hub_side import define_users, unused_exchange
from tests.fleet.running_fleet import RunningFleet
from tests.journey.relay_process import RelayProcess, client, inbox, relay

SCOPE = "vmss-a-1f0c33ab"
VMS = ("vm-0", "vm-1", "vm-2")
FROZEN_FOR = 7.0
"""Seconds: longer than an order may take."""


async def _kill_in_turns(place: Place, rounds: int) -> Counts:
    """Kill the hub, an agent and the broker one after the other, and freeze an agent."""
    await asyncio.to_thread(place.broker.heal)
    exchange = unused_exchange()
    await asyncio.to_thread(define_users, place.broker, exchange)
    queue = Queue(place.broker, exchange)
    await queue.declare()
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(inbox())
        azure = await stack.enter_async_context(Simulator(Setup(vms=tuple(map(VM, VMS)))))
        fleet = RunningFleet(place.broker, exchange, place.folder, box, azures={SCOPE: azure})
        fleet.hub_settings = {
            "approvals": {"tell_first": "0s", "rules": [RULE]},
            "api": {"clients": [*CLIENTS, client("operator")]},
        }
        document = fleet.hub_document(place.folder / "hub.db")
        document["sinks"][0]["name"] = "drain"
        hub = await stack.enter_async_context(relay(place.folder / "hub", document))
        agents = []
        for vm in VMS:
            document = {**fleet.agent_document(SCOPE, vm), "api": {}}
            agents.append(await stack.enter_async_context(relay(place.folder / vm, document)))
        for process in (hub, *agents):
            await process.start()
        load = Load(azure, hub, place.chance, vms=VMS, scope=SCOPE)
        loading = asyncio.create_task(load.run(), name="load")
        stack.callback(loading.cancel)
        await load.wait_until_busy()
        turns: list[Callable[[], Awaitable[None]]] = [
            lambda: _kill(hub),
            lambda: _kill(place.chance.choice(agents)),
            lambda: _kill_broker(place),
            lambda: _freeze(place.chance.choice(agents)),
        ]
        for number in range(rounds):
            place.advance()
            await asyncio.sleep(place.chance.random())
            await turns[number % len(turns)]()
            await load.wait_until_busy(1)
        counts = await Trial(
            broker=place.broker,
            chance=place.chance,
            azure=azure,
            box=box,
            queue=queue,
            proxies={},
            process=hub,
            load=load,
            loading=loading,
        ).settle()
    counts.rounds = rounds
    return counts


async def _kill(process: RelayProcess) -> None:
    await process.kill()
    await process.start(ready=False)


async def _kill_broker(place: Place) -> None:
    await asyncio.to_thread(place.broker.kill)
    await asyncio.to_thread(place.broker.start)


async def _freeze(agent: RelayProcess) -> None:
    if agent.process is not None:
        agent.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(FROZEN_FOR)
        agent.process.send_signal(signal.SIGCONT)


FAULTS = (
    Fault(
        name="fleet",
        text="in a fleet, the hub is killed, an agent is killed, RabbitMQ is killed, and an agent "
        f"stands still for {FROZEN_FOR:g} s, in turns",
        quick=4,
        full=80,
        run=_kill_in_turns,
        rounds_of_a_trial=20,
    ),
)
