"""Thousands of rows about one event: each read is a page, and slow readers hold few of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from relay.api.connections import ServerLimits
from relay.events.build import approval_or_startrequest_event
from relay.store import Attempt
from relay.store.rows import PageLimit, take_page
from relay.store.transaction import Transaction
from tests.api.running_relay import EVENT_ID, ORIGIN, RunningRelay, make_event, run_relay
from tests.eventually import eventually

PATH = f"/v1/events/{EVENT_ID}"
MAX_PAGE_BYTES = PageLimit(1).bytes


async def _record_refusals(
    relay: RunningRelay, count: int, *, principals: Sequence[str] = ("client:eve",), size: int = 0
) -> None:
    """Record refusals as an earlier version of the relay did: each by itself."""
    at = relay.clock.now()

    def work(tx: Transaction) -> None:
        occurrence = tx.occurrences.find_newest_occurrence(EVENT_ID.lower())
        assert occurrence is not None
        for number in range(count):
            added = {
                "approvalId": "a",
                "decision": "approve",
                "principal": principals[number % len(principals)],
                "channel": "http",
                "reason": f"{number} " + "x" * size,
                "votes": 0,
                "required": 2,
                "rule": "two",
                "refusal": "no",
            }
            event = approval_or_startrequest_event(
                "approval.refused",
                ORIGIN,
                at + timedelta(milliseconds=number),
                event=occurrence.data,
                added=added,
                cause=None,
                head=str(tx.head()),
            )
            tx.record(event, at, to=())

    await relay.store.transact(work)


async def _pages(relay: RunningRelay, path: str) -> AsyncIterator[Any]:
    """The pages of something with `next`, the newest first."""
    cursor = ""
    while True:
        answer = await relay.call("GET", f"{path}{cursor}")
        assert (answer.status, len(answer.body) < 2 * MAX_PAGE_BYTES) == (200, True)
        yield answer.json
        if answer.json["next"] is None:
            return
        cursor = f"?cursor={answer.json['next']}"


async def test_the_history_comes_in_pages_without_gap_or_repeat(relay: RunningRelay) -> None:
    principals = [f"client:c{number}" for number in range(70)]
    await _record_refusals(relay, 640, principals=principals)
    pages = [page["history"] async for page in _pages(relay, PATH)]
    assert [len(page) for page in pages] == [200, 200, 200, 41]
    history = [event for page in reversed(pages) for event in page]
    assert history[0]["type"] == "io.imdsrelay.event.scheduled.v1"
    assert [int(event["data"]["reason"]) for event in history[1:]] == list(range(640))


async def test_a_list_comes_in_pages_without_gap_or_repeat(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=()) as relay:
        events = [make_event(event_id=f"event-{number}") for number in range(201)]
        await relay.observe(*events)
        pages = []
        async for page in _pages(relay, "/v1/events"):
            pages.append([item["eventId"] for item in page["items"]])
            # What comes meanwhile is newer.
            await relay.observe(*events, make_event(event_id=f"later-{len(pages)}"))
        assert [len(page) for page in pages] == [100, 100, 1]
        listed = [event_id for page in pages for event_id in page]
        assert listed == [event.event_id for event in reversed(events)]


async def test_a_page_of_big_events_ends_early(relay: RunningRelay) -> None:
    principals = [f"client:c{number}" for number in range(30)]
    await _record_refusals(relay, 300, principals=principals, size=20_000)
    pages = [page async for page in _pages(relay, PATH)]
    assert sum(len(page["history"]) for page in pages) == 301
    assert len(pages) > 10


def test_a_row_that_is_too_big_is_a_page_by_itself() -> None:
    assert take_page([9, 9, 1, 1, 1], int, PageLimit(2, 3)) == ([9], True)
    assert take_page([9], int, PageLimit(2, 3)) == ([9], False)
    assert take_page([1, 1], int, PageLimit(2, 3)) == ([1, 1], False)
    assert take_page([], int, PageLimit(2, 3)) == ([], False)


async def test_a_list_of_big_events_comes_in_smaller_pages(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=()) as relay:
        machines = tuple(f"machine-{number}-{'x' * 40}" for number in range(1000))
        events = [make_event(event_id=f"E-{number}", resources=machines) for number in range(30)]
        await relay.observe(*events)
        pages = [page async for page in _pages(relay, "/v1/events")]
        ids = [event["eventId"] for page in pages for event in page["items"]]
        assert ids == [event.event_id for event in reversed(events)]
        assert len(pages) > 1


async def test_the_tries_of_a_delivery_come_in_pages(relay: RunningRelay) -> None:
    (delivery,) = (await relay.call("GET", "/v1/deliveries")).json["items"]
    path = f"/v1/deliveries/{delivery['id']}"
    await eventually(
        lambda: relay.call("GET", path), lambda answer: answer.json["state"] == "delivered"
    )

    def log_attempts(tx: Transaction) -> None:
        for _ in range(500):
            attempt = Attempt(at=relay.clock.now(), elapsed=0.1, outcome="deferred")
            tx.deliveries.log_attempts([(delivery["id"], attempt)])

    await relay.store.transact(log_attempts)
    pages = [page["log"] async for page in _pages(relay, path)]
    assert [len(page) for page in pages] == [200, 200, 101]
    numbers = [attempt["number"] for page in reversed(pages) for attempt in page]
    assert numbers == list(range(1, 502))


# --- slow readers


@asynccontextmanager
async def _slow_readers(relay: RunningRelay, count: int, path: str) -> AsyncIterator[None]:
    request = (
        f"GET {path} HTTP/1.1\r\nHost: relay\r\n"
        "Authorization: Bearer bearer-test-key-of-reader\r\n\r\n"
    ).encode()
    with contextlib.ExitStack() as stack:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            await loop.sock_connect(reader, ("127.0.0.1", relay.server.port))
            await loop.sock_sendall(reader, request)
        yield


async def test_slow_readers_of_one_key_hold_few_answers_and_delay_no_other(tmp_path: Path) -> None:
    limits = ServerLimits(max_large_answers=2, send_timeout=60)
    async with run_relay(tmp_path, limits=limits) as relay:
        await relay.observe(make_event())
        principals = [f"client:c{number}" for number in range(100)]
        await _record_refusals(relay, 400, principals=principals, size=4000)
        reads = 0

        def count_reads(statement: str) -> None:
            nonlocal reads
            reads += statement.startswith("SELECT * FROM journal WHERE event_key = ")

        connection = relay.store._state_file.connection  # noqa: SLF001  # SQLite tells only here
        connection.set_trace_callback(count_reads)
        async with _slow_readers(relay, 40, PATH):
            await eventually(lambda: reads == 2)
            for _ in range(5):
                assert (await relay.call("GET", "/v1/events", by="bob")).status == 200
                assert (await relay.call("GET", PATH, by="bob")).status == 200
            assert (await relay.decide()).status == 202
            assert reads == 2 + 5
        connection.set_trace_callback(None)


async def test_a_caller_waits_for_its_own_answers_and_then_gets_429(tmp_path: Path) -> None:
    limits = ServerLimits(max_large_answers=1, send_timeout=0.2)
    async with run_relay(tmp_path, limits=limits) as relay:
        await relay.observe(make_event())
        async with relay.server.state.large_answer("client:bob"):
            answer = await relay.call("GET", PATH, by="bob")
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            assert (await relay.call("GET", PATH, by="alice")).status == 200
            assert (await relay.call("GET", "/healthz", by="bob")).status == 200
    async with run_relay(tmp_path, limits=ServerLimits(max_large_answers=1)) as relay:
        answers = await asyncio.gather(*(relay.call("GET", PATH, by="bob") for _ in range(30)))
        assert {answer.status for answer in answers} == {200}
