"""What work can do in one transaction: read and write the tables, record events, redeliver.

`relay.store.sqlite.Store` hands a `Transaction` to each piece of work that another package
submits. Its attributes (`journal`, `occurrences`, `approvals`, …) read and write the tables. To
record an event appends it to the journal and makes one entry for each sink that wants it. The store
tells its listeners of the events and entries once they are on disk.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter

from relay.events.cloudevent import CloudEvent, is_about_event
from relay.events.timestamps import format_sortable, parse_timestamp
from relay.store import (
    SINGLE_SCOPE,
    Entry,
    EventKeyFormat,
    FirstAnswer,
    JournalHead,
    Mode,
    RecordedEvent,
)
from relay.store.approvals import Approvals, Memory
from relay.store.chat_messages import ChatMessages
from relay.store.deliveries import Deliveries
from relay.store.file import is_file_error
from relay.store.fleet import FleetTables
from relay.store.journal import Journal
from relay.store.occurrences import Occurrences
from relay.store.rows import get_meta, parse_rows, save_rows
from relay.store.standing_holds import StandingHolds

_log = logging.getLogger(__name__)
Route = Callable[[CloudEvent], Iterable[str]]
"""Returns the names of the sinks that want an event."""
FollowUp = Callable[["Transaction"], object]
"""Records what follows from what a transaction has recorded."""
MAX_EVENTS_IN_RESULTS = 1000
"""Events in the results of one piece of work; others are read from the journal to be sent."""


_FIRST_ANSWER = TypeAdapter(FirstAnswer)


class Answers:
    """The first answers: an accepted request that comes again gets the same answer."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def find(self, principal: str, request_id: str) -> FirstAnswer | None:
        rows = self._connection.execute(
            "SELECT * FROM answer WHERE principal = ? AND request_id = ?", (principal, request_id)
        )
        return next(parse_rows(_FIRST_ANSWER, rows), None)

    def add(self, answer: FirstAnswer) -> None:
        save_rows(self._connection, "answer", [answer])

    def prune(self, before: datetime) -> None:
        self._connection.execute("DELETE FROM answer WHERE at < ?", (format_sortable(before),))


