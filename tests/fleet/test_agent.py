"""An agent with a real RabbitMQ and the simulator: what it reports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from relay.clock import SystemClock
from relay.delivery.worker import Worker
from relay.errors import Rejected
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.agent import agent as agent_parts
from relay.fleet.agent import start_orders
from relay.fleet.agent.agent import ImdsClock
from relay.fleet.link import AgentLink
from relay.fleet.messages import ChangeData, Pulse, PulseRequest
from relay.fleet.settings import AgentSettings
from relay.simulator import VM, Fault, Plan, Setup, Simulator
from tests.builders import DATA, EVENT_ID, cloudevent
from tests.clocks import NOON
from tests.eventually import eventually
from tests.fleet.hub_side import AGENT_USER, SCOPE, HubSide, hub_side, make_order, running_agent
from tests.rabbitmq import Broker

VMS = (VM("vm-0"), VM("vm-1"))


@pytest.fixture
async def hub(own_broker: Broker) -> AsyncIterator[HubSide]:
    async with hub_side(own_broker) as side:
        yield side


@pytest.fixture
async def azure() -> AsyncIterator[Simulator]:
    async with Simulator(Setup(vms=VMS)) as sim:
        yield sim


def live_ids(pulse: Pulse) -> list[str]:
    return [event.eventId for event in pulse.live or ()]


async def test_changes_are_told_as_recorded(hub: HubSide, azure: Simulator, tmp_path: Path) -> None:
    async with running_agent(hub, azure.urls["vm-0"], tmp_path) as running:
        event = azure.schedule(Plan(resources=("vm-0",)))
        await hub.wait_for(ChangeData)
        azure.start(event)
        await hub.wait_for(ChangeData, 2)
        azure.end(event)
        await hub.wait_for(ChangeData, 3)
        journal = await running.relay.store.read(
            lambda tx: [event for _, event in tx.journal.events_after(0, 100)]
        )
    assert [received.message.body for received in hub.reports] == [each.body for each in journal]
    assert {received.user for received in hub.reports} == {AGENT_USER}
    for received, change in zip(hub.reports, ("scheduled", "started", "ended"), strict=True):
        assert received.key == f"event.{change}.reboot.{SCOPE}.vm-0"
    assert hub.reports[0].message.message_id == journal[0].id
    assert hub.reports[0].message.delivery_mode == 2


async def test_a_pulse_says_who_sees_what(hub: HubSide, azure: Simulator, tmp_path: Path) -> None:
    async with running_agent(hub, azure.urls["vm-0"], tmp_path):
        await hub.wait_for_listener()
        event = azure.schedule(Plan(resources=("vm-1",)))
        await eventually(lambda: azure.start_requests == () and len(azure.calls) > 3)

        async def is_seen() -> bool:
            await hub.send(PulseRequest(event_ids=(event.event_id,)))
            count = len(hub.pulses)
            await hub.wait_for_listener(count + 1)
            return live_ids(hub.contents(Pulse)[-1]) == [event.event_id]

        await eventually(is_seen)
    pulse = hub.contents(Pulse)[-1]
    assert pulse.vm_id
    assert {"vm-0", "_vm-0"} <= set(pulse.names)
    assert pulse.live is not None
    assert pulse.live[0].resources == ["vm-1"]
    assert pulse.poll_age is not None
    assert 0 <= pulse.poll_age < 60
    assert pulse.clock_offset is not None
    assert abs(pulse.clock_offset) < 60
    assert {received.key for received in hub.pulses} == {f"pulse.{SCOPE}.vm-0"}
    assert {received.message.expiration for received in hub.pulses} == {120.0}


async def test_an_agent_says_at_once_that_it_has_read_its_first_document(
    hub: HubSide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call can take two minutes. Before it, the agent gets no orders."""
    monkeypatch.setattr(agent_parts, "INTERVAL", 3600.0)
    async with (
        Simulator(Setup(vms=VMS, first_call=2.0)) as azure,
        running_agent(hub, azure.urls["vm-0"], tmp_path),
    ):
        await hub.wait_for_listener(2)
    assert [pulse.poll_age is None for pulse in hub.contents(Pulse)] == [True, False]


