"""The judge finds what a relay lost, made up, or started without votes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import orjson
import pytest

from chaos import report
from chaos.faults import Place, all_faults
from chaos.judge import Counts, Offer, judge
from chaos.load import Load
from relay.outbox import StateFileScopeAndVm, StoreSettings
from relay.outbox.sqlite import open_store
from relay.outbox.transaction import Transaction
from relay.simulator import VM, Setup, Simulator
from relay.simulator.azure import RecordedCall
from tests.approvals.manual_clock import NOON, ManualClock
from tests.builders import EVENT_ID, cloudevent
from tests.rabbitmq import Broker

KEY = EVENT_ID.lower()
CHANGES = ["event.scheduled", "event.started", "event.ended"]


async def write_journal(file: Path, *names: str) -> list[dict[str, Any]]:
    """Write events about one EventId into a journal, and claims; return the events."""
    events: list[dict[str, Any]] = []

    def work(tx: Transaction) -> None:
        for name in names:
            if name == "claim":
                tx.journal.append_non_event_row(
                    NOON,
                    "claim",
                    {"approvalId": "of nobody", "revision": "0123456789abcdef"},
                    event_key=KEY,
                )
            else:
                event = cloudevent(name)
                tx.record(event, NOON)
                events.append(orjson.loads(event.body))

    owner = StateFileScopeAndVm("chaos", "vm-id")
    async with open_store(StoreSettings(path=file), owner, ManualClock(), lambda _: ()) as store:
        await store.transact(work)
    return events


def start_request(event_id: str = EVENT_ID, at: int = 0, until: int | None = None) -> RecordedCall:
    """Return a POST of an EventId from one second after noon until another."""
    return RecordedCall(
        at=NOON + timedelta(seconds=at),
        vm="vm-0",
        method="POST",
        path="/metadata/scheduledevents",
        query="api-version=2020-07-01",
        peer="127.0.0.1:1",
        headers={},
        body=b"",
        event_ids=(event_id,),
        ended_at=None if until is None else NOON + timedelta(seconds=until),
    )


def found(counts: Counts) -> dict[str, int]:
    """Return the counts of what must not be."""
    names = ("lost", "repeated", "unexpected", "without_grant", "without_claim", "invalid_journals")
    return {name: getattr(counts, name) for name in names if getattr(counts, name)}


async def test_a_relay_that_keeps_its_promises_is_found_to_do_so(tmp_path: Path) -> None:
    events = await write_journal(tmp_path / "relay.db", *CHANGES)
    counts = judge(
        Offer({KEY: CHANGES}), tmp_path / "relay.db", {"a": events, "b": events[::-1]}, []
    )
    assert found(counts) == {}
    assert (counts.offered, counts.recorded, counts.delivered) == (3, 3, 6)
    assert not counts.has_failed


async def test_what_is_lost_repeated_and_made_up_is_counted(tmp_path: Path) -> None:
    events = await write_journal(tmp_path / "relay.db", *CHANGES)
    stranger = {**events[0], "id": "of nobody"}
    received = {
        "lacks one": events[1:],
        "has one twice": [events[0], *events],
        "has a stranger": [*events, stranger],
        "has what need not arrive": [*events, {"type": "io.imdsrelay.relay.ping.v1", "id": "1"}],
    }
    offer = Offer({KEY: CHANGES})
    wanted: Mapping[str, Mapping[str, int]] = {
        "lacks one": {"lost": 1},
        "has one twice": {"repeated": 1},
        "has a stranger": {"unexpected": 1},
        "has what need not arrive": {},
    }
    for sink, events_of_sink in received.items():
        counts = judge(offer, tmp_path / "relay.db", {sink: events_of_sink}, [])
        assert found(counts) == wanted[sink]
        assert counts.has_failed is (sink not in ("has one twice", "has what need not arrive"))
        missing = f"{events[0]['id']}: None"  # this journal has no deliveries
        assert (missing in counts.problems) is (sink == "lacks one")


async def test_changes_that_are_missing_or_that_azure_did_not_make_are_counted(
    tmp_path: Path,
) -> None:
    file = tmp_path / "relay.db"
    events = await write_journal(file, *CHANGES)
    missing = judge(Offer({KEY: [*CHANGES, "event.scheduled"]}), file, {"a": events}, [])
    assert found(missing) == {"lost": 1}
    invented = judge(Offer({KEY: CHANGES[:2]}), file, {"a": events}, [])
    assert found(invented) == {"unexpected": 1}
    other_order = judge(Offer({KEY: CHANGES[::-1]}), file, {"a": events}, [])
    assert found(other_order) == {}
    assert other_order.has_failed


async def test_a_start_request_needs_a_quorum_and_a_claim_that_follows_from_votes(
    tmp_path: Path,
) -> None:
    await write_journal(tmp_path / "none.db", *CHANGES)
    await write_journal(tmp_path / "claim.db", *CHANGES, "claim")
    with_votes = Offer({KEY: CHANGES}, granted={KEY})
    posts = [start_request()]
    assert found(judge(with_votes, tmp_path / "none.db", {}, posts)) == {"without_claim": 1}
    assert found(judge(with_votes, tmp_path / "claim.db", {}, posts)) == {"without_grant": 1}
    without_votes = Offer({KEY: CHANGES})
    assert found(judge(without_votes, tmp_path / "claim.db", {}, posts)) == {"without_grant": 2}
    posts = [start_request(), start_request(EVENT_ID.lower(), at=1)]
    twice = judge(with_votes, tmp_path / "claim.db", {}, posts)
    assert (twice.without_claim, twice.start_requests, twice.most_start_requests) == (1, 2, 2)


@pytest.mark.parametrize(
    ("posts", "in_flight"),
    [
        ([], 0),
        ([(EVENT_ID, 0, 1), (EVENT_ID, 1, 2)], 1),
        ([(EVENT_ID, 0, 2), (EVENT_ID.lower(), 1, 3), (EVENT_ID, 2, 3)], 2),
        ([(EVENT_ID, 0, None), (EVENT_ID, 5, 6)], 2),
        ([(EVENT_ID, 0, 2), ("another", 1, 3)], 1),
    ],
    ids=["none", "one after the other", "overlapping", "never answered", "of two events"],
)
async def test_two_start_requests_in_flight_for_an_event_are_found(
    posts: Sequence[tuple[str, int, int | None]], in_flight: int, tmp_path: Path
) -> None:
    await write_journal(tmp_path / "relay.db", *CHANGES, "claim", "claim", "claim")
    counts = judge(
        Offer({KEY: CHANGES}, granted={KEY}),
        tmp_path / "relay.db",
        {},
        [start_request(event_id, at, until) for event_id, at, until in posts],
    )
    assert counts.most_in_flight == in_flight
    assert ("at the same time" in "".join(counts.problems)) is (in_flight > 1)
    assert Counts(most_in_flight=in_flight).has_failed is (in_flight > 1)


async def test_a_journal_that_was_changed_is_invalid(tmp_path: Path) -> None:
    file = tmp_path / "relay.db"
    events = await write_journal(file, *CHANGES)
    file.write_bytes(file.read_bytes().replace(b"p\xc3\xa5virker", b"p\xc3\xa5virkes"))
    assert found(judge(Offer({KEY: CHANGES}), file, {"a": events}, [])) == {"invalid_journals": 1}


def test_the_page_has_a_row_for_each_fault_that_was_run() -> None:
    proofs = report.stored().proofs
    assert proofs.keys() <= all_faults().keys()
    page = report.page()
    assert all(f"| `{name}` | {proof.counts.rounds:,} |" in page for name, proof in proofs.items())


@pytest.mark.parametrize("name", ["kill", "receiver-errors"])
async def test_a_round_of_a_fault_loses_nothing(
    name: str, own_broker: Broker, tmp_path: Path
) -> None:
    rounds = []
    place = Place(
        folder=tmp_path,
        broker=own_broker,
        chance=random.Random(name),  # noqa: S311  # no secret
        advance=lambda: rounds.append(name),
    )
    counts = await all_faults()[name].run(place, 1)
    assert found(counts).keys() <= {"repeated"}
    assert (counts.problems, len(rounds)) == ([], 1)
    assert 0 < counts.offered == counts.recorded < counts.delivered
    assert counts.start_requests > 0


async def test_a_load_that_has_failed_ends_the_trial_that_waits_for_it(tmp_path: Path) -> None:
    """Otherwise the trial would wait for ever, and nobody would learn why."""

    @dataclass
    class Silent:
        store: Path
        url: str

    async with Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        load = Load(azure, Silent(tmp_path / "none.db", "no URL"), random.Random(0))  # noqa: S311  # no secret
        azure.schedule = fail  # type: ignore[method-assign]  # as a mistake in the load does
        running = asyncio.create_task(load.run())
        with pytest.raises(RuntimeError, match="the load has failed") as raised:
            await load.wait_until_busy()
        assert "of this test" in str(raised.value.__cause__.exceptions)  # type: ignore[union-attr]  # a group
        with pytest.raises(ExceptionGroup):
            await running


def fail(*_: object, **__: object) -> NoReturn:
    """Raise an error."""
    raise ValueError("of this test")
