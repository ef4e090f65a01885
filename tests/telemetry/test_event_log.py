"""The log of a running relay tells what happened, each thing once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay.events.build import Origin, relay_event
from relay.simulator import Plan
from relay.store.transaction import MAX_EVENTS_IN_RESULTS, Transaction
from relay.telemetry.lines import log_recorded_events
from tests.cli.running_relay import LOCAL_PRINCIPAL, running_relay
from tests.clocks import NOON
from tests.eventually import eventually
from tests.store.open_store import open_store_in


@dataclass(frozen=True, slots=True)
class Told:
    caplog: pytest.LogCaptureFixture

    def fields(self) -> list[dict[str, Any]]:
        """Return the fields of each line that has some, in their order."""
        return [record.fields for record in self.caplog.records if hasattr(record, "fields")]

    def types(self) -> list[str]:
        return [fields["type"] for fields in self.fields() if "type" in fields]

    async def wait(self, name: str, count: int = 1) -> dict[str, Any]:
        """Wait until a type was told so often; return the fields of the newest line."""
        await eventually(lambda: self.types().count(name) >= count, what=name)
        return [fields for fields in self.fields() if fields.get("type") == name][-1]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level(logging.INFO, "relay")
    return Told(caplog)


async def test_the_log_tells_an_event_from_first_to_last_once(tmp_path: Path, told: Told) -> None:
    rule = {"name": "one", "approve": {"votes": 1, "from": [LOCAL_PRINCIPAL]}}
    async with running_relay(tmp_path, rules=[rule], tell_first="0s") as relay:
        event = await relay.announce()
        scheduled = await told.wait("event.scheduled")
        assert (scheduled["eventId"], scheduled["scope"]) == (event.event_id, "west")
        assert (scheduled["eventType"], scheduled["eventSource"]) == ("Reboot", "Platform")
        assert scheduled["resources"] == ["db-0", "db-1"]

        await relay.run("hold", event.event_id, "--reason", "wait")
        held = await told.wait("approval.recorded")
        assert (held["decision"], held["principal"]) == ("hold", LOCAL_PRINCIPAL)
        assert (held["reason"], held["channel"]) == ("wait", "local")
        await relay.run("release", event.event_id)
        assert (await told.wait("approval.recorded", 2))["decision"] == "release"

        await relay.run("approve", event.event_id, "--yes")
        vote = await told.wait("approval.recorded", 3)
        assert (vote["decision"], vote["votes"], vote["required"]) == ("approve", 1, 1)
        granted = await told.wait("approval.granted")
        assert (granted["rule"], granted["revision"]) == ("one", scheduled["revision"])
        accepted = await told.wait("startrequest.accepted")
        assert (accepted["status"], accepted["attempts"]) == (200, 1)
        assert (await told.wait("event.started"))["approvedByRelay"] is True
        relay.azure.end(event.event_id)
        assert (await told.wait("event.ended"))["outcome"] == "completed"

        sent = [fields for fields in told.fields() if "agent" in fields]
        assert [(fields["eventId"], fields["attempts"]) for fields in sent] == [(event.event_id, 1)]
    names = told.types()
    assert names == [
        "event.scheduled",
        *["approval.recorded"] * 3,
        *("approval.granted", "startrequest.accepted", "event.started", "event.ended"),
    ]
    positions = [fields["position"] for fields in told.fields() if "type" in fields]
    assert positions == sorted(set(positions))
    # A restart records nothing, so it tells nothing.
    async with running_relay(tmp_path) as relay:
        other = await relay.announce(Plan(type="Freeze", resources=("db-0",)))
        assert (await told.wait("event.scheduled", 2))["eventId"] == other.event_id
    assert told.types() == [*names, "event.scheduled"]


async def test_a_sink_that_fails_and_recovers_is_told_with_why(tmp_path: Path, told: Told) -> None:
    async with running_relay(tmp_path) as relay:
        relay.receiver.status = 500
        relay.azure.schedule(Plan(type="Freeze", resources=("db-0",)))
        failing = await told.wait("relay.sink-failing")
        assert (failing["sink"], failing["count"]) == ("drain", 1)
        assert "got 500" in failing["reason"]
        relay.receiver.status = 204
        assert (await told.wait("relay.sink-recovered"))["sink"] == "drain"
        await relay.run("sink", "pause", "drain")
        await relay.run("sink", "resume", "drain")
    states = [(f["state"], f["principal"]) for f in told.fields() if "state" in f]
    assert states == [("paused", LOCAL_PRINCIPAL), ("on", LOCAL_PRINCIPAL)]


async def test_events_are_told_in_order_and_once_however_many(tmp_path: Path, told: Told) -> None:
    """Those that do not fit in memory have short lines. A new sink that gets all tells nothing."""
    count = MAX_EVENTS_IN_RESULTS + 3
    async with open_store_in(tmp_path, lambda _: ()) as store:
        store.listeners.recorded.append(log_recorded_events)
        await store.transact(lambda tx: record_pings(tx, count))
        await store.transact(lambda tx: tx.deliver_again(1, "new", NOON))
    assert [fields["position"] for fields in told.fields()] == list(range(1, count + 1))
    assert {fields["type"] for fields in told.fields()} == {"relay.ping"}
    assert sum("reason" in fields for fields in told.fields()) == MAX_EVENTS_IN_RESULTS


def record_pings(tx: Transaction, count: int) -> None:
    event = relay_event(
        "relay.ping",
        Origin("west", "vm-0"),
        NOON,
        sink="drain",
        reason="asked for by a test",
        count=1,
        head=str(tx.head()),
    )
    tx.record_all([(event, None)] * count, NOON)
