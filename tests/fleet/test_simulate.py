"""The simulated fleet: agents that only differ from real ones in what nobody else can see."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import orjson
import pytest

from relay.clock import SystemClock
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.model import Document
from relay.fleet.settings import AgentSettings
from relay.imds.document import parse_document
from relay.ingest.recorder import Recorder, SuccessfulPoll
from relay.roles.simulated_agents import EventStateCache, LightRecorder
from relay.roles.simulated_fleet import FleetPlan, SimulatedFleet, simulated_fleet
from relay.simulator import VM, Plan, Setup
from relay.simulator.azure import SimulatedAzure
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import open_store
from tests import documented
from tests.cli.command import environment
from tests.eventually import eventually
from tests.fleet.hub_side import AGENT_USER, HUB_USER
from tests.fleet.running_fleet import RunningFleet, running_fleet
from tests.rabbitmq import Broker

PREFIX = "vmss-a-load"


@asynccontextmanager
async def hub_with(
    broker: Broker, directory: Path, plan: FleetPlan, **hub: object
) -> AsyncIterator[tuple[RunningFleet, SimulatedFleet]]:
    """Run a real hub, and a simulated fleet that it hears."""
    async with running_fleet(broker, directory, {}, hub=hub) as running:
        settings = AgentSettings.model_validate(
            {
                "role": "agent",
                "url": broker.amqp_url(AGENT_USER),
                "exchange": running.exchange,
                "hub_user": HUB_USER,
            }
        )
        async with simulated_fleet(settings, plan) as fleet:
            yield running, fleet


async def test_a_light_recorder_makes_the_events_of_the_recorder(tmp_path: Path) -> None:
    origin = Origin("vmss-a-1f0c33ab", "vm-0")
    azure = SimulatedAzure(Setup(vms=(VM("vm-0"), VM("vm-1"))))
    at = datetime(2026, 5, 1, tzinfo=UTC)

    def document() -> Document:
        return parse_document(orjson.dumps(azure.document()))

    documents = [document()]
    first = azure.schedule(Plan(resources=("vm-0",), lasts=None))
    second = azure.schedule(Plan(type="Freeze", resources=("vm-1",), lasts=None))
    documents.append(document())
    azure.update_event(first, notice=600)
    azure.start(second)
    documents.append(document())
    azure.end(second)
    azure.cancel(first)
    documents.append(document())
    light = LightRecorder(origin, EventStateCache())
    made = [
        event
        for number, each in enumerate(documents)
        for event in light.make_change_events(each, at + timedelta(seconds=number))
    ]
    owner = StateFileScopeAndVm(origin.scope, None)
    settings = StoreSettings(path=tmp_path / "relay.db")
    recorder = Recorder(origin, None, None)
    async with open_store(settings, owner, SystemClock(), lambda _: ()) as store:
        for number, each in enumerate(documents):
            poll = SuccessfulPoll(each, at + timedelta(seconds=number), gap=False)
            await store.transact(partial(recorder.record, poll=poll))
        recorded = await store.read(
            lambda tx: [tx.journal.require_event_at_position(number) for number in range(1, 7)]
        )
    assert len(made) == 6
    assert [_content(event) for event in made] == [_content(event) for event in recorded]


def _content(event: CloudEvent) -> tuple[object, object]:
    return event.attributes, event.data


async def test_each_change_of_a_simulated_fleet_is_told_once(
    own_broker: Broker, tmp_path: Path
) -> None:
    plan = FleetPlan(agents=6, scopes=2, scope_prefix=PREFIX, rate=2.0, poll_interval=0.2)
    async with hub_with(own_broker, tmp_path, plan) as (running, fleet):
        await fleet.make_changes_at_plan_rate(changes=12)
        assert await fleet.wait_until_changes_are_reported(30)
        counters = fleet.counters
        box = running.inbox
        await eventually(lambda: len({event["id"] for event in box.events}) == counters.changes)
        assert counters.changes == 12
        assert counters.recorded == counters.published + counters.superseded == 3 * 12
        assert counters.published >= 12
        assert counters.superseded > 0
        assert counters.pulses >= 6
        assert {event["scope"] for event in box.events} == {f"{PREFIX}-0", f"{PREFIX}-1"}


async def test_simulated_machines_vote_and_their_agents_carry_out_the_order(
    own_broker: Broker, tmp_path: Path
) -> None:
    plan = FleetPlan(
        agents=3, scopes=1, scope_prefix=PREFIX, rate=1.0, votes=True, poll_interval=0.2
    )
    rule = {"name": "machines", "approve": {"votes": 1, "from": ["vm:vmss-a-load-*/*"]}}
    async with hub_with(own_broker, tmp_path, plan, approvals={"rules": [rule]}) as (_, fleet):
        await asyncio.sleep(0)
        run = asyncio.create_task(fleet.make_changes_at_plan_rate())
        try:
            await eventually(lambda: fleet.counters.start_requests > 0, within=60)
            await eventually(lambda: fleet.counters.results > 0)
        finally:
            run.cancel()
        counters = fleet.counters
        assert counters.votes >= counters.accepted_votes > 0
        assert counters.orders >= counters.start_requests


async def test_the_command_of_the_page_prints_what_it_did(
    own_broker: Broker, tmp_path: Path
) -> None:
    """With fewer agents, for a shorter time."""
    shown = documented.block("docs/simulator.md", "sh", "A whole fleet")
    program, *arguments = shown.split()
    assert program == "imds-relay"
    for option, value in {"agents": "4", "scopes": "2", "rate": "4", "duration": "2"}.items():
        arguments[arguments.index(f"--{option}") + 1] = value
    async with running_fleet(own_broker, tmp_path, {}) as running:
        (tmp_path / "broker-url").write_text(own_broker.amqp_url(AGENT_USER))
        command = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "relay", *arguments, "--json"),
            *("--scope-prefix", PREFIX, "--exchange", running.exchange),
            cwd=tmp_path,
            env=environment(),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await command.communicate()
        counters = orjson.loads(output)
        assert command.returncode == 0
        assert counters["changes"] >= 4
        assert counters["waiting"] == 0
        assert counters["published"] >= counters["changes"]


async def test_a_limit_of_open_files_limits_the_agents(own_broker: Broker, tmp_path: Path) -> None:
    async with running_fleet(own_broker, tmp_path, {}) as running:
        command = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "relay", "fleet", "simulate", "--agents", "50", "--scopes", "2"),
            *("--scope-prefix", PREFIX, "--exchange", running.exchange, "--rate", "0"),
            *("--duration", "0", "--url", own_broker.amqp_url(AGENT_USER), "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (72, 72)),
        )
        output, errors = await command.communicate()
        assert b"8 agents instead of 50" in errors
        assert orjson.loads(output)["pulses"] >= 0


@pytest.mark.parametrize(("agents", "scopes"), [(3, 4), (1, 2)])
def test_a_scope_without_an_agent_is_refused(agents: int, scopes: int) -> None:
    with pytest.raises(ValueError, match="at least one agent for each scope"):
        FleetPlan(agents=agents, scopes=scopes)


def test_scopes_are_equally_large_as_far_as_possible() -> None:
    scopes = FleetPlan(agents=11, scopes=4).vm_names_by_scope
    assert sorted(map(len, scopes.values())) == [2, 3, 3, 3]
    assert len({vm for vms in scopes.values() for vm in vms}) == 11
