"""Transactions: grouped, in order, each by itself; and who is told of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from relay.errors import StoreUnavailable
from relay.store import FirstAnswer, RecordedEvent
from relay.store.audit import verify_journal
from relay.store.transaction import Transaction
from tests.store.open_store import (
    NOW,
    blocked,
    file_names,
    numbered_event,
    open_store_in,
    read_column,
    record_event,
)


async def test_what_was_recorded_is_on_disk_before_it_is_answered_and_told(tmp_path: Path) -> None:
    async with open_store_in(tmp_path) as store:
        seen: list[list[int]] = []
        store.listeners.recorded.append(
            lambda _: seen.append(
                read_column(tmp_path / "relay.db", "SELECT position FROM journal")
            )
        )
        assert await store.transact(record_event(1)) == 1
        assert seen == [[1]]


async def test_listeners_get_the_event_and_an_entry_for_every_wanting_sink(tmp_path: Path) -> None:
    async with open_store_in(
        tmp_path, lambda event: ("bus", "chat") if event.name == "event.scheduled" else ()
    ) as store:
        notified: list[RecordedEvent] = []
        store.listeners.recorded.append(notified.extend)
        await store.transact(record_event(1, notBefore="2026-04-11T22:40:00Z"))
        await store.transact(record_event(2, name="event.ended"))
        told = [
            (each.position, each.id, [entry.sink for entry in each.entries]) for each in notified
        ]
        assert told == [(1, numbered_event(1).id, ["bus", "chat"]), (2, numbered_event(2).id, [])]
        bus, chat = notified[0].entries
        waiting = await store.read(lambda tx: tx.deliveries.waiting_entries())
        assert waiting == [replace(entry, event=None) for entry in (bus, chat)]


async def test_many_submissions_share_few_commits_and_are_answered_in_order(tmp_path: Path) -> None:
    """The store groups jobs under load, never by waiting.

    See docs/protocol.md#groups-of-commits.
    """
    async with open_store_in(tmp_path) as store:
        commits: list[str] = []
        answered: list[int] = []
        await store.read(lambda tx: tx.connection.set_trace_callback(commits.append))
        with blocked(store):
            futures = [store.submit(record_event(number)) for number in range(1000)]
            for future in futures:
                future.add_done_callback(lambda done: answered.append(done.result()))
        assert await asyncio.gather(*futures) == list(range(1, 1001))
        assert answered == list(range(1, 1001))
        assert 2 <= commits.count("COMMIT") <= 5


async def test_one_works_own_error_undoes_it_alone(tmp_path: Path) -> None:
    def fails(tx: Transaction) -> None:
        tx.record(numbered_event(2), NOW)
        raise LookupError("a mistake")

    def breaks_a_rule(tx: Transaction) -> None:
        tx.record(numbered_event(3), NOW)
        tx.record(numbered_event(3), NOW)
        for _ in range(2):
            tx.answers.add(FirstAnswer("client:a", "1", "d", 202, {}, NOW))

    async with open_store_in(tmp_path) as store:
        notified: list[RecordedEvent] = []
        store.listeners.recorded.append(notified.extend)
        with blocked(store):
            works = [record_event(1), fails, breaks_a_rule, record_event(4)]
            futures = [store.submit(work) for work in works]
        results = await asyncio.gather(*futures, return_exceptions=True)
        types = [int, LookupError, sqlite3.IntegrityError, int]
        assert [type(result) for result in results] == types
        assert results[3] == 2
        assert [each.id for each in notified] == [numbered_event(number).id for number in (1, 4)]
        assert store.write_error is None
    assert read_column(tmp_path / "relay.db", "SELECT position FROM journal") == [1, 2]


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(lambda tx: tx.connection.execute("SELECT nothing FROM nowhere"), id="SQL"),
        pytest.param(lambda tx: tx.connection.execute("SELECT json_extract('{', '$')"), id="JSON"),
        pytest.param(lambda tx: tx.connection.execute("SELECT zeroblob(2000000000)"), id="too big"),
        pytest.param(lambda tx: tx.connection.execute("SELECT ?", (2**70,)), id="number"),
        pytest.param(lambda tx: tx.connection.execute("SELECT 1", (1, 2)), id="binding"),
        pytest.param(lambda tx: tx.journal.require_event_at_position(99), id="missing"),
    ],
)
@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_mistake_in_the_work_is_no_trouble_with_the_disk(
    tmp_path: Path, mistake: object, fail_open: bool
) -> None:
    """Otherwise the store would retry that work for ever and refuse every approval meanwhile."""
    async with open_store_in(tmp_path) as store:
        with pytest.raises((sqlite3.Error, OverflowError, KeyError)):
            await store.transact(mistake, fail_open=fail_open)  # type: ignore[arg-type]  # the cases are work
        assert store.write_error is None
        assert await store.transact(record_event(1)) == 1


async def test_a_listeners_error_reaches_its_cause_and_nobody_waits_in_vain(tmp_path: Path) -> None:
    def broken(_: Sequence[RecordedEvent]) -> None:
        raise LookupError("a mistake of ours")

    async with open_store_in(tmp_path) as store:
        store.listeners.recorded.append(broken)
        with blocked(store):
            record = store.submit(record_event(1))
            read = store.submit(lambda tx: tx.head().position)
        with pytest.raises(LookupError, match="mistake of ours"):
            await record
        assert await read == 1


async def test_cancelling_the_wait_does_not_stop_the_work(tmp_path: Path) -> None:
    async with open_store_in(tmp_path) as store:
        with blocked(store):
            task = asyncio.create_task(store.transact(record_event(1)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await store.read(lambda tx: tx.head().position) == 1


async def test_what_precedes_closing_is_done_and_what_follows_is_refused(tmp_path: Path) -> None:
    async with open_store_in(tmp_path) as store:
        before = [store.submit(record_event(number)) for number in range(600)]
    assert [future.result() for future in before] == list(range(1, 601))
    for late in (store.submit(record_event(9)), store.submit(record_event(9), fail_open=True)):
        with pytest.raises(StoreUnavailable, match="was closed"):
            await late
    with pytest.raises(StoreUnavailable, match="was closed"):
        await store.read(lambda tx: tx.head())
    assert read_column(tmp_path / "relay.db", "SELECT count(*) FROM journal") == [600]


async def test_closing_lets_another_relay_have_the_file(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        async with open_store_in(tmp_path) as store:
            assert await store.transact(record_event(number)) == number
            assert store.trusted
    assert file_names(tmp_path) == ["relay.db", "relay.db-lock", "relay.db-shm", "relay.db-wal"]
    assert (
        tmp_path / "relay.db-wal"
    ).stat().st_size == 0  # the file alone is all of it, and an older copy can take its place


async def test_a_thread_that_dies_leaves_nobody_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error in the thread ends the relay at the next write."""
    async with open_store_in(tmp_path) as store:
        changes: list[str | None] = []
        store.listeners.write_error_changed.append(changes.append)
        # Calling it raises a TypeError, as a mistake in the code would.
        store._commit_jobs = None  # type: ignore[assignment,method-assign]  # noqa: SLF001
        first, second = store.submit(record_event(1), fail_open=True), store.submit(record_event(2))
        for future in (first, second):
            with pytest.raises(StoreUnavailable, match="thread of the state file has failed"):
                await future
        with pytest.raises(StoreUnavailable, match="thread of the state file has failed"):
            await store.transact(record_event(3), fail_open=True)
        assert len(changes) == 1
    assert [record.levelno for record in caplog.records if record.name == "relay.store.sqlite"] == [
        logging.CRITICAL
    ]


