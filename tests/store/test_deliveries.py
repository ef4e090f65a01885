"""Entries and attempts: waiting entries, pages, redelivery and retention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest

from relay.events.cloudevent import event_name
from relay.store import Attempt, Entry, EntryState, FirstAnswer, StoreSettings
from relay.store.audit import verify_journal
from relay.store.deliveries import DeliverySummary
from relay.store.retention import prune_all_tables
from relay.store.transaction import Transaction
from tests.store.open_store import NOW, numbered_event, open_file_in

LATER = NOW + timedelta(minutes=1)


@pytest.fixture
def tx(tmp_path: Path) -> Iterator[Transaction]:
    """A transaction on a fresh file with two active sinks."""
    with open_file_in(tmp_path / "relay.db") as file:
        transaction = Transaction(file.connection, lambda _: ("bus", "chat"))
        for sink in ("bus", "chat"):
            transaction.deliveries.set_sink_state(sink, "on")
        yield transaction


def record(
    tx: Transaction,
    number: int,
    name: str = "event.scheduled",
    subject: str | None = None,
    **data: object,
) -> list[Entry]:
    """Record an event. Return its entries as the file has them."""
    tx.record(numbered_event(number, name, subject, **data), NOW)
    return [replace(entry, event=None) for entry in tx.recorded[-1].entries]


def test_what_waits_is_read_back_as_it_was_handed_out(tx: Transaction) -> None:
    entries = [
        *record(tx, 1, notBefore="2026-04-11T22:40:00.25Z"),
        *record(tx, 2, "approval.granted", "E-1"),
        *record(tx, 3, "relay.sink-failing", "drain"),
        *record(tx, 4, "relay.source-lost", ""),
    ]
    assert tx.deliveries.waiting_entries() == entries
    assert tx.deliveries.waiting_entries("chat") == [
        entry for entry in entries if entry.sink == "chat"
    ]
    of_bus = [entry for entry in entries if entry.sink == "bus"]
    assert [(each.ordering_key, each.event_key, bool(each.not_before)) for each in of_bus] == [
        ("e-1", "e-1", True),
        ("e-1", "e-1", False),
        ("relay.sink-failing/drain", None, False),
        ("relay.source-lost/", None, False),
    ]


def test_an_events_entries_hold_up_its_start_until_all_are_settled(tx: Transaction) -> None:
    """The gate calls `is_event_waiting`.

    See docs/guarantees.md#notices-come-before-the-startrequest.
    """
    bus, chat = record(tx, 1, subject="E")
    record(tx, 2, "relay.ping", "E")
    record(tx, 3, "approval.refused", "E")
    assert tx.deliveries.is_event_waiting("e")
    tx.deliveries.store_final_state(bus.id, "delivered", None, NOW)
    assert tx.deliveries.is_event_waiting("e")
    tx.deliveries.store_final_state(chat.id, "parked", "no", NOW)
    assert not tx.deliveries.is_event_waiting("e")


def test_attempts_are_logged_and_counted_and_what_was_delivered_is_settled(tx: Transaction) -> None:
    first, second, third = (record(tx, number)[0] for number in range(1, 4))
    failed = Attempt(
        at=NOW, elapsed=0.25, outcome="deferred", status=503, reason="no", response="later"
    )
    tx.deliveries.defer(second.id, failed, LATER)
    waiting = tx.deliveries.waiting_entries("bus")
    assert waiting == [first, replace(second, attempts=1, next_at=LATER), third]
    delivered = Attempt(at=LATER, elapsed=0.5, outcome="delivered", status=204, response="ok")
    tx.deliveries.log_attempts([(second.id, delivered), (third.id, delivered)])
    assert tx.deliveries.waiting_entries("bus") == [first]
    settled = DeliverySummary(
        id=third.id,
        sink="bus",
        eventId="E-3",
        type="io.imdsrelay.event.scheduled.v1",
        state="delivered",
        attempts=1,
        nextAttempt=None,
        reason=None,
        lastStatus=204,
        recorded="2026-04-11T22:26:58.000000Z",
        settled="2026-04-11T22:27:58.500000Z",
    )
    page = tx.deliveries.page(states=["delivered"])
    assert page == [settled, {**settled, "id": second.id, "eventId": "E-2", "attempts": 2}]
    logged = tx.connection.execute(
        "SELECT entry, number, at, elapsed, outcome, status, reason, response FROM attempt "
        "ORDER BY entry, number"
    )
    assert logged.fetchall() == [
        (second.id, 1, "2026-04-11T22:26:58.000000Z", 0.25, "deferred", 503, "no", "later"),
        (second.id, 2, "2026-04-11T22:27:58.000000Z", 0.5, "delivered", 204, None, "ok"),
        (third.id, 1, "2026-04-11T22:27:58.000000Z", 0.5, "delivered", 204, None, "ok"),
    ]


def test_the_event_id_is_shown_as_azure_wrote_it_and_a_sinks_name_is_none(tx: Transaction) -> None:
    record(tx, 1, subject="C7061BAC")
    record(tx, 2, "relay.sink-failing", "drain")
    shown = [(event_name(each["type"]), each["eventId"]) for each in tx.deliveries.page(sink="bus")]
    assert shown == [("relay.sink-failing", None), ("event.scheduled", "C7061BAC")]


def test_pages_go_back_in_time_without_gap_or_repeat_whatever_is_asked_for(tx: Transaction) -> None:
    states = get_args(EntryState)
    for number in range(20):
        for entry in record(tx, number, subject=f"E-{number % 3}"):
            if (state := states[number % 4]) != "waiting":
                tx.deliveries.store_final_state(entry.id, state, None, NOW)
    queries: list[tuple[tuple[EntryState, ...], str | None, str | None, int]] = [
        ((), None, None, 7),
        (("parked",), None, None, 3),
        (("waiting", "parked"), "e-1", "chat", 1),
    ]
    for states_wanted, key, sink, limit in queries:
        ids: list[int] = []
        while page := tx.deliveries.page(
            states=states_wanted,
            event_key=key,
            sink=sink,
            before=ids[-1] if ids else None,
            limit=limit,
        ):
            assert len(page) <= limit
            ids += [delivery["id"] for delivery in page]
        all_deliveries = tx.deliveries.page(limit=1000)
        assert ids == [
            delivery["id"]
            for delivery in all_deliveries
            if (not states_wanted or delivery["state"] in states_wanted)
            and key in (None, str(delivery["eventId"]).lower())
            and sink in (None, delivery["sink"])
        ]
        assert ids == sorted(set(ids), reverse=True)
        assert ids


def test_a_dead_letter_that_is_sent_again_is_as_young_as_a_new_one(tx: Transaction) -> None:
    """Its age starts anew, or the first failure would park it again. The log keeps `recorded`."""
    bus, _ = record(tx, 1)
    failed = Attempt(at=NOW, elapsed=0.1, outcome="deferred", status=500, reason="no")
    tx.deliveries.defer(bus.id, failed, LATER)
    tx.deliveries.store_final_state(bus.id, "parked", "given up", LATER)
    assert tx.deliveries.redeliver(LATER, entry_id=bus.id)
    assert tx.deliveries.redelivered == [replace(bus, attempts=1, recorded=LATER)]
    assert tx.deliveries.waiting_entries("bus") == tx.deliveries.redelivered
    (delivery,) = tx.deliveries.page(sink="bus")
    wanted = {"state": "waiting", "recorded": "2026-04-11T22:26:58.000000Z"}
    assert (wanted | {"settled": None, "nextAttempt": None}).items() <= delivery.items()


@pytest.mark.parametrize("state", ["waiting", "delivered", "superseded"])
def test_only_a_dead_letter_is_sent_again(tx: Transaction, state: EntryState) -> None:
    bus, _ = record(tx, 1)
    if state != "waiting":
        tx.deliveries.store_final_state(bus.id, state, None, NOW)
    assert not tx.deliveries.redeliver(LATER, entry_id=bus.id)
    assert not tx.deliveries.redeliver(LATER, entry_id=bus.id + 99)
    assert tx.deliveries.page(sink="bus")[0]["state"] == state


def test_what_waits_for_a_sink_that_is_gone_is_parked_and_its_news_dropped(tx: Transaction) -> None:
    bus, chat = record(tx, 1)
    delivered, _ = record(tx, 2)
    tx.deliveries.store_final_state(delivered.id, "delivered", None, NOW)
    news, other_news = record(tx, 3, "relay.sink-failing", "drain")
    tx.deliveries.log_attempts([(news.id, Attempt(at=NOW, elapsed=0.1, outcome="deferred"))])
    assert tx.deliveries.remove_sink("bus", "it is gone", LATER) == 1
    left = [(each["id"], each["state"], each["reason"]) for each in tx.deliveries.page(sink="bus")]
    assert left == [(delivered.id, "delivered", None), (bus.id, "parked", "it is gone")]
    waiting = [entry.id for entry in tx.deliveries.waiting_entries()]
    assert waiting == [chat.id, chat.id + 2, other_news.id]
    assert tx.deliveries.sink_states() == {"chat": ("on", None)}
    assert tx.connection.execute("SELECT count(*) FROM attempt").fetchone() == (0,)
    assert not tx.deliveries.redeliver(LATER, entry_id=bus.id), (
        "no sink would send it, and it would wait for ever"
    )


def test_retention_forgets_what_was_settled_long_ago_and_nothing_else(tx: Transaction) -> None:
    """Deliveries go after ``retain``, journal rows after ``audit_retain``.

    A waiting delivery and its event stay, however old they are.
    """
    settings = StoreSettings(retain=86400.0, audit_retain=10 * 86400.0)
    waits, delivered = record(tx, 1), record(tx, 2)
    tx.deliveries.log_attempts(
        [(delivered[0].id, Attempt(at=NOW, elapsed=0.1, outcome="delivered"))]
    )
    for entry in (*waits[1:], *delivered):
        tx.deliveries.store_final_state(entry.id, "delivered", None, NOW)
    tx.answers.add(FirstAnswer("client:a", "1", "d", 202, {}, NOW))

    assert prune_all_tables(tx, settings, NOW + timedelta(hours=23)) == (0, {})
    assert len(tx.deliveries.page()) == 4
    assert tx.answers.find("client:a", "1") is not None

    assert prune_all_tables(tx, settings, NOW + timedelta(days=2)) == (0, {})
    assert [delivery["id"] for delivery in tx.deliveries.page()] == [waits[0].id]
    assert tx.answers.find("client:a", "1") is None
    assert tx.connection.execute("SELECT count(*) FROM attempt").fetchone() == (0,)

    eleven_days = NOW + timedelta(days=11)
    assert prune_all_tables(tx, settings, eleven_days) == (0, {}), "the oldest is yet to be sent"
    assert tx.journal.require_event_at_position(1).id == numbered_event(1).id
    tx.deliveries.store_final_state(waits[0].id, "delivered", None, NOW)
    assert prune_all_tables(tx, settings, eleven_days) == (2, {})
    assert verify_journal(tx.connection) == (tx.head(), 0)
    assert tx.head().position == 2
    assert record(tx, 3)[0].position == 3


def test_dead_letters_wait_again_by_id_by_sink_or_all_the_oldest_first(tx: Transaction) -> None:
    for number in range(1, 4):
        for entry in record(tx, number):
            tx.deliveries.store_final_state(entry.id, "parked", "no", NOW)
    tx.deliveries.store_final_state(3, "delivered", None, NOW)
    cases: list[tuple[int | None, str | None, list[int]]] = [
        (None, None, [1, 2, 4, 5, 6]),
        (None, "chat", [2, 4, 6]),
        (None, "gone", []),
        (4, None, [4]),
    ]
    for entry_id, sink, ids in cases:
        tx.connection.execute("SAVEPOINT before")
        assert tx.deliveries.redeliver(LATER, entry_id=entry_id, sink=sink) == len(ids)
        assert [entry.id for entry in tx.deliveries.redelivered] == ids
        assert [entry.id for entry in tx.deliveries.waiting_entries()] == ids
        tx.connection.execute("ROLLBACK TO before")
        tx.deliveries.redelivered.clear()
    tx.deliveries.remove_sink("chat", "gone", LATER)
    assert tx.deliveries.redeliver(LATER) == 2, "nobody would send those of a sink that is gone"
