"""Measures a fleet: the hub beside a plain relay, many agents beside few, an agent that idles.

The hub, the broker and the receiver are real and run in processes of their own. The agents are the
simulated ones of `bench.simulated_fleet`, except the one that idles.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import aio_pika
import orjson
from aio_pika.abc import AbstractChannel

from bench.delivery import SETTLE_SECONDS
from bench.fleet_trial import (
    AGENT_USER,
    CHANGES,
    FleetTrial,
    agent_section,
    agents_of,
    broker_memory,
    broker_pid,
    fleet_trial,
    publish_all,
    pulses,
    rest,
    scheduled_reports,
)
from bench.imds import event_id, metadata_endpoint
from bench.process import cpu_seconds, resident_memory
from bench.results import RELAY, Rounds, Section, percentile
from bench.run import Options
from bench.simulated_fleet import FleetPlan, raise_open_files_limit, simulated_fleet
from bench.trial import trial
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.topology import agent_publish_exchange_name, hub_pulse_queue_name
from tests.journey.relay_process import RelayProcess
from tests.journey.relay_process import relay as relay_process
from tests.rabbitmq import Broker

HUB, BARE_CONSUMER, AGENT = "hub", "bare consumer", "agent"
AGENTS, FEW_AGENTS, SCOPES = 1000, 100, 20
BURST = 5000
PULSES = 10_000
WAVE_CHANGES, WAVE_SECONDS = 1000, 10.0
IDLE_SECONDS = 60.0
REST = 3.0
"""Seconds between the start of an agent and the measurement."""
MAX_LATENESS = 20.0
"""Seconds after a wave until the last event must have been told. An end can take 10 s."""


def _broker(options: Options) -> Broker:
    if options.broker is None:
        raise ValueError("expected a broker of our own, whose users can be made")
    return options.broker


def _plan(options: Options, agents: int = AGENTS, rate: float = 0.0) -> FleetPlan:
    agents = options.scaled(agents)
    return FleetPlan(agents=agents, scopes=min(agents, SCOPES), scope_prefix="bench", rate=rate)


async def hub_rate(options: Options) -> Section:
    """Let a hub take a burst of changes from its queue, and a plain relay from a document."""
    rounds = Rounds()
    count = options.scaled(BURST)
    for _ in options.rounds("changes through a hub"):
        async with fleet_trial(_broker(options)) as one:
            origins = agents_of(_plan(options))
            warm_up = scheduled_reports(one.run, origins, len(origins))
            await publish_all(one.agent_settings, warm_up)
            await one.received(len(warm_up))
            all_ = scheduled_reports(one.run, origins, len(origins) + count)
            elapsed, cpu = await _drain(one, all_[len(origins) :], len(all_))
            rounds.add("changes", "/s", HUB, count / elapsed, "≥ 0.4 × plain relay")
            rounds.add("CPU per change", "ms", HUB, 1000 * cpu / count)
        async with trial("relay", 1) as plain:
            await plain.begin()
            before = cpu_seconds(plain.sender.pid)
            told_at = plain.tell(count)
            await plain.received(count)
            await asyncio.sleep(SETTLE_SECONDS)
            cpu = cpu_seconds(plain.sender.pid) - before
            arrivals = await plain.receiver.arrivals()
            elapsed = (max(moment for *_, moment in arrivals["first"]) - told_at) / 1e9
            rounds.add("changes", "/s", RELAY, count / elapsed, "≥ 0.4 × plain relay")
            rounds.add("CPU per change", "ms", RELAY, 1000 * cpu / count)
    return Section(
        metric="fleet-rate",
        title="A fleet: changes through a hub",
        columns=(HUB, RELAY),
        ratio=(HUB, RELAY),
        rows=rounds.rows(),
        note=(
            f"{count:,} new events of {options.scaled(AGENTS):,} agents wait in the queue of a hub "
            "that stands still and then goes on. From there to the last arrival at one webhook. "
            "The plain relay tells as many to one webhook from a document. The broker runs on the "
            "same machine, with one scheduler."
        ),
    )


async def _drain(
    one: FleetTrial, reports: list[tuple[str, CloudEvent]], deliveries: int
) -> tuple[float, float]:
    """Fill the queue while the hub stands still. Return the seconds and CPU seconds to empty it."""
    cpu_before = one.cpu
    os.kill(one.pid, signal.SIGSTOP)
    try:
        await publish_all(one.agent_settings, reports)
    finally:
        began = time.monotonic_ns()
        os.kill(one.pid, signal.SIGCONT)
    arrivals = await one.received(deliveries)
    await asyncio.sleep(SETTLE_SECONDS)
    return (max(arrivals.values()) - began) / 1e9, one.cpu - cpu_before


async def pulse_cost(options: Options) -> Section:
    """Let a hub take pulses from its queue, and then a consumer that does nothing with them."""
    rounds = Rounds()
    count = options.scaled(PULSES)
    for _ in options.rounds("pulses"):
        async with fleet_trial(_broker(options)) as one:
            origins = agents_of(_plan(options))
            await publish_all(one.agent_settings, pulses(origins, len(origins)))
            await rest(one)
            cpu_before = one.cpu
            os.kill(one.pid, signal.SIGSTOP)
            try:
                await publish_all(one.agent_settings, pulses(origins, count))
            finally:
                os.kill(one.pid, signal.SIGCONT)
            await rest(one)
            cpu = one.cpu - cpu_before
            rounds.add("CPU per pulse", "µs", HUB, 1e6 * cpu / count, "≤ 2 × bare")
            resident, _ = resident_memory(one.pid)
            rounds.add("resident memory", "MB", HUB, resident)
            await one.process.stop()
            await publish_all(one.agent_settings, pulses(origins, count))
            bare = await _consume(one.broker.amqp_url(), hub_pulse_queue_name(one.exchange), count)
            rounds.add("CPU per pulse", "µs", BARE_CONSUMER, 1000 * bare, "≤ 2 × bare")
    return Section(
        metric="fleet-pulses",
        title="A fleet: pulses",
        columns=(HUB, BARE_CONSUMER),
        ratio=(HUB, BARE_CONSUMER),
        rows=rounds.rows(),
        note=(
            f"{count:,} pulses of {options.scaled(AGENTS):,} agents that the hub knows and that "
            "see no event. The bare consumer uses the same library and counts messages."
        ),
    )


async def _consume(url: str, queue: str, count: int) -> float:
    """Consume so many messages in a process of its own. Return the CPU time of each in ms."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.raw", "consumes", url, str(count), queue),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return float(orjson.loads(output)["cpu_ms"])