async def test_the_mode_and_who_turned_it_are_remembered_and_in_the_journal(tmp_path: Path) -> None:
    async with open_store_in(tmp_path) as store:
        assert await store.read(lambda tx: tx.stored_approval_mode()) == "on"
        await store.transact(lambda tx: tx.store_approval_mode("dry-run", "local:ada", NOW))
    async with open_store_in(tmp_path) as store:
        assert await store.read(lambda tx: tx.stored_approval_mode()) == "dry-run"
        with contextlib.closing(sqlite3.connect(tmp_path / "relay.db")) as reader:
            assert reader.execute("SELECT kind, body FROM journal").fetchall() == [
                ("mode", b'{"mode":"dry-run","principal":"local:ada"}')
            ]
            assert verify_journal(reader)[1] == 1


async def test_when_the_document_was_last_read_is_remembered_once(tmp_path: Path) -> None:
    """After a crash the relay cannot know that polling had no gap."""
    async with open_store_in(tmp_path) as store:
        await store.transact(lambda tx: tx.set_last_read_at(NOW))
    async with open_store_in(tmp_path) as store:
        assert await store.transact(lambda tx: tx.pop_last_read_at_of_previous_run()) == NOW
        assert await store.transact(lambda tx: tx.pop_last_read_at_of_previous_run()) is None


async def test_work_goes_to_sinks_of_its_submission_also_if_it_runs_again(tmp_path: Path) -> None:
    def fail(_: Transaction) -> None:
        raise LookupError("a mistake in this work")

    async with open_store_in(tmp_path) as store:
        with blocked(store):
            before = store.submit(record_event(1))
            store.route = lambda _: ("other",)
            failing = store.submit(fail)  # so that all run again
            after = store.submit(record_event(2))
        assert (await before, await after) == (1, 2)
        with pytest.raises(LookupError):
            await failing
    assert read_column(tmp_path / "relay.db", "SELECT sink FROM entry") == ["bus", "other"]
