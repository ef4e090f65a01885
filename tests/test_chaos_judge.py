"""The judge of `make chaos` finds what a relay lost, made up, or started without votes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson

from chaos.judge import Counts, Offer, judge
from relay.simulator.azure import RecordedCall
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import open_store
from relay.store.transaction import Transaction
from tests.builders import EVENT_ID, cloudevent
from tests.clocks import NOON, ManualClock

KEY = EVENT_ID.lower()
CHANGES = ["event.scheduled", "event.started", "event.ended"]


CLAIM = {"approvalId": "of nobody", "revision": "0123456789abcdef", "granted": 99, "attempt": 1}


async def write_journal(file: Path, *names: str) -> list[dict[str, Any]]:
    """Write events about one EventId into a journal, and claims; return the events."""
    events = {name: cloudevent(name) for name in names if name != "claim"}

    def work(tx: Transaction) -> None:
        for name in names:
            if name == "claim":
                tx.journal.append_non_event_row(NOON, "claim", CLAIM, event_key=KEY)
            else:
                tx.record(events[name], NOON)

    owner = StateFileScopeAndVm("chaos", "vm-id")
    async with open_store(StoreSettings(path=file), owner, ManualClock(), lambda _: ()) as store:
        await store.transact(work)
    return [orjson.loads(event.body) for event in events.values()]


def start_request(at: int = 0, until: int | None = None, of: str = EVENT_ID) -> RecordedCall:
    """Return a POST of an EventId from one second after noon until another."""
    return RecordedCall(
        at=NOON + timedelta(seconds=at),
        ended_at=None if until is None else NOON + timedelta(seconds=until),
        event_ids=(of,),
        vm="vm-0",
        method="POST",
        path="/metadata/scheduledevents",
        query="",
        peer="",
        headers={},
        body=b"",
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
        (CHANGES, [*events[::-1], ping], {}, False),
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


async def test_start_requests_need_a_quorum_a_claim_and_the_end_of_the_last(tmp_path: Path) -> None:
    lower, other = EVENT_ID.lower(), "another"
    table: list[tuple[int, bool, list[RecordedCall], dict[str, int], int]] = [
        (0, True, [start_request()], {"without_claim": 1}, 1),
        (1, True, [start_request()], {"without_grant": 1}, 1),
        (1, False, [start_request()], {"without_grant": 2}, 1),
        (1, True, [start_request(0, 1), start_request(1, of=lower)], {"without_claim": 1}, 1),
        (2, True, [start_request(0, 2), start_request(1, 3, lower)], {}, 2),
        (2, True, [start_request(0), start_request(5, 6)], {}, 2),
        (1, True, [start_request(0, 2), start_request(1, 3, other)], {}, 1),
    ]
    for number, (claims, voted, posts, wanted, in_flight) in enumerate(table):
        file = tmp_path / f"{number}.db"
        await write_journal(file, *CHANGES, *["claim"] * claims)
        offer = Offer({KEY: CHANGES}, granted={KEY} if voted else set())
        counts = judge(offer, file, {}, posts)
        assert found(counts).items() >= wanted.items(), number
        assert counts.most_in_flight == in_flight, number
        assert ("at the same time" in "".join(counts.problems)) is (in_flight > 1)
        assert Counts(most_in_flight=in_flight).has_failed is (in_flight > 1)
