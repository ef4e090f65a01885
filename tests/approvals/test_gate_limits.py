"""The gate with limits: what waits goes by itself when a slot becomes free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relay.approvals import ApprovalsSettings
from relay.approvals.limits import Limit
from relay.events.model import ScheduledEvent
from tests.approvals.builders import build_event
from tests.approvals.running_gate import ScopeOfFleet, running_gate, running_hub
from tests.clocks import ManualClock
from tests.eventually import eventually

A, B, C = (
    build_event(name, resources=(machine,), due=due)
    for name, machine, due in (("A", "db-1", 900), ("B", "db-2", 800), ("C", "db-3", 700))
)


def limited(approve: Any, **changes: Any) -> ApprovalsSettings:
    """One machine at a time, and two minutes between them."""
    return ApprovalsSettings.model_validate(
        {
            "rules": [{"name": "all", "approve": approve}],
            "limits": [{"name": "databases", "max": 1, "rest": "2m"} | changes],
        }
    )


VOTES = {"votes": 1, "from": ["client:alice"]}


def started(of: ScheduledEvent) -> ScheduledEvent:
    """The same event after Azure began."""
    return build_event(of.event_id, resources=of.resources, event_status="Started", not_before=None)


async def test_a_grant_that_waits_reads_no_document_and_goes_when_the_slot_is_free(
    tmp_path: Path,
) -> None:
    """Azure starts another event between the grant and the claim."""
    async with running_gate(tmp_path, A, B, settings=limited(VOTES)) as harness:
        harness.azure.document = (A, started(B))
        await harness.submit(of=A)
        await harness.settle()
        reads = harness.azure.reads
        for _ in range(20):
            harness.clock.advance(1.0)
            await harness.settle()
        assert (harness.azure.sent, harness.azure.reads) == ([], reads)
        await harness.record_document(A)
        await harness.settle()
        assert harness.azure.sent == []
        await harness.clock.advance_until(lambda: len(harness.azure.sent) == 1, step=1.0)
        assert harness.azure.sent == ["A"]


async def test_more_known_machines_make_more_slots_after_a_wake(tmp_path: Path) -> None:
    known = 10

    def count(_: Limit) -> int:
        return known

    settings = limited("automatic", max="10%")
    async with running_gate(tmp_path, settings=settings, count_machines=count) as harness:
        await harness.record_document(A, B)
        await harness.wait_for_start_requests(1)
        known = 20
        harness.gate.wake()
        await eventually(lambda: len(harness.azure.sent) == 2)
        assert harness.azure.sent == ["B", "A"]


async def test_a_limit_of_a_hub_counts_all_scopes_and_its_slot_goes_from_one_to_another(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    west, east = ScopeOfFleet(clock, "west", A), ScopeOfFleet(clock, "east", B)
    settings = limited(VOTES, rest="0s")
    async with running_hub(tmp_path, clock, west, east, settings=settings) as harness:
        # B is granted in its scope, and Azure starts A in the other one before the claim.
        east.may_read.clear()
        assert (await harness.submit(of=B)).body["state"] == "granted"
        west.document = (started(A),)
        await west.poll()
        east.may_read.set()
        await harness.settle()
        assert (east.sent, west.sent) == ([], [])
        assert harness.events("approval.granted")[-1].attributes["scope"] == "east"
        west.document = ()
        await west.poll()
        await clock.advance_until(lambda: east.sent == ["B"])
