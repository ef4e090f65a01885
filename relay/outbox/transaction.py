"""What can be done in one transaction: read and write the tables, and say something, with an entry for each wanting sink."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import count

from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_sortable, parse_timestamp
from relay.outbox import Entry, Head, Mode, RecordedEvent
from relay.outbox.chat_messages import ChatMessages
from relay.outbox.decisions import Decisions
from relay.outbox.deliveries import Deliveries
from relay.outbox.journal import Journal
from relay.outbox.snapshot import Snapshot

Route = Callable[[CloudEvent], Iterable[str]]
"""The names of the sinks that want an event."""


class Transaction:
    """Handed to each piece of work that the store runs in it, one after the other; of no use afterwards.

    ``said`` is what the present piece of work has journalled so far: the store hands it to its listeners once it is on disk.
    """

    def __init__(self, connection: sqlite3.Connection, route: Route) -> None:
        self._connection = connection
        self._route = route
        self.journal = Journal(connection)
        self.snapshot = Snapshot(connection)
        self.decisions = Decisions(connection)
        self.deliveries = Deliveries(connection)
        self.messages = ChatMessages(connection)
        self.recorded: list[RecordedEvent] = []
        self.redelivered: list[Entry] = []

    def take_results(self) -> tuple[list[RecordedEvent], list[Entry]]:
        """A piece of work is done: what it has said and revived. The next one begins with nothing."""
        done = self.recorded, self.redelivered
        self.recorded, self.redelivered = [], []
        return done

    def head(self) -> Head:
        """Where the journal ends: the ``journalhead`` of what is said next."""
        return self.journal.head()

    def record(
        self,
        event: CloudEvent,
        at: datetime,
        *,
        transition: str | None = None,
        to: Iterable[str] | None = None,
    ) -> None:
        """Journal an event and make an entry for each sink that wants it, or for those named."""
        self.record_all([(event, transition)], at, to=to)

    def record_all(
        self,
        events: Sequence[tuple[CloudEvent, str | None]],
        at: datetime,
        *,
        to: Iterable[str] | None = None,
    ) -> None:
        """As `say`, in that order; each event with its transition."""
        positions = self.journal.append_all(
            at, [(event.name, _key(event), transition, event.body) for event, transition in events]
        )
        told = [
            (event, position, self._route(event) if to is None else to)
            for (event, _), position in zip(events, positions, strict=True)
        ]
        self.recorded += self._send(told, at)

    def _send(
        self, told: Iterable[tuple[CloudEvent, int, Iterable[str]]], at: datetime
    ) -> list[RecordedEvent]:
        """Make an entry for each sink that an event, at its position of the journal, is for."""
        ids = count(self.deliveries.next_id())
        recorded = [
            RecordedEvent(position, event, _entries(event, position, sinks, at, ids))
            for event, position, sinks in told
        ]
        self.deliveries.add_entries(entry for one in recorded for entry in one.entries)
        return recorded

    def add_entry(self, position: int, sink: str, at: datetime) -> None:
        """Make an entry for an event that was said earlier, for a sink that was not there then."""
        self.recorded += self._send([(self.journal.event(position), position, [sink])], at)

    def redeliver(self, position: int, sink: str, at: datetime) -> None:
        """Make another entry for an event that a sink was sent: what it makes of it has changed."""
        for one in self._send([(self.journal.event(position), position, [sink])], at):
            self.redelivered += one.entries

    def mode(self) -> Mode:
        """The remembered switch of the approvals."""
        return self._meta("mode") or "off"  # type: ignore[return-value]  # only set_mode and file write it

    def set_mode(self, mode: Mode, principal: str, at: datetime) -> None:
        """Remember the switch, and who turned it."""
        self.set_meta("mode", mode)
        self.journal.append_note(at, "mode", {"mode": mode, "principal": principal})
        self.messages.refresh_all(at)

    def set_last_read(self, moment: datetime) -> None:
        """The relay stops in an orderly way; this is when it last read the document."""
        self.set_meta("last_read", format_sortable(moment))

    def take_last_read(self) -> datetime | None:
        """When the document was last read before an orderly stop, and forget it; None after a crash."""
        moment = parse_timestamp(self._meta("last_read"))
        self.set_meta("last_read", None)
        return moment

    def set_meta(self, key: str, value: str | None) -> None:
        """Remember one value; None forgets it."""
        if value is None:
            self._connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _meta(self, key: str) -> str | None:
        found = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return found[0] if found else None


def _key(event: CloudEvent) -> str | None:
    """The EventId that the event is about."""
    return None if event.name.startswith("relay.") else (event.subject or "").lower()


def _entries(
    event: CloudEvent, position: int, sinks: Iterable[str], at: datetime, ids: Iterator[int]
) -> tuple[Entry, ...]:
    name, key = event.name, _key(event)
    lane = key if key is not None else f"{name}/{event.subject or ''}"
    not_before = parse_timestamp(event.data.get("notBefore"))
    return tuple(
        Entry(next(ids), sink, position, lane, name, key, not_before, 0, None, at, event)
        for sink in sinks
    )