class Transaction:
    """One transaction, handed to each piece of work that the store runs in it.

    ``recorded`` and ``deliveries.redelivered`` collect the results of the current piece of work.
    The store hands them to its listeners once they are on disk. ``route`` is that of the piece of
    work.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        route: Route,
        keys: EventKeyFormat = SINGLE_SCOPE,
        *,
        memory: Memory | None = None,
        follow_up: FollowUp | None = None,
    ) -> None:
        self.connection = connection
        self._follow_up = follow_up
        self.route = route
        self.keys = keys
        self.occurrences = Occurrences(connection, keys)
        self.answers = Answers(connection)
        self.messages = ChatMessages(connection)
        self.fleet = FleetTables(connection)
        self.deliveries = Deliveries(connection)
        self._go_on_from(memory if memory is not None else Memory())
        self.recorded: list[RecordedEvent] = []
        self.changed: set[str] | None = set()
        """The keys of the events about which the current piece of work has recorded something;
        None: it has recorded something about all events."""

    def _go_on_from(self, memory: Memory) -> None:
        """Begin with what was known; forget what was read since."""
        self.memory = memory.copy()
        self.journal = Journal(self.connection)
        self.approvals = Approvals(self.connection, self.journal, self.occurrences, self.memory)
        self.standing_holds = StandingHolds(self.journal, self.memory)

    def finish(self) -> tuple[list[RecordedEvent], list[Entry]]:
        """Record what follows from the piece of work that has ended; return its results.

        If that fails, the work stays: approvals can stop, notices go out.
        """
        if self.changed != set() and self._follow_up is not None:
            recorded, memory = len(self.recorded), self.memory.copy()
            self.connection.execute("SAVEPOINT follow_up")
            try:
                self._follow_up(self)
            except Exception as error:  # a fault in approvals must not cost a notice
                if is_file_error(error):
                    raise
                _log.exception("cannot record what follows from a change")
                self.connection.execute("ROLLBACK TO follow_up")
                del self.recorded[recorded:]
                self.deliveries.look_again()
                self._go_on_from(memory)
            self.connection.execute("RELEASE follow_up")
        results = self.recorded, self.deliveries.redelivered
        self.recorded, self.deliveries.redelivered, self.changed = [], [], set()
        return results

    def note(self, at: datetime, kind: str, content: Mapping[str, Any], event_key: str) -> None:
        self.journal.append_non_event_row(at, kind, content, event_key=event_key)
        if self.changed is not None:
            self.changed.add(event_key)

    def head(self) -> JournalHead:
        """Return the end of the journal: the ``journalhead`` of the next recorded event."""
        return self.journal.head()

    def record(self, event: CloudEvent, at: datetime, *, to: Iterable[str] | None = None) -> None:
        """Record one event for the sinks that want it, or for the named."""
        self.record_all([(event, None)], at, to=to)

    def record_all(
        self,
        events: Sequence[tuple[CloudEvent, str | None]],
        at: datetime,
        *,
        to: Iterable[str] | None = None,
    ) -> None:
        """Record events in their order, each with the transition that it counts; see `record`."""
        rows = [
            (event.name, self._event_key(event), transition, event.body)
            for event, transition in events
        ]
        positions = self.journal.append_all(at, rows)
        new: list[Entry] = []
        first_id = self.deliveries.next_entry_id()
        for (event, _), (name, key, *_), position in zip(events, rows, positions, strict=True):
            if name.startswith("standing-hold."):
                self.changed = None
            elif key is not None and self.changed is not None:
                self.changed.add(key)
            kept = event if len(self.recorded) < MAX_EVENTS_IN_RESULTS else None
            sinks = self.route(event) if to is None else to
            entry_id = first_id + len(new)
            entries = tuple(self._build_entries(entry_id, event, key, position, sinks, at, kept))
            new += entries
            self.recorded.append(
                RecordedEvent(position, event.id, name, key, event.scope, kept, entries)
            )
        self.deliveries.add_entries(new)

    def deliver_again(self, position: int, sink: str, at: datetime) -> None:
        """Make another entry for a sink about an event that was recorded earlier."""
        event = self.journal.require_event_at_position(position)
        entry_id, key = self.deliveries.next_entry_id(), self._event_key(event)
        entries = list(self._build_entries(entry_id, event, key, position, [sink], at, None))
        self.deliveries.add_entries(entries)
        self.deliveries.redelivered += entries

    def _build_entries(
        self,
        first_id: int,
        event: CloudEvent,
        key: str | None,
        position: int,
        sinks: Iterable[str],
        at: datetime,
        kept: CloudEvent | None,
    ) -> Iterator[Entry]:
        """Yield an entry for each sink. ``kept`` is the event if it stays in memory."""
        name, not_before = event.name, parse_timestamp(event.data.get("notBefore"))
        ordering_key = key
        if ordering_key is None:
            # A ``relay.*`` with the same key replaces an older one. Those about a standing hold
            # keep their order.
            is_of_relay = name.startswith("relay.")
            ordering_key = name if is_of_relay else name.partition(".")[0]
            if is_of_relay and self.keys.with_scope:  # a hub records what many relays say
                ordering_key += f"/{event.attributes['source']}"
            ordering_key += f"/{event.subject or ''}"
        for entry_id, sink in enumerate(sinks, first_id):
            yield Entry(
                id=entry_id,
                sink=sink,
                position=position,
                ordering_key=ordering_key,
                type=name,
                event_key=key,
                not_before=not_before,
                attempts=0,
                next_at=None,
                recorded=at,
                event=kept,
            )

    def _event_key(self, event: CloudEvent) -> str | None:
        if not is_about_event(event.name):
            return None
        return self.keys.make_key(event.scope, event.subject or "")

    def stored_approval_mode(self) -> Mode:
        return get_meta(self.connection, "mode") or "off"  # type: ignore[return-value]  # `store_approval_mode` and `file` write it

    def store_approval_mode(self, mode: Mode, principal: str, at: datetime) -> None:
        self._set_meta("mode", mode)
        self.journal.append_non_event_row(at, "mode", {"mode": mode, "principal": principal})
        self.changed = None
        self.messages.refresh_all(at)

    def set_last_read_at(self, moment: datetime) -> None:
        """Store at an orderly stop when the document was last read."""
        self._set_meta("last_read", format_sortable(moment))

    def pop_last_read_at_of_previous_run(self) -> datetime | None:
        """Return what `set_last_read_at` stored, and delete it; None after a crash."""
        moment = parse_timestamp(get_meta(self.connection, "last_read"))
        self.connection.execute("DELETE FROM meta WHERE key = 'last_read'")
        return moment

    def _set_meta(self, key: str, value: str) -> None:
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
