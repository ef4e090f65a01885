"""Messages to the hub that no honest agent sends. They have no effect, and are told."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from relay.events.build import Origin
from relay.fleet.messages import Message, Pulse, PulseRequest
from relay.simulator import Plan
from relay.simulator.event import Event
from tests.fleet.hub_side import AGENT_USER, STRANGER
from tests.fleet.running_fleet import RunningFleet, running_fleet
from tests.journey.relay_process import eventually
from tests.rabbitmq import Broker

SCOPE = "vmss-a-1f0c33ab"
OTHER = "vmss-b-2e1d44bc"
RULE = {
    "approvals": {
        "rules": [{"name": "ops", "approve": {"votes": 1, "from": ["client:ops", "vm:*/*"]}}]
    }
}
DOMAINS = (
    {"user": AGENT_USER, "scopes": ["vmss-a-*"]},
    {"user": STRANGER, "scopes": ["vmss-b-*"]},
)


@pytest.fixture
async def fleet(own_broker: Broker, tmp_path: Path) -> AsyncIterator[RunningFleet]:
    """A hub and two agents. A stranger, whom the broker lets do everything, has a domain too."""
    async with running_fleet(
        own_broker, tmp_path, {SCOPE: ["vm-0", "vm-1"]}, hub=RULE, domains=DOMAINS
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def stays_connected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if a message ends the connection of the hub, or meets an error in it."""
    caplog.set_level(logging.WARNING)
    yield
    bad = ("relay.fleet.hub.link", "internal error")
    lines = [f"{each.name} {each.getMessage()}" for each in caplog.get_records("call")]
    assert [line for line in lines if any(text in line for text in bad)] == []


def body_of(message: Message, scope: str = SCOPE, relay: str = "vm-0", **changes: Any) -> bytes:
    """Return a message as an agent would send it; ``changes`` replace fields of its data."""
    event = message.to_event(Origin(scope, relay), datetime.now(UTC))
    fields = orjson.loads(event.body)
    fields["data"].update(changes)
    return orjson.dumps(fields)


PULSE = Pulse(
    vm_id="id",
    boot_id=None,
    version="1",
    zone=None,
    names=(),
    live=(),
    poll_age=0.0,
    clock_offset=0.0,
)


async def scheduled(fleet: RunningFleet) -> Event:
    """Return an event that the hub has told."""
    event = fleet.azures[SCOPE].schedule(Plan(resources=("vm-0",)))
    await eventually(lambda: fleet.told(event.event_id) == ["event.scheduled"])
    return event


UNUSABLE = {
    "no JSON": ("event.scheduled.reboot.{scope}.vm-0", b"{"),
    "no message": ("vote.{scope}.vm-0", b"{}"),
    "another kind than its key": ("event.ended.reboot.{scope}.vm-0", body_of(PULSE)),
    "a message of a hub": ("vote.{scope}.vm-0", body_of(PulseRequest())),
    "another relay than its key": ("start.{scope}.vm-1", body_of(PULSE)),
    "an unknown key": ("vote.{scope}.vm-0.more", b"{}"),
}


async def test_what_cannot_be_used_is_dead_lettered_counted_and_told(fleet: RunningFleet) -> None:
    event = await scheduled(fleet)
    for number, (key, body) in enumerate(UNUSABLE.values(), start=1):
        user = STRANGER if "more" in key else AGENT_USER
        await fleet.publish(key.format(scope=SCOPE), body, user=user)
        await eventually(lambda number=number: has_dead(fleet, number))
    for relay in ("vm-0", "vm-1"):
        await eventually(lambda relay=relay: complaints(fleet, relay) == 1)
    assert fleet.told(event.event_id) == ["event.scheduled"]
    fleet.azures[SCOPE].cancel(event)
    await eventually(lambda: fleet.told(event.event_id)[-1] == "event.ended")


def complaints(fleet: RunningFleet, relay: str) -> int:
    """Return how often the hub told of unusable messages of an agent."""
    told = [
        each["data"]["reason"] for each in fleet.inbox.events if "dead-lettered" in each["type"]
    ]
    return sum(f"agent {relay} of scope {SCOPE}" in reason for reason in told)


async def has_dead(fleet: RunningFleet, number: int) -> bool:
    """Whether so many messages were dead-lettered."""
    return await fleet.count_dead() == number


async def test_wild_numbers_and_times_in_a_pulse_do_no_harm(fleet: RunningFleet) -> None:
    event = await scheduled(fleet)
    key = f"pulse.{SCOPE}.vm-0"
    for number in (1e300, 1e18, 1e12, -1e300, -1e12):
        await fleet.publish(key, body_of(PULSE, clockOffset=number))
        await fleet.publish(key, body_of(PULSE, pollAge=abs(number)))
    await fleet.publish(f"pulse.{SCOPE}.vm-1", body_of(PULSE, relay="vm-1", clockOffset=1e300))
    fleet.azures[SCOPE].cancel(event)
    await eventually(lambda: fleet.told(event.event_id)[-1] == "event.ended")
