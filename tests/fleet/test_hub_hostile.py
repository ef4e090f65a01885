"""Messages to the hub that no honest agent sends. They have no effect, and are told."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from relay.events.build import Origin
from relay.fleet.messages import Message, Pulse, VoteMessage
from relay.simulator import Plan
from relay.simulator.event import Event
from relay.store import TrackedEvent
from tests.eventually import eventually
from tests.fleet.hub_side import AGENT_USER, STRANGER
from tests.fleet.running_fleet import RunningFleet, one_vote, running_fleet
from tests.rabbitmq import Broker
from tests.raw_amqp import RefusedError

SCOPE = "vmss-a-1f0c33ab"
OTHER = "vmss-b-2e1d44bc"
RULE = one_vote("client:ops", "vm:*/*")
DOMAINS = ({"user": AGENT_USER, "scopes": ["vmss-a-*"]}, {"user": STRANGER, "scopes": ["vmss-b-*"]})


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
    bad = ("relay.fleet.link", "relay.fleet.hub.link", "internal error")
    lines = [f"{each.name} {each.getMessage()}" for each in caplog.get_records("call")]
    assert [line for line in lines if any(text in line for text in bad)] == []


def body_of(message: Message, scope: str = SCOPE, relay: str = "vm-0") -> bytes:
    """Return a message as an agent would send it."""
    return message.to_event(Origin(scope, relay), datetime.now(UTC)).body


PULSE = Pulse(version="1", names=(), live=(), poll_age=0.0, clock_offset=0.0)


async def test_what_cannot_be_used_is_dead_lettered_counted_and_told(fleet: RunningFleet) -> None:
    event = await fleet.scheduled("vm-0")
    await fleet.publish(f"event.scheduled.reboot.{SCOPE}.vm-0", b"{")
    await fleet.publish(f"start.{SCOPE}.vm-1", body_of(PULSE))  # another relay than its key
    await fleet.publish(f"vote.{SCOPE}.vm-0.more", b"{}", user=STRANGER)
    await eventually(fleet.count_dead, lambda dead: dead == 3)
    for relay in ("vm-0", "vm-1"):
        await eventually(lambda relay=relay: complaints(fleet, relay) == 1)
    assert fleet.told(event.event_id) == ["event.scheduled"]
    fleet.azure.cancel(event)
    await eventually(lambda: fleet.told(event.event_id)[-1] == "event.ended")


def complaints(fleet: RunningFleet, relay: str) -> int:
    told = (each for each in fleet.inbox.events if "dead-lettered" in each["type"])
    return sum(f"agent {relay} of scope {SCOPE}" in each["data"]["reason"] for each in told)


def vote_for(event: Event, scope: str = SCOPE, relay: str = "vm-0", revision: str = "r") -> bytes:
    body = {"eventId": event.event_id, "decision": "approve", "revision": revision, "scope": SCOPE}
    vote = VoteMessage(nonce="n", request_id=secrets.token_hex(8), user="local:root", body=body)
    return body_of(vote, scope, relay)


async def test_no_vote_of_anybody_else_has_an_effect(fleet: RunningFleet) -> None:
    event = await fleet.scheduled("vm-0")
    key, vote = f"vote.{SCOPE}.vm-0", vote_for(event)
    # The broker lets the stranger do everything.
    await fleet.publish(key, vote, user=STRANGER)
    await fleet.publish(key, vote, user=STRANGER, user_id=None)
    await fleet.publish(f"{fleet.exchange}.fleet.in", vote, user=STRANGER, exchange="")
    await fleet.publish(f"vote.{OTHER}.vm-0", vote, user=STRANGER)
    await fleet.publish(
        f"vote.{OTHER}.vm-9", vote_for(event, OTHER, "vm-9"), user=STRANGER, headers={"CC": [key]}
    )
    dead = 5
    # RabbitMQ 3.10 does not check the keys in the header. Later versions refuse the message.
    try:
        await fleet.publish(key, vote, headers={"CC": [f"vote.{OTHER}.vm-0"]})
    except RefusedError:
        pass
    else:
        dead += 1
    await eventually(fleet.count_dead, lambda count: count == dead)
    assert fleet.told(event.event_id) == ["event.scheduled"]
    assert fleet.azure.start_requests == ()
    assert {agent.scope for agent in fleet.roster} == {SCOPE}


async def test_a_vote_right_after_the_report_finds_the_event(fleet: RunningFleet) -> None:
    """Both wait for a hub that is down, and arrive together."""
    await fleet.stop_hub()
    event = fleet.azure.schedule(Plan(resources=("vm-0",)))
    known: list[TrackedEvent] = []

    async def is_reported() -> bool:
        store = fleet.relays[SCOPE, "vm-0"].relay.store
        known[:] = await store.read(lambda tx: tx.occurrences.live_occurrences())
        return bool(known) and not await store.read(lambda tx: tx.deliveries.waiting_entries("hub"))

    await eventually(is_reported)
    await fleet.publish(f"vote.{SCOPE}.vm-0", vote_for(event, revision=known[0].revision))
    await fleet.start_hub()
    await eventually(lambda: len(fleet.told(event.event_id)) >= 2)
    assert fleet.told(event.event_id)[:2] == ["event.scheduled", "approval.recorded"]