async def test_no_pulse_overtakes_a_report_that_waits(
    hub: HubSide, azure: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = 1
    monkeypatch.setattr(Worker, "waiting", property(lambda _: waiting))
    async with running_agent(hub, azure.urls["vm-0"], tmp_path):
        azure.schedule(Plan(resources=("vm-0",)))
        await hub.wait_for(ChangeData)

        async def hears_hub() -> bool:
            await hub.send(make_order("no-such-event", "none"))
            return len(hub.results) > 1

        await eventually(hears_hub, every=0.2)
        assert hub.pulses == []
        waiting = 0
        await hub.wait_for_listener()


async def test_an_agent_that_cannot_read_its_document_does_not_say_that_an_event_is_still_there(
    hub: HubSide, azure: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so after it has read the document again."""
    monkeypatch.setattr(agent_parts, "ANSWER_DELAY", 0.01)
    monkeypatch.setattr(agent_parts, "ANSWER_SPREAD", 0.0)
    async with running_agent(hub, azure.urls["vm-1"], tmp_path, "vm-1") as running:
        await hub.wait_for_listener()
        event = azure.schedule(Plan(resources=("vm-0",)))
        await hub.wait_for(ChangeData)
        source = running.relay.source
        azure.add_fault(Fault(kind="status", lasts=3600.0))
        await eventually(lambda: source.failures > 0)
        pulses = len(hub.pulses)
        await hub.send(PulseRequest(event_ids=(event.event_id,)))
        before = source.failures
        await eventually(lambda: source.failures > before + 1)
        assert len(hub.pulses) == pulses
        azure.clear_faults()
        await hub.send(PulseRequest(event_ids=(event.event_id,)))
        affirming = await hub.wait_for_listener(pulses + 1)
        assert live_ids(affirming) == [event.event_id]


async def test_an_agent_that_is_stopped_ends_the_order_that_it_carries_out(
    hub: HubSide, azure: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_orders, "RESTART_PAUSE", 0.0)
    event = azure.schedule(Plan(resources=("vm-0",)))
    azure.add_fault(Fault(kind="delay", on="approval", time=1.0))
    async with running_agent(hub, azure.urls["vm-0"], tmp_path):
        (reported,) = await hub.wait_for(ChangeData)
        await hub.wait_for_listener()
        order = make_order(event.event_id, reported.revision)
        await hub.send(order)
        await eventually(lambda: bool(azure.start_requests))
        assert hub.results == []
    await eventually(lambda: len(hub.results) == 1)
    assert hub.results[0].result == "accepted"


@pytest.mark.parametrize(
    "reads",
    [
        # A wrong clock is put right by what IMDS says.
        [(1, None, 1), (2, 600.0, 602), (3, 0.0, 3), (4, -600.0, -596)],
        # A Date has no fraction. Else the hub would take the report of a later read for a repeat.
        [
            (1.0, 600.9, 601.9),
            (1.5, 600.0, 601.900001),
            (1.5, 600.0, 601.900002),
            (3.0, 600.0, 603.0),
            (3.0, 600.0, 603.000001),
        ],
    ],
    ids=["wrong", "no fraction"],
)
def test_a_read_has_the_time_of_imds_and_a_later_read_a_later_time(
    reads: list[tuple[float, float | None, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By seconds after noon on this VM, how far IMDS is ahead of that, and what the clock says."""
    now, skew = 0.0, None
    monkeypatch.setattr(SystemClock, "now", lambda _: NOON + timedelta(seconds=now))
    clock = ImdsClock(lambda: skew)
    for now, skew, expected in reads:  # noqa: B007  # the clocks read them
        assert (clock.now() - NOON).total_seconds() == expected


@pytest.mark.parametrize("name", ["event.scheduled", "event.ended", "relay.source-lost"])
async def test_what_an_agent_recorded_is_published_for_its_scope(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[tuple[str, str]] = []

    async def publish(_: AgentLink, event: CloudEvent, key: str) -> None:
        published.append((event.name, key))

    monkeypatch.setattr(AgentLink, "publish", publish)
    settings = AgentSettings.model_validate({"role": "agent", "url": "amqp://h/"})

    data = DATA if name.startswith("event.") else {"sink": None, "reason": "?", "count": 1}
    sink = AgentLink(settings, Origin("vmss-a", "VM-0"), SystemClock())
    await sink.deliver(cloudevent(name, EVENT_ID if data is DATA else None, data))
    # A relay without a fleet recorded this for a sink named hub, before it was an agent. The broker
    # would refuse it and close the channel, again and again.
    with pytest.raises(Rejected):
        await sink.deliver(cloudevent("approval.recorded", EVENT_ID, DATA))
    ((told, key),) = published
    assert told == name
    assert key.endswith(".vmss-a.vm-0")
