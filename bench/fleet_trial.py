"""What measurements of a fleet share: a hub in a process of its own, its agents, and the broker."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import EXCHANGE
from bench.imds import event_id, not_before
from bench.process import cpu_seconds, resident_memory
from bench.receiver import Receiver, receiver
from bench.simulated_fleet import FleetPlan
from bench.trial import next_run, webhook
from relay import __version__
from relay.clock import SystemClock
from relay.events.build import Origin, change_event, common_event_data, transition_digest
from relay.events.cloudevent import CloudEvent
from relay.events.model import Change, ScheduledEvent
from relay.fleet.agent.agent import Agent, VmIdentity
from relay.fleet.messages import Pulse
from relay.fleet.routing import pulse_key, report_key
from relay.fleet.settings import AgentSettings
from relay.fleet.topology import (
    agent_publish_exchange_name,
    command_exchange_name,
    report_queue_name,
)
from tests.eventually import eventually
from tests.journey.relay_process import RelayProcess
from tests.journey.relay_process import relay as relay_process
from tests.rabbitmq import Broker

HUB_USER, AGENT_USER = "imds-hub", "vmss"
CHANGES = ("event.scheduled", "event.started", "event.ended")
"""The changes of an event in their order. The hub has a webhook for each of them."""
IN_FLIGHT = 256
"""Messages that are published at the same time to fill a queue."""
_trials = itertools.count(1)


@dataclass(slots=True)
class FleetTrial:
    """A hub that runs, and its broker and receiver."""

    broker: Broker
    exchange: str
    process: RelayProcess
    receiver: Receiver
    run: int

    @property
    def pid(self) -> int:
        """The hub's process."""
        assert self.process.process is not None  # noqa: S101  # it was started
        return self.process.process.pid

    @property
    def cpu(self) -> float:
        """The CPU seconds of the hub so far."""
        return cpu_seconds(self.pid)

    @property
    def agent_settings(self) -> AgentSettings:
        """The settings of each agent."""
        return AgentSettings.model_validate(agent_section(self.broker, self.exchange))

    async def received(self, count: int, within: float = 120.0) -> dict[tuple[int, int], int]:
        """Wait for so many deliveries.

        Return the moment of each in nanoseconds, by the index in `CHANGES` and the event's number.
        """
        arrived = await self.receiver.wait(count, within)
        if arrived < count:
            raise RuntimeError(f"expected {count} deliveries within {within:g} s, got {arrived}")
        arrivals = await self.receiver.arrivals()
        if arrivals["forged"]:
            raise RuntimeError(f"{arrivals['forged']} requests had a wrong signature")
        return {(endpoint, number): moment for endpoint, number, moment in arrivals["first"]}


def agent_section(broker: Broker, exchange: str) -> dict[str, Any]:
    """Return the section ``fleet`` of an agent."""
    url = broker.amqp_url(AGENT_USER)
    return {"role": "agent", "url": url, "exchange": exchange, "hub_user": HUB_USER}


def define_users(broker: Broker) -> None:
    """Make the users of hub and agents. The broker checks their rights, which allow everything."""
    every = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    users = (HUB_USER, AGENT_USER)
    broker.define(
        {
            "users": [{"name": user, "password": user, "tags": ""} for user in users],
            "permissions": [{"user": user, **every} for user in users],
        }
    )


@asynccontextmanager
async def fleet_trial(broker: Broker) -> AsyncIterator[FleetTrial]:
    """Run a hub with an empty state file, and with exchanges and queues of its own."""
    exchange = f"{EXCHANGE}.{next(_trials)}"
    await asyncio.to_thread(define_users, broker)
    with tempfile.TemporaryDirectory() as folder:
        async with receiver(len(CHANGES)) as target:
            document = {
                "relay": "hub-0",
                "fleet": {
                    "role": "hub",
                    "url": broker.amqp_url(HUB_USER),
                    "exchange": exchange,
                    "domains": [{"user": AGENT_USER, "scopes": ["*"]}],
                },
                "sinks": [
                    webhook(url, change.replace(".", "-"), events=[change])
                    for url, change in zip(target.urls, CHANGES, strict=True)
                ],
            }
            async with relay_process(Path(folder), document) as process:
                await process.start()
                trial = FleetTrial(broker, exchange, process, target, next_run())
                await target.begin(trial.run)
                await eventually(lambda: _consumes(broker, exchange), every=0.1)
                yield trial
        for kind, name in (
            ("queue", report_queue_name(exchange)),
            ("queue", f"{exchange}.fleet.pulse"),
            ("exchange", agent_publish_exchange_name(exchange)),
            ("exchange", command_exchange_name(exchange)),
        ):
            await asyncio.to_thread(_delete, broker, kind, name)


