"""The tables of chat messages: which events each shows.

It stores what `relay.chat` decides, and knows no platform. A message shows a card, which is edited
when it changes, and has a thread, which tells the history.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import orjson
from pydantic import TypeAdapter

from relay.events.timestamps import format_sortable
from relay.store.rows import parse_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message.

    ``ref`` is the platform's name of it; None if the platform cannot name it. ``content_hash`` is
    that of the card that it shows; None if it was not posted yet. ``is_due``: time alone may have
    changed the card. ``history_position`` is the journal position up to which its thread tells.
    ``refresh_at`` is when time alone changes it, or has changed it.
    """

    id: int
    ref: str | None
    content_hash: str | None
    is_due: bool
    history_position: int
    refresh_at: datetime | None

    @property
    def is_posted(self) -> bool:
        return self.content_hash is not None


_CHAT_MESSAGE = TypeAdapter(ChatMessage)


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else format_sortable(moment)


class ChatMessages:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def find(self, sink: str, occurrence: int) -> ChatMessage | None:
        rows = self._connection.execute(
            "SELECT message.* FROM message JOIN message_about ON message.id = message "
            "WHERE message_about.sink = ? AND occurrence = ?",
            (sink, occurrence),
        )
        return next(parse_rows(_CHAT_MESSAGE, rows), None)

    def occurrences_of_message(self, message: int) -> list[int]:
        rows = self._connection.execute(
            "SELECT occurrence FROM message_about WHERE message = ? ORDER BY occurrence", (message,)
        )
        return [occurrence for (occurrence,) in rows]

    def shows_occurrence(self, sink: str, ref: str, occurrence: int) -> bool:
        """Return whether the message that the platform calls ``ref`` shows an event of a sink."""
        row = self._connection.execute(
            "SELECT 1 FROM message JOIN message_about ON message.id = message "
            "WHERE occurrence = ? AND message.sink = ? AND ref = ?",
            (occurrence, sink, ref),
        ).fetchone()
        return row is not None

    def begin(self, sink: str, occurrences: Sequence[int], history_position: int) -> None:
        message = self._connection.execute(
            "INSERT INTO message (sink, history_position) VALUES (?, ?)", (sink, history_position)
        ).lastrowid
        self._connection.executemany(
            "INSERT OR REPLACE INTO message_about VALUES (?, ?, ?)",
            [(sink, occurrence, message) for occurrence in occurrences],
        )

    def mark_shown(self, planned: ChatMessage, ref: str | None, content_hash: str) -> None:
        """Record that a message is posted and shows this content, as ``planned`` of what it was.

        Its timer is over, but not one that was set since.
        """
        self._update(planned, "ref = :ref, content_hash = :hash", ref=ref, hash=content_hash)

    def mark_history_told(
        self, planned: ChatMessage, position: int, refresh_at: datetime | None
    ) -> None:
        """Record how far a thread tells, and when time alone will change the message.

        A timer that was set since the update was ``planned`` stays.
        """
        next_at = _text(refresh_at)
        self._update(planned, "history_position = :position", position=position, next=next_at)

    def _update(self, planned: ChatMessage, changes: str, **values: str | int | None) -> None:
        self._connection.execute(
            f"UPDATE message SET {changes}, "  # noqa: S608  # our own text
            "is_due = iif(coalesce(refresh_at, :at) IS :at, 0, is_due), "
            "refresh_at = iif(coalesce(refresh_at, :at) IS :at, :next, refresh_at) WHERE id = :id",
            {"id": planned.id, "at": _text(planned.refresh_at), "next": None, **values},
        )

    def take_occurrences_due_for_refresh(self, sink: str, now: datetime) -> list[int]:
        """Return one occurrence of each message that is due for refresh, only once."""
        due = (sink, format_sortable(now))
        # The EventId of an ended occurrence may have come again, in a message of its own.
        rows = self._connection.execute(
            "SELECT (SELECT occurrence FROM message_about JOIN occurrence ON id = occurrence "
            "WHERE message = message.id ORDER BY live DESC, id LIMIT 1) FROM message "
            "WHERE sink = ? AND refresh_at <= ? AND NOT is_due ORDER BY id",
            due,
        ).fetchall()
        self._connection.execute(
            "UPDATE message SET is_due = 1 WHERE sink = ? AND refresh_at <= ? AND NOT is_due", due
        )
        return [occurrence for (occurrence,) in rows if occurrence is not None]

    def refresh_all(self, now: datetime) -> None:
        """Have every message about a live event shown again."""
        self._connection.execute(
            "UPDATE message SET refresh_at = ?, is_due = 0, "
            "content_hash = iif(content_hash IS NULL, NULL, '') WHERE id IN "
            "(SELECT message FROM message_about WHERE occurrence IN "
            "(SELECT id FROM occurrence INDEXED BY occurrence_live WHERE live))",
            (format_sortable(now),),
        )

    def refresh_about(self, occurrences: Sequence[int], now: datetime) -> None:
        self._connection.execute(
            "UPDATE message SET refresh_at = ?, is_due = 0 WHERE id IN "
            "(SELECT message FROM message_about "
            "WHERE occurrence IN (SELECT value FROM json_each(?)))",
            (format_sortable(now), orjson.dumps(occurrences).decode()),
        )

    def prune(self) -> None:
        self._connection.execute(
            "DELETE FROM message WHERE id NOT IN (SELECT message FROM message_about)"
        )
