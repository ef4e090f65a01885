"""What chat sinks show and of which events, and the links in it to the page on which a decision is confirmed."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from relay.events.timestamps import format_sortable

MAX_LINKS = 100
"""Links to one decision about one event that are good at a time; each edit of a message brings new ones."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. ``ref`` is how the platform names it, None where it cannot.

    ``told``: the position in the journal up to which its thread tells; ``looks``: a digest of what it shows.
    """

    id: int
    sink: str
    ref: str | None
    posted: bool
    code: str
    content_hash: str | None
    history_position: int


@dataclass(frozen=True, slots=True)
class ConfirmationLink:
    """What a link stands for: one decision about one state of one event. ``wrong``: how often a wrong code came with it."""

    token: str
    occurrence: int
    revision: str
    decision: Literal["approve", "hold", "release"]
    code: str
    wrong_codes: int


class ChatMessages:
    """The tables of messages, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def showing(self, sink: str, occurrence: int) -> ChatMessage | None:
        """The message in which a sink shows an event."""
        found = self._connection.execute(
            "SELECT message.id, message.sink, ref, posted, code, looks, told FROM message JOIN message_about ON message.id = message "
            "WHERE message_about.sink = ? AND occurrence = ?",
            (sink, occurrence),
        ).fetchone()
        if found is None:
            return None
        id_, name, ref, posted, code, looks, told = found
        return ChatMessage(id_, name, ref, bool(posted), code, looks, told)

    def previous_occurrence(self, sink: str, event_key: str, number: int) -> int | None:
        """Of the occurrences of an EventId before that one, the newest that a sink shows."""
        found = self._connection.execute(
            "SELECT id FROM message_about JOIN occurrence ON id = occurrence WHERE sink = ? AND key = ? AND number < ? "
            "ORDER BY number DESC LIMIT 1",
            (sink, event_key, number),
        ).fetchone()
        return int(found[0]) if found is not None else None

    def occurrences(self, message: int) -> list[int]:
        """What a message is about, in order of appearance."""
        found = self._connection.execute(
            "SELECT occurrence FROM message_about WHERE message = ? ORDER BY occurrence", (message,)
        )
        return [one for (one,) in found]

    def shows(self, sink: str, ref: str, occurrence: int) -> bool:
        """Whether the message that the platform names so is one of this sink and about this event."""
        found = self._connection.execute(
            "SELECT 1 FROM message JOIN message_about ON message.id = message WHERE occurrence = ? AND message.sink = ? AND ref = ?",
            (occurrence, sink, ref),
        ).fetchone()
        return found is not None

    def begin(self, sink: str, occurrences: Sequence[int], code: str, told: int) -> None:
        """A sink is about to show these events in one message."""
        message = self._connection.execute(
            "INSERT INTO message (sink, code, told) VALUES (?, ?, ?)", (sink, code, told)
        ).lastrowid
        self._connection.executemany(
            "INSERT OR REPLACE INTO message_about VALUES (?, ?, ?)",
            [(sink, occurrence, message) for occurrence in occurrences],
        )

    def mark_shown(self, message: int, ref: str | None, looks: str) -> None:
        """It is over there and shows this."""
        self._connection.execute(
            "UPDATE message SET ref = ?, posted = 1, looks = ? WHERE id = ?", (ref, looks, message)
        )

    def mark_history_told(self, message: int, position: int, stale_at: datetime | None) -> None:
        """Its thread tells everything up to that position; until that moment nothing changes by time alone."""
        self._connection.execute(
            "UPDATE message SET told = ?, stale_at = ? WHERE id = ?",
            (position, format_sortable(stale_at) if stale_at is not None else None, message),
        )

    def take_due_refreshes(self, sink: str, now: datetime) -> list[int]:
        """One event of each message of which time alone has changed what it should show; each is named once, and looks like nothing."""
        stale = self._connection.execute(
            "SELECT id FROM message WHERE sink = ? AND stale_at <= ?", (sink, format_sortable(now))
        ).fetchall()
        self._connection.execute(
            "UPDATE message SET stale_at = NULL, looks = NULL WHERE sink = ? AND stale_at <= ?",
            (sink, format_sortable(now)),
        )
        # One that has ended may have come again since, in a message of its own.
        query = "SELECT occurrence FROM message_about JOIN occurrence ON id = occurrence WHERE message = ? ORDER BY live DESC, id LIMIT 1"
        return [one for message in stale for (one,) in self._connection.execute(query, message)]

    def refresh_all(self, now: datetime) -> None:
        """What every message about a live event should show may have changed."""
        self._connection.execute(
            "UPDATE message SET stale_at = ? WHERE posted AND id IN (SELECT message FROM message_about "
            "JOIN occurrence ON occurrence.id = occurrence WHERE live)",
            (format_sortable(now),),
        )

    def next_refresh(self, sink: str) -> str | None:
        """When `take_stale` will find something."""
        found = self._connection.execute(
            "SELECT min(stale_at) FROM message WHERE sink = ?", (sink,)
        ).fetchone()[0]
        return str(found) if found is not None else None

    def add_link(
        self, message: int, token: str, occurrence: int, revision: str, decision: str, at: datetime
    ) -> None:
        """A link of this message stands for this decision. The token is kept as its digest alone."""
        self._connection.execute(
            "INSERT OR IGNORE INTO invitation (token, message, occurrence, revision, decision, at) VALUES (?, ?, ?, ?, ?, ?)",
            (token_digest(token), message, occurrence, revision, decision, format_sortable(at)),
        )

    def find_link(self, token: str) -> ConfirmationLink | None:
        """What a link stands for."""
        found = self._connection.execute(
            "SELECT token, occurrence, revision, decision, code, wrong FROM invitation JOIN message ON message.id = message "
            "WHERE token = ?",
            (token_digest(token),),
        ).fetchone()
        return ConfirmationLink(*found) if found is not None else None

    def count_wrong_code(self, invitation: ConfirmationLink) -> None:
        """A code that the message does not show was given with this link."""
        self._connection.execute(
            "UPDATE invitation SET wrong = wrong + 1 WHERE token = ?", (invitation.token,)
        )

    def prune(self) -> None:
        """Forget the links to events that have ended, links that many newer ones replace, and messages about events that are forgotten."""
        self._connection.execute(
            "DELETE FROM invitation WHERE occurrence IN (SELECT id FROM occurrence WHERE NOT live)"
        )
        self._connection.execute(
            "DELETE FROM invitation WHERE token IN (SELECT token FROM (SELECT token, row_number() OVER "
            "(PARTITION BY message, occurrence, decision ORDER BY at DESC) AS newer FROM invitation) WHERE newer > ?)",
            (MAX_LINKS,),
        )
        self._connection.execute(
            "DELETE FROM message WHERE id NOT IN (SELECT message FROM message_about)"
        )


def token_digest(token: str) -> str:
    """As a token is kept: whoever reads the file cannot follow the link."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