def _consumes(broker: Broker, exchange: str) -> bool:
    """Whether the hub consumes its queue of reports."""
    queue = report_queue_name(exchange)
    found = broker.evaluate(
        f'case rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)'
        ") of {ok, Q} -> length(rabbit_amqqueue:consumers(Q)); _ -> 0 end."
    )
    return found.strip() != "0"


def _delete(broker: Broker, kind: str, name: str) -> None:
    resource = f'rabbit_misc:r(<<"/">>, {kind}, <<"{name}">>)'
    if kind == "queue":
        broker.evaluate(
            f"case rabbit_amqqueue:lookup({resource}) of {{ok, Q}} -> "
            'rabbit_amqqueue:delete(Q, false, false, <<"bench">>); _ -> ok end.'
        )
    else:
        broker.evaluate(f'rabbit_exchange:delete({resource}, false, <<"bench">>).')


def broker_pid(broker: Broker) -> int:
    """Return the process of the broker."""
    return int(broker.evaluate("list_to_integer(os:getpid())."))


def broker_memory(broker: Broker) -> float:
    """Return the resident memory of the broker in megabytes, after it has collected garbage."""
    broker.evaluate("[garbage_collect(Process) || Process <- processes()], ok.")
    return resident_memory(broker_pid(broker))[0]


def agents_of(plan: FleetPlan) -> list[Origin]:
    """Return the agents of a fleet, one scope after the other in each round."""
    by_scope = plan.vm_names_by_scope
    columns = itertools.zip_longest(
        *([Origin(scope, vm) for vm in vms] for scope, vms in by_scope.items())
    )
    return [origin for column in columns for origin in column if origin is not None]


def scheduled_reports(run: int, origins: list[Origin], count: int) -> list[tuple[str, CloudEvent]]:
    """Return so many changes with routing keys, each reported by the VM that it names."""
    at, due = datetime.now(UTC), not_before()
    reports = []
    for number in range(count):
        origin = origins[number % len(origins)]
        event = ScheduledEvent(
            event_id=event_id(run, number),
            event_type="Reboot",
            event_status="Scheduled",
            resource_type="VirtualMachine",
            resources=(origin.relay,),
            not_before=due,
            description="Host server is undergoing maintenance. The machine restarts once.",
            event_source="Platform",
            duration=9,
        )
        change = Change("scheduled", event, {})
        made = change_event(
            change,
            origin,
            at,
            data=common_event_data(event, 1),
            transition=transition_digest(change, origin),
            previous_count=0,
            approved_by_relay=False,
        )
        reports.append((report_key(made, origin), made))
    return reports


def pulses(origins: list[Origin], count: int) -> list[tuple[str, CloudEvent]]:
    """Return so many pulses of agents that see no event, with their routing keys."""
    made = []
    for number in range(count):
        origin = origins[number % len(origins)]
        pulse = Pulse(
            vm_id=f"7d3f2a10-5c86-4c6b-9a54-{number % len(origins):012x}",
            boot_id="9f9e1f3c-5c86-4c6b-9a54-08c2b1f0e6aa",
            version=__version__,
            zone="1",
            names=(origin.relay.lower(),),
            live=(),
            poll_age=0.5,
            clock_offset=0.01,
        )
        made.append((pulse_key(origin), pulse.to_event(origin, datetime.now(UTC))))
    return made


async def publish_all(settings: AgentSettings, messages: Iterable[tuple[str, CloudEvent]]) -> None:
    """Publish messages of any agents over one connection. Return when the broker has them all."""
    machine = VmIdentity(vm_id=None, boot_id=None, zone=None, names=None)
    agent = Agent(settings, Origin("load", "load"), machine, lambda _: True, SystemClock())
    remaining = iter(messages)

    async def publish() -> None:
        for key, event in remaining:
            await agent.link.publish(event, key)

    run = asyncio.create_task(agent.link.run())
    try:
        await eventually(lambda: agent.link.is_listening)
        await asyncio.gather(*(publish() for _ in range(IN_FLIGHT)))
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def rest(trial: FleetTrial, *, quiet: float = 0.02, within: float = 30.0) -> None:
    """Wait until the hub uses less than this share of a core."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        before = trial.cpu
        await asyncio.sleep(0.5)
        if trial.cpu - before < 0.5 * quiet:
            return
