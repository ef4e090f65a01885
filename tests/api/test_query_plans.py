"""What a relay asks of its state file is found by an index, however much the file holds."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

from relay.delivery.dispatcher import Dispatcher
from relay.errors import Deferred, Rejected
from relay.store.file import open_for_reading
from relay.store.retention import prune_all_tables
from relay.store.sqlite import Store
from tests.api.message_links import chat_of, message_links
from tests.api.running_relay import (
    EVENT_ID,
    RecordingSink,
    RecordingSinkSettings,
    RunningRelay,
    make_event,
    run_relay,
)
from tests.eventually import eventually

_FIXED_TABLES = {"meta", "checkpoint", "sink", "sqlite_sequence", "json_each", "CONSTANT"}
"""Tables that stay small, and those that a statement brings."""
_OPEN_INDEXES = {"occurrence_live", "entry_waiting", "entry_parked", "message_refresh"}
"""Indexes that hold only what is open. They may be read in full, since rows leave them again."""
_ALLOWED = {
    "SELECT position, hash FROM journal ORDER BY position DESC LIMIT 1": "one row is read",
    "SELECT key FROM occurrence INDEXED BY occurrence_live WHERE live UNION ": (
        "live events, and a limited number of ended ones, once an hour"
    ),
    "SELECT min(position) FROM journal WHERE at >= ": (
        "the journal is read up to its first row that is not old, and the rows before it go"
    ),
    "DELETE FROM occurrence WHERE id < ": (
        "occurrences are read up to the first that is not old, and most of those before it go"
    ),
    "DELETE FROM message WHERE id NOT IN ": "once an hour, and the rows are short",
    "DELETE FROM sighting WHERE event_key NOT IN ": "once an hour, and the rows are short",
}
"""Statements that may read a table from its start, and why."""


class _Statements(set[str]):
    """The statements of a connection, without comments, which stand for triggers."""

    @contextlib.contextmanager
    def of(self, store: Store) -> Iterator[None]:
        connection = store._state_file.connection  # noqa: SLF001  # SQLite tells only here
        connection.set_trace_callback(self._add)
        try:
            yield
        finally:
            connection.set_trace_callback(None)

    def _add(self, statement: str) -> None:
        if statement.startswith(("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")):
            self.add(statement)


def _has_scan(connection: sqlite3.Connection, statement: str) -> bool:
    """Whether a step of the query plan reads a table that grows from its start."""
    plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}")
    return any(_is_scan(row[3]) for row in plan)


def _is_scan(step: str) -> bool:
    found = re.match(r"(SCAN|SEARCH) (?:TABLE )?(\w+)(?: AS \w+)?(?: USING .*?INDEX (\w+))?", step)
    if found is None:
        return False  # a part of the plan that reads no table, or a list in parentheses
    verb, table, index = found.groups()
    if table in _FIXED_TABLES or table.isdigit() or index in _OPEN_INDEXES:
        return False
    # A SEARCH without an index is that of a minimum: SQLite reads up to the first row that fits.
    return verb == "SCAN" or "USING" not in step


async def test_no_statement_reads_a_table_that_grows_from_its_start(tmp_path: Path) -> None:
    statements = _Statements()
    limits = [{"name": "all", "max": 2, "rest": "2m"}]
    async with run_relay(tmp_path, approvals={"limits": limits}) as relay:
        with statements.of(relay.store):
            await _live_through_everything(relay)
    with contextlib.closing(open_for_reading(tmp_path / "relay.db")) as connection:
        scans = [statement for statement in statements if _has_scan(connection, statement)]
    assert [each for each in scans if not each.startswith(tuple(_ALLOWED))] == []
    for allowed in _ALLOWED:
        assert any(statement.startswith(allowed) for statement in scans), allowed


async def _live_through_everything(relay: RunningRelay) -> None:
    """Let the relay record, deliver, decide, answer, show and prune."""
    await relay.observe(make_event(), make_event(event_id="E-2"), make_event(event_id="E-3"))
    await _hold_ahead(relay)
    await _decide(relay)
    await _chat(relay)
    await relay.observe(make_event(event_status="Started"), make_event(event_id="E-2"))
    await relay.observe(make_event(event_id="E-2", event_type="Freeze"))
    await _wait_for_a_limit(relay)
    await _deliver_with_failures(relay)
    await _read_all(relay)
    settings = [RecordingSinkSettings(name="new"), RecordingSinkSettings(name="box")]
    sinks = {sink.name: (sink, RecordingSink()) for sink in settings}
    restarted = Dispatcher(sinks, relay.store, relay.clock, lambda *_, **__: None)
    await restarted.begin()
    for days in (0, 1000):
        now = relay.clock.now() + timedelta(days=days)
        await relay.store.transact(
            partial(prune_all_tables, settings=relay.store.settings, now=now)
        )


async def _decide(relay: RunningRelay) -> None:
    for _ in range(3):
        assert (await relay.decide(revision="0123", by="bob")).status == 409
    assert (await relay.decide("hold", by="bob")).status == 202
    assert (await relay.decide("release", by="bob")).status == 202
    assert (await relay.decide(by="alice")).status == 202
    assert (await relay.decide(by="bob", headers={"Idempotency-Key": "k"})).status == 202
    await eventually(lambda: bool(relay.azure.started))


async def _hold_ahead(relay: RunningRelay) -> None:
    """Make two standing holds, end one and let the other expire."""
    match = {"resources": ["none"]}
    made = [await relay.hold_ahead(seconds=seconds, match=match) for seconds in (0.5, 3600.0)]
    assert [answer.status for answer in made] == [201, 201]
    path = f"/v1/standing-holds/{made[1].json['holdId']}"
    assert (await relay.call("POST", f"{path}/end", {})).status == 200
    await eventually(
        lambda: relay.call("GET", "/v1/standing-holds"), lambda answer: not answer.json["items"]
    )
    for read in (path, "/v1/standing-holds?over=true"):
        assert (await relay.call("GET", read)).status == 200


async def _wait_for_a_limit(relay: RunningRelay) -> None:
    """Let an event wait for the machines of another one."""
    busy = make_event(event_id="E-2", event_type="Freeze", event_status="Started")
    waits = make_event(event_id="E-6", resources=("other",))
    await relay.observe(busy, waits)
    await message_links(relay, event_id="E-6")
    states = [
        (await relay.decide(eventId="E-6", revision=waits.revision, by=by)).json["state"]
        for by in ("alice", "bob")
    ]
    assert states == ["pending", "waiting"]
    await relay.observe(waits, make_event(event_id="E-7"))


async def _chat(relay: RunningRelay) -> None:
    await message_links(relay, event_id="E-2")
    chat = chat_of(relay)
    ops = RecordingSinkSettings(name="ops")
    assert await chat.messages.live_statuses(ops)
    assert await chat.messages.find_status_of_shown_event("ops", "ref", "E-2")
    # A new mode changes what every message says.
    assert (await relay.call("PUT", "/v1/approvals/mode", {"mode": "dry-run"})).status == 200
    await chat.messages.enqueue_due_refreshes("ops")
    await message_links(relay, event_id="E-2")


async def _deliver_with_failures(relay: RunningRelay) -> None:
    sink = relay.sinks["box"]
    sink.failure = Rejected("no", status=400)
    await relay.observe(make_event(event_id="E-4"), make_event(event_id="E-5"))
    dead_letters = await eventually(
        lambda: relay.call("GET", "/v1/dead-letters"), lambda answer: len(answer.json["items"]) > 1
    )
    sink.failure = Deferred("not now", status=503)
    path = f"/v1/dead-letters/{dead_letters.json['items'][0]['id']}/redeliver"
    assert (await relay.call("POST", path)).status == 202
    body = {"sink": "box"}
    assert (await relay.call("POST", "/v1/dead-letters/redeliver", body)).status == 202
    worker = relay.dispatcher.get_worker("box")
    await eventually(lambda: ("deferred", 503) in worker.tries)
    sink.failure = None
    for verb in ("ping", "pause", "resume"):
        assert (await relay.call("POST", f"/v1/sinks/box/{verb}")).status in (200, 202)
    await eventually(lambda: not worker.waiting)


async def _read_all(relay: RunningRelay) -> None:
    lists = "/v1/events", "/v1/events?live=true", "/v1/sinks", "/v1/deliveries", "/v1/dead-letters"
    event = f"/v1/events/{EVENT_ID}", f"/v1/events/{EVENT_ID}/rule"
    health = "/healthz", "/readyz", "/metrics", "/v1/status"
    for path in (*health, *lists, *event, "/v1/deliveries/1"):
        assert (await relay.call("GET", path)).status == 200, path
