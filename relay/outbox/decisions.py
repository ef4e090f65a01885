"""The tables of approvals: decisions, grants with their StartRequests, and first answers."""

from __future__ import annotations

import sqlite3
from dataclasses import asdict
from datetime import datetime
from typing import Any

import orjson
from pydantic import TypeAdapter

from relay.events.timestamps import format_sortable
from relay.outbox import Decision, FirstAnswer, Grant, GrantState
from relay.outbox.rows import read_as

_DECISION = TypeAdapter(Decision)
_GRANT = TypeAdapter(Grant)
_FIRST_ANSWER = TypeAdapter(FirstAnswer)
MAX_REFUSALS = 5000
"""First answers of refusals that are kept for each principal.

A client can make 3650 calls while a signature is valid, so it cannot push out the first answer of a
callback that could still be repeated.
"""


class Decisions:
    """Reads and writes the tables of approvals, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    # --- votes, holds and releases

    def for_occurrence(
        self, occurrence: int, *, counting: bool = False, limit: int = -1
    ) -> list[Decision]:
        """Return the newest decisions about an occurrence, or of those that count, oldest first.

        A negative ``limit`` means all.
        """
        condition = " AND counts" if counting else ""
        newest = f"SELECT id FROM decision WHERE occurrence = ?{condition} ORDER BY id DESC LIMIT ?"  # noqa: S608  # our own text
        return self._select_decisions(f"id IN ({newest})", occurrence, limit)

    def holds_before(self, event_key: str, occurrence: int) -> list[Decision]:
        """Return the holds that count from earlier occurrences of the same EventId."""
        return self._select_decisions(
            "counts AND decision = 'hold' "
            "AND occurrence IN (SELECT id FROM occurrence WHERE key = ? AND id < ?)",
            event_key,
            occurrence,
        )

    def add_decision(self, decision: Decision) -> None:
        """Store an accepted decision."""
        values = asdict(decision)
        values["at"] = format_sortable(decision.at)
        values["expires"] = format_sortable(decision.expires) if decision.expires else None
        self._connection.execute(
            "INSERT INTO decision (approval_id, occurrence, decision, principal, channel, revision,"
            " reason, at, expires, dry_run, counts, told, message_id) VALUES (:approval_id, "
            ":occurrence, :decision, :principal, :channel, :revision, :reason, :at, :expires, "
            ":dry_run, :counts, :recorded_event_id, :message_id)",
            values,
        )

    def stop_counting(self, approval_id: str) -> None:
        """A vote no longer counts, or a hold is no longer in force."""
        self._connection.execute(
            "UPDATE decision SET counts = 0 WHERE approval_id = ?", (approval_id,)
        )

    def _select_decisions(self, condition: str, *values: object) -> list[Decision]:
        rows = self._connection.execute(
            "SELECT approval_id, occurrence, decision, principal, channel, revision, reason, at, "  # noqa: S608  # our own text
            "expires, dry_run, counts, told AS recorded_event_id, message_id "
            f"FROM decision WHERE {condition} ORDER BY id",
            values,
        )
        return list(read_as(_DECISION, rows))

    # --- grants

    def grants(self, occurrence: int) -> list[Grant]:
        """Return every grant of an occurrence, oldest first."""
        return self._select_grants("occurrence = ?", occurrence)

    def grant(self, grant_id: int) -> Grant:
        """Return one grant. Raises IndexError if there is none."""
        return self._select_grants("id = ?", grant_id)[0]

    def open_grants(self) -> list[Grant]:
        """Return the grants whose StartRequest has no final answer, oldest first.

        Grants of dry runs are left out.
        """
        return self._select_grants("state IN ('granted', 'sent') AND NOT dry_run")

    def unsettled(self) -> list[int]:
        """Return the ids of the occurrences for which a transition can be due.

        Live occurrences come first, then those with counting decisions or open grants.
        """
        rows = self._connection.execute(
            "SELECT id FROM occurrence WHERE live "
            "OR id IN (SELECT occurrence FROM decision WHERE counts "
            "UNION SELECT occurrence FROM start_request WHERE state IN ('granted', 'sent')) "
            "ORDER BY live DESC, id"
        )
        return [occurrence for (occurrence,) in rows]

    def add_grant(
        self,
        occurrence: int,
        revision: str,
        rule: str,
        approval_id: str,
        at: datetime,
        *,
        dry_run: bool,
        cause: str,
    ) -> None:
        """Store a grant. ``cause`` is the ``causationid`` of its StartRequest's events."""
        self._connection.execute(
            "INSERT INTO start_request "
            "(occurrence, revision, rule, approval_id, granted_at, state, dry_run, cause) "
            "VALUES (?, ?, ?, ?, ?, 'granted', ?, ?)",
            (occurrence, revision, rule, approval_id, format_sortable(at), dry_run, cause),
        )

    def claim_grant(self, grant_id: int) -> None:
        """A StartRequest for the grant is about to be sent."""
        self._connection.execute(
            "UPDATE start_request SET state = 'sent', attempts = attempts + 1, status = NULL "
            "WHERE id = ?",
            (grant_id,),
        )

    def record_answer(self, grant_id: int, state: GrantState, status: int | None) -> None:
        """Store the state of a grant. The last HTTP status stays if ``status`` is None."""
        self._connection.execute(
            "UPDATE start_request SET state = ?, status = coalesce(?, status) WHERE id = ?",
            (state, status, grant_id),
        )

    def _select_grants(self, condition: str, *values: object) -> list[Grant]:
        rows = self._connection.execute(
            f"SELECT * FROM start_request WHERE {condition} ORDER BY id",  # noqa: S608  # our own text
            values,
        )
        return list(read_as(_GRANT, rows))

    # --- first answers

    def first_answer(self, principal: str, request_id: str) -> FirstAnswer | None:
        """Return the first answer to a request with this id."""
        rows = self._connection.execute(
            "SELECT digest, status, body FROM answer WHERE principal = ? AND request_id = ?",
            (principal, request_id),
        )
        return next(read_as(_FIRST_ANSWER, rows), None)

    def remember_answer(
        self,
        principal: str,
        request_id: str,
        digest: str,
        status: int,
        body: dict[str, Any],
        at: datetime,
    ) -> None:
        """Store a first answer."""
        body_json = orjson.dumps(body).decode()
        self._connection.execute(
            "INSERT INTO answer VALUES (?, ?, ?, ?, ?, ?)",
            (principal, request_id, digest, status, body_json, format_sortable(at)),
        )

    def prune_refusals(self) -> None:
        """Delete the first answers of each principal's refusals, except the newest.

        See `MAX_REFUSALS`.
        """
        refusals = "FROM answer WHERE principal = :principal AND status != 202"
        principals = self._connection.execute("SELECT DISTINCT principal FROM answer").fetchall()
        for (principal,) in principals:
            self._connection.execute(
                f"DELETE {refusals} AND at <= "
                f"(SELECT at {refusals} ORDER BY at DESC LIMIT 1 OFFSET :newest)",
                {"principal": principal, "newest": MAX_REFUSALS},
            )

    def prune_answers(self, before: datetime) -> None:
        """Delete the first answers from before that moment."""
        self._connection.execute("DELETE FROM answer WHERE at < ?", (format_sortable(before),))
