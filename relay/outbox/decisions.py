"""Votes, holds and releases, what was granted, and first answers."""

from __future__ import annotations

import sqlite3
from datetime import datetime
from typing import Any

import orjson

from relay.events.timestamps import format_sortable, parse_timestamp
from relay.outbox import Decision, FirstAnswer, Grant, GrantState

_DECISION = "approval_id, occurrence, decision, principal, channel, revision, reason, at, expires, dry_run, counts, told, message_id"
_GRANT = "id, occurrence, revision, rule, approval_id, granted_at, state, attempts, status, dry_run, cause"


class Decisions:
    """The tables of approvals, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def for_occurrence(self, occurrence: int, *, counting: bool = False) -> list[Decision]:
        """All accepted decisions about an occurrence, or those that still count, oldest first."""
        only = " AND counts" if counting else ""
        found = self._connection.execute(
            f"SELECT {_DECISION} FROM decision WHERE occurrence = ?{only} ORDER BY id",  # noqa: S608  # our own text
            (occurrence,),
        )
        return [_decision(row) for row in found]

    def holds_before(self, event_key: str, occurrence: int) -> list[Decision]:
        """Holds that still hold, from when the same EventId was in the document before."""
        found = self._connection.execute(
            f"SELECT {_DECISION} FROM decision WHERE counts AND decision = 'hold' "  # noqa: S608  # our own text
            "AND occurrence IN (SELECT id FROM occurrence WHERE key = ? AND id < ?) ORDER BY id",
            (event_key, occurrence),
        )
        return [_decision(row) for row in found]

    def add_decision(self, decision: Decision) -> None:
        """Record an accepted decision."""
        self._connection.execute(
            f"INSERT INTO decision ({_DECISION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608  # our own text
            (
                decision.approval_id,
                decision.occurrence,
                decision.decision,
                decision.principal,
                decision.channel,
                decision.revision,
                decision.reason,
                format_sortable(decision.at),
                format_sortable(decision.expires) if decision.expires else None,
                decision.dry_run,
                decision.counts,
                decision.recorded_event_id,
                decision.message_id,
            ),
        )

    def stop_counting(self, approval_id: str) -> None:
        """A vote counts no more, or a hold holds no more."""
        self._connection.execute(
            "UPDATE decision SET counts = 0 WHERE approval_id = ?", (approval_id,)
        )

    def grants(self, occurrence: int) -> list[Grant]:
        """Everything that was ever granted for an occurrence, oldest first."""
        return self._grants("WHERE occurrence = ? ORDER BY id", occurrence)

    def open_grants(self) -> list[Grant]:
        """Grants whose StartRequest has no final answer yet, dry runs left out, oldest first."""
        return self._grants("WHERE state IN ('granted', 'sent') AND NOT dry_run ORDER BY id")

    def unsettled(self) -> list[int]:
        """Occurrences that a step could still move: live ones, then those with counting decisions or open grants."""
        found = self._connection.execute(
            "SELECT id FROM occurrence WHERE live OR id IN (SELECT occurrence FROM decision WHERE counts "
            "UNION SELECT occurrence FROM start_request WHERE state IN ('granted', 'sent')) ORDER BY live DESC, id"
        )
        return [occurrence for (occurrence,) in found]

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
        """Record that a rule is satisfied."""
        self._connection.execute(
            "INSERT INTO start_request (occurrence, revision, rule, approval_id, granted_at, state, dry_run, cause) "
            "VALUES (?, ?, ?, ?, ?, 'granted', ?, ?)",
            (occurrence, revision, rule, approval_id, format_sortable(at), dry_run, cause),
        )

    def claim_grant(self, grant: int) -> None:
        """The StartRequest is about to be sent, once more."""
        self._connection.execute(
            "UPDATE start_request SET state = 'sent', attempts = attempts + 1, status = NULL WHERE id = ?",
            (grant,),
        )

    def record_answer(self, grant: int, state: GrantState, status: int | None) -> None:
        """What came of it."""
        self._connection.execute(
            "UPDATE start_request SET state = ?, status = coalesce(?, status) WHERE id = ?",
            (state, status, grant),
        )

    def first_answer(self, principal: str, request_id: str) -> FirstAnswer | None:
        """What a request with this id was answered the first time."""
        found = self._connection.execute(
            "SELECT digest, status, body FROM answer WHERE principal = ? AND request_id = ?",
            (principal, request_id),
        ).fetchone()
        return FirstAnswer(found[0], found[1], orjson.loads(found[2])) if found else None

    def remember_answer(
        self,
        principal: str,
        request_id: str,
        digest: str,
        status: int,
        body: dict[str, Any],
        at: datetime,
    ) -> None:
        """Keep a first answer."""
        self._connection.execute(
            "INSERT INTO answer VALUES (?, ?, ?, ?, ?, ?)",
            (
                principal,
                request_id,
                digest,
                status,
                orjson.dumps(body).decode(),
                format_sortable(at),
            ),
        )

    def prune_answers(self, before: datetime) -> None:
        """Forget first answers older than that."""
        self._connection.execute("DELETE FROM answer WHERE at < ?", (format_sortable(before),))

    def _grants(self, where: str, *values: object) -> list[Grant]:
        found = self._connection.execute(f"SELECT {_GRANT} FROM start_request {where}", values)  # noqa: S608  # our own text
        return [_grant(row) for row in found]


def _decision(row: tuple[Any, ...]) -> Decision:
    (
        approval_id,
        occurrence,
        kind,
        principal,
        channel,
        revision,
        reason,
        at,
        expires,
        dry_run,
        counts,
        told,
        message_id,
    ) = row
    moment = parse_timestamp(at)
    assert moment is not None  # noqa: S101  # we wrote it
    until = parse_timestamp(expires)
    return Decision(
        approval_id,
        occurrence,
        kind,
        principal,
        channel,
        revision,
        reason,
        moment,
        until,
        bool(dry_run),
        bool(counts),
        told,
        message_id,
    )


def _grant(row: tuple[Any, ...]) -> Grant:
    (
        id_,
        occurrence,
        revision,
        rule,
        approval_id,
        granted_at,
        state,
        attempts,
        status,
        dry_run,
        cause,
    ) = row
    moment = parse_timestamp(granted_at)
    assert moment is not None  # noqa: S101  # we wrote it
    return Grant(
        id_,
        occurrence,
        revision,
        rule,
        approval_id,
        moment,
        state,
        attempts,
        status,
        bool(dry_run),
        cause,
    )