async def wave(options: Options) -> Section:
    """Let many events happen in a short time, in a fleet of many agents and in one of few."""
    raise_open_files_limit()
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # it logs each lost connection
    rounds = Rounds()
    columns = {_agents_label(options, agents): agents for agents in (AGENTS, FEW_AGENTS)}
    for _ in options.rounds("a wave of changes"):
        for column, agents in columns.items():
            async with fleet_trial(_broker(options)) as one:
                await _wave(one, options, agents, rounds, column)
    many, few = columns
    return Section(
        metric="fleet-wave",
        title="A fleet: a wave of changes",
        columns=(many, few),
        ratio=(many, few),
        rows=rounds.rows(),
        note=(
            f"{options.scaled(WAVE_CHANGES):,} changes in {WAVE_SECONDS:g} s, in {SCOPES} scopes: "
            "events are scheduled, started and ended. Agents poll once a second. The times begin "
            "when the agent of the VM that the event names has recorded the change, and end when "
            "the webhook has it. A copy is a report of an agent whose VM the event does not name. "
            "All agents run in one process on the machine of hub and broker. Before and after the "
            "wave, the hub hears only pulses; their cost is part of the figures."
        ),
    )


def _agents_label(options: Options, agents: int) -> str:
    return f"{options.scaled(agents):,} agents"


async def _wave(
    one: FleetTrial, options: Options, agents: int, rounds: Rounds, column: str
) -> None:
    seen: dict[tuple[int, int], int] = {}
    numbers = iter(range(2**40))

    def on_recorded(_: Origin, event: CloudEvent, is_named: bool) -> None:  # noqa: FBT001  # a callback
        if is_named and event.name in CHANGES:
            number = int(event.data["eventId"][-12:], 16)
            seen.setdefault((CHANGES.index(event.name), number), time.monotonic_ns())

    changes = options.scaled(WAVE_CHANGES)
    memory_before = await asyncio.to_thread(broker_memory, one.broker)
    async with simulated_fleet(
        one.agent_settings,
        _plan(options, agents, changes / (options.scale * WAVE_SECONDS)),
        on_recorded=on_recorded,
        new_id=lambda: event_id(one.run, next(numbers)),
    ) as fleet:
        memory = await asyncio.to_thread(broker_memory, one.broker)
        await rest(one)
        broker = broker_pid(one.broker)
        cpu_before, broker_before = one.cpu, cpu_seconds(broker)
        await fleet.make_changes_at_plan_rate(changes=changes)
        await fleet.wait_until_changes_are_reported(MAX_LATENESS)
        arrivals = await one.received(changes)
        await asyncio.sleep(SETTLE_SECONDS)
        cpu, broker_cpu = one.cpu - cpu_before, cpu_seconds(broker) - broker_before
    milliseconds = {
        name: [
            max(0.0, (arrivals[change, number] - moment) / 1e6)
            for (change, number), moment in seen.items()
            if name == CHANGES[change]
        ]
        for name in CHANGES
    }
    counters = fleet.counters
    resident, _ = resident_memory(one.pid)
    rounds.add("hub CPU per change", "ms", column, 1000 * cpu / changes, "≤ 1.2 × 100 agents")
    copies = counters.duplicate_reports_per_change()
    rounds.add("copies per change", "", column, copies, "≤ 3")
    for name, values in milliseconds.items():
        if values:
            short = name.partition(".")[2]
            rounds.add(f"{short}, p50", "ms", column, percentile(values, 50))
            rounds.add(f"{short}, p99", "ms", column, percentile(values, 99), "≤ 1,000 ms")
    rounds.add("broker CPU per change", "ms", column, 1000 * broker_cpu / changes)
    rounds.add("states received by an agent", "", column, counters.states / options.scaled(agents))
    rounds.add("hub, resident memory", "MB", column, resident)
    per_agent = 1000 * (memory - memory_before) / options.scaled(agents)
    rounds.add("broker memory per agent", "kB", column, per_agent)


