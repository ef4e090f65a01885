"""The judge of `make chaos` finds what a relay lost, made up, or started without votes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest

from chaos.judge import Counts, Offer, judge
from relay.simulator.azure import RecordedCall
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import open_store
from relay.store.transaction import Transaction
from tests.builders import EVENT_ID, cloudevent
from tests.clocks import NOON, ManualClock

KEY = EVENT_ID.lower()
CHANGES = ["event.scheduled", "event.started", "event.ended"]


async def write_journal(file: Path, *names: str) -> list[dict[str, Any]]:
    """Write events about one EventId into a journal, and claims; return the events."""
    events: list[dict[str, Any]] = []

    def work(tx: Transaction) -> None:
        for name in names:
            if name == "claim":
                claim = {
                    "approvalId": "of nobody",
                    "revision": "0123456789abcdef",
                    "granted": 99,
                    "attempt": 1,
                }
                tx.journal.append_non_event_row(NOON, "claim", claim, event_key=KEY)
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


async def test_what_is_lost_repeated_and_made_up_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "relay.db"
    events = await write_journal(file, *CHANGES)
    stranger = {**events[0], "id": "of nobody"}
    ping = {"type": "io.imdsrelay.relay.ping.v1", "id": "1"}
    table: list[tuple[list[str], list[dict[str, Any]], dict[str, int], bool]] = [
        (CHANGES, events[::-1], {}, False),
        (CHANGES, [*events, ping], {}, False),
        (CHANGES, events[1:], {"lost": 1}, True),
        (CHANGES, [events[0], *events], {"repeated": 1}, False),
        (CHANGES, [*events, stranger], {"unexpected": 1}, True),
        ([*CHANGES, "event.scheduled"], events, {"lost": 1}, True),
        (CHANGES[:2], events, {"unexpected": 1}, True),
        (CHANGES[::-1], events, {}, True),
    ]
    for offered, received, wanted, has_failed in table:
        counts = judge(Offer({KEY: offered}), file, {"sink": received}, [])
        assert (found(counts), counts.has_failed) == (wanted, has_failed), (offered, received)
    file.write_bytes(file.read_bytes().replace(b"p\xc3\xa5virker", b"p\xc3\xa5virkes"))
    changed = judge(Offer({KEY: CHANGES}), file, {"sink": events}, [])
    assert found(changed) == {"invalid_journals": 1}


async def test_a_start_request_needs_a_quorum_and_a_claim_that_follows_from_votes(
    tmp_path: Path,
) -> None:
    await write_journal(tmp_path / "none.db", *CHANGES)
    await write_journal(tmp_path / "claim.db", *CHANGES, "claim")
    with_votes, without_votes = Offer({KEY: CHANGES}, granted={KEY}), Offer({KEY: CHANGES})
    posts = [start_request()]
    assert found(judge(with_votes, tmp_path / "none.db", {}, posts)) == {"without_claim": 1}
    assert found(judge(with_votes, tmp_path / "claim.db", {}, posts)) == {"without_grant": 1}
    assert found(judge(without_votes, tmp_path / "claim.db", {}, posts)) == {"without_grant": 2}
    posts = [start_request(), start_request(EVENT_ID.lower(), at=1)]
    twice = judge(with_votes, tmp_path / "claim.db", {}, posts)
    assert (twice.without_claim, twice.start_requests, twice.most_start_requests) == (1, 2, 2)


@pytest.mark.parametrize(
    ("posts", "in_flight"),
    [
        ([(EVENT_ID, 0, 1), (EVENT_ID, 1, 2)], 1),
        ([(EVENT_ID, 0, 2), (EVENT_ID.lower(), 1, 3), (EVENT_ID, 2, 3)], 2),
        ([(EVENT_ID, 0, None), (EVENT_ID, 5, 6)], 2),
        ([(EVENT_ID, 0, 2), ("another", 1, 3)], 1),
    ],
    ids=["one after the other", "overlapping", "never answered", "of two events"],
)
async def test_two_start_requests_in_flight_for_an_event_are_found(
    posts: Sequence[tuple[str, int, int | None]], in_flight: int, tmp_path: Path
) -> None:
    await write_journal(tmp_path / "relay.db", *CHANGES, "claim", "claim", "claim")
    sent = [start_request(*post) for post in posts]
    counts = judge(Offer({KEY: CHANGES}, granted={KEY}), tmp_path / "relay.db", {}, sent)
    assert counts.most_in_flight == in_flight
    assert ("at the same time" in "".join(counts.problems)) is (in_flight > 1)
    assert Counts(most_in_flight=in_flight).has_failed is (in_flight > 1)