async def agent_idle(options: Options) -> Section:
    """Let an agent and a plain relay idle beside each other, with a poll a second."""
    rounds = Rounds()
    for _ in options.rounds("an idle agent"):
        async with fleet_trial(_broker(options)) as hub, metadata_endpoint() as imds:
            imds.holds = False
            with tempfile.TemporaryDirectory() as folder:
                source = {"url": imds.url, "interval": "1s"}
                fleet = agent_section(hub.broker, hub.exchange)
                sink = {
                    "kind": "rabbitmq",
                    "name": "bus",
                    "url": hub.broker.amqp_url(),
                    "exchange": f"{hub.exchange}.plain",
                }
                async with (
                    relay_process(
                        Path(folder) / "agent",
                        {"scope": "bench", "relay": "vm-0", "source": source, "fleet": fleet},
                    ) as agent,
                    relay_process(
                        Path(folder) / "plain",
                        {"scope": "bench", "relay": "vm-1", "source": source, "sinks": [sink]},
                    ) as plain,
                ):
                    await agent.start()
                    await plain.start()
                    await _idle(hub, {AGENT: agent, RELAY: plain}, options.scale, rounds)
    return Section(
        metric="fleet-idle",
        title="A fleet: an idle agent",
        columns=(AGENT, RELAY),
        ratio=(AGENT, RELAY),
        rows=rounds.rows(),
        note=(
            "A real agent and a plain relay with a RabbitMQ sink, at the same time. Both poll once "
            "a second and have nothing to tell."
        ),
    )


async def _idle(
    hub: FleetTrial, relays: Mapping[str, RelayProcess], scale: float, rounds: Rounds
) -> None:
    connection = await aio_pika.connect(hub.broker.amqp_url())
    async with connection, connection.channel() as channel:
        copies = await channel.declare_queue(exclusive=True)
        await copies.bind(agent_publish_exchange_name(hub.exchange), "#")
        await asyncio.sleep(REST * scale)
        sent_before = await _message_count(channel, copies.name)
        before = {name: cpu_seconds(_pid(process)) for name, process in relays.items()}
        began = time.monotonic()
        await asyncio.sleep(IDLE_SECONDS * scale)
        elapsed = time.monotonic() - began
        for name, process in relays.items():
            share = 100 * (cpu_seconds(_pid(process)) - before[name]) / elapsed
            rounds.add("CPU", "% of a core", name, share, "≤ 1.05 × plain relay")
            resident, proportional = resident_memory(_pid(process))
            rounds.add("resident memory", "MB", name, resident)
            rounds.add("its share of it (PSS)", "MB", name, proportional)
        sent = await _message_count(channel, copies.name) - sent_before
    rounds.add("messages sent in a minute", "", AGENT, 60 * sent / elapsed, "≤ 1.2")
    connections = await asyncio.to_thread(hub.broker.evaluate, f"length({_OF_AGENTS}).")
    rounds.add("connections to the broker", "", AGENT, int(connections), "1")


async def _message_count(channel: AbstractChannel, queue: str) -> int:
    declared = await (await channel.get_underlay_channel()).queue_declare(queue, passive=True)
    return declared.message_count or 0


def _pid(process: RelayProcess) -> int:
    assert process.process is not None  # noqa: S101  # it was started
    return process.process.pid


_OF_AGENTS = (
    "[Pid || Pid <- rabbit_networking:connections(), "
    f'rabbit_networking:connection_info(Pid, [user]) == [{{user, <<"{AGENT_USER}">>}}]]'
)
"""Erlang: the connections of the user of the agents."""
