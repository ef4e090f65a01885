"""The tables of approvals: decisions, grants with their StartRequests, reminders, first answers.

`relay.approvals` decides, and reads and writes here. Votes that *count* lead to a grant. The grant
is *claimed* before its StartRequest is sent: the claim is a row of the journal. The journal is the
authority. A row says where the journal holds its decision or grant, and what matters is read from
there. So a row that was put into a table by hand grants nothing. The column ``told`` is the id of
the ``approval.recorded`` of a decision.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

import orjson
from pydantic import TypeAdapter

from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_sortable, parse_timestamp
from relay.store import Decision, FirstAnswer, Grant, GrantState
from relay.store.journal import Journal
from relay.store.rows import parse_rows

_DECISION = TypeAdapter(Decision)
_GRANT = TypeAdapter(Grant)
_FIRST_ANSWER = TypeAdapter(FirstAnswer)
MAX_REFUSALS = 5000
"""First answers of refusals that are kept for each principal, over HTTP and AMQP together."""
REFUSAL_RETENTION = timedelta(minutes=7)
"""For so long all of them are kept. A signature is valid for a shorter time, so nobody can push out
the first answer of a callback that could still be repeated."""
MAX_RECENT = 1000
"""Decisions about an occurrence that are read to find those of the last minute."""


class Decisions:
    """Reads and writes the tables of approvals, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection, journal: Journal) -> None:
        self._connection = connection
        self._journal = journal

    # --- votes, holds and releases

    def for_occurrence(
        self, occurrence: int, *, counting: bool = False, limit: int = -1
    ) -> list[Decision]:
        """Return the newest decisions about an occurrence, or of those that count, oldest first.

        A negative ``limit`` means all.
        """
        condition = " AND counts" if counting else ""
        newest = f"SELECT id FROM decision WHERE occurrence = ?{condition} ORDER BY id DESC LIMIT ?"  # noqa: S608  # our own text
        decisions = self._select_decisions(f"id IN ({newest})", occurrence, limit)
        return [decision for decision in decisions if decision.counts or not counting]

    def count_recent_on_occurrence(
        self, occurrence: int, principal: str, since: datetime, until: datetime
    ) -> int:
        """Return how many of the newest decisions about an occurrence a principal took.

        Only those after ``since`` and before ``until`` count.
        """
        row = self._connection.execute(
            "SELECT count(*) FROM (SELECT principal, at FROM decision WHERE occurrence = ? "
            "ORDER BY id DESC LIMIT ?) WHERE principal = ? AND at > ? AND at < ?",
            (occurrence, MAX_RECENT, principal, format_sortable(since), format_sortable(until)),
        ).fetchone()
        return int(row[0])

    def holds_of_earlier_occurrences(self, event_key: str, occurrence: int) -> list[Decision]:
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
            "INSERT INTO decision (approval_id, occurrence, decision, principal, "
            "channel, revision, reason, at, expires, dry_run, counts, told, message_id, position) "
            "VALUES (:approval_id, :occurrence, :decision, :principal, :channel, :revision, "
            ":reason, :at, :expires, :dry_run, :counts, :recorded_event_id, :message_id, "
            ":position)",
            values,
        )

    def replace_decision_row(self, decision: Decision) -> None:
        """Store a decision again as the journal has it, in place of the row if there is one."""
        self._connection.execute(
            "DELETE FROM decision WHERE approval_id = ?", (decision.approval_id,)
        )
        self.add_decision(decision)

    def end_vote_or_hold(self, approval_id: str) -> None:
        """A vote no longer counts, or a hold is no longer in force."""
        self._connection.execute(
            "UPDATE decision SET counts = 0 WHERE approval_id = ?", (approval_id,)
        )

    def decisions_in_force_from_journal(self, event_key: str) -> dict[str, Decision]:
        """Return the votes and holds in force about an EventId, from the journal alone, by id.

        The occurrence is 0: the journal knows EventIds only. Holds that an older version recorded
        are left out, because their ends cannot be read from the journal.
        """
        found: dict[str, Decision] = {}
        claimed_revision: str | None = None
        for position, kind, body in self._journal.decision_and_claim_rows_of_event(event_key):
            if kind == "claim":
                claimed_revision = orjson.loads(body)["revision"]
                continue
            event = CloudEvent.parse(body)
            data = event.data
            for approval_id in data.get("ended", ()):  # decisions that this event took out of force
                found.pop(approval_id, None)
            if event.name == "approval.recorded":
                if data["decision"] == "approve" or (
                    data["decision"] == "hold" and "expires" in data
                ):
                    found[data["approvalId"]] = _decision_from_event(position, event)
            elif event.name != "approval.voided":
                # An accepted StartRequest used the votes on the state that was claimed. The event
                # can have changed since: then the answer shows a newer state, with votes of its
                # own.
                ended = event.name == "event.ended"
                found = {
                    approval_id: decision
                    for approval_id, decision in found.items()
                    if decision.decision == "hold"
                    or not (ended or decision.revision == claimed_revision)
                }
                claimed_revision = None
        return found

    def _select_decisions(self, condition: str, *values: object) -> list[Decision]:
        rows = self._connection.execute(
            "SELECT approval_id, occurrence, decision, principal, channel, revision, reason, at, "  # noqa: S608  # our own text
            "expires, dry_run, counts, told AS recorded_event_id, message_id, position "
            f"FROM decision WHERE {condition} ORDER BY id",
            values,
        )
        return [
            self._verified_decision(decision) if decision.counts else decision
            for decision in parse_rows(_DECISION, rows)
        ]

    def _verified_decision(self, decision: Decision) -> Decision:
        """Return a decision with what the journal says about it.

        A vote that the journal does not hold does not count. Such a hold stays, until somebody
        releases it.
        """
        event = self._journal.verified_event_at_position(
            decision.position,
            "approval.recorded",
            self._event_key_of_occurrence(decision.occurrence),
        )
        if event is None or event.data["approvalId"] != decision.approval_id:
            is_hold = decision.decision == "hold"
            return replace(decision, counts=is_hold, expires=None)
        data = event.data
        recorded = _decision_from_event(decision.position, event)
        return replace(
            recorded,
            occurrence=decision.occurrence,
            # The journal has the current revision, and a hold may name an earlier one.
            revision=decision.revision if data["decision"] == "hold" else data["revision"],
            expires=recorded.expires if "expires" in data else decision.expires,
            message_id=decision.message_id,
        )

    def _event_key_of_occurrence(self, occurrence: int) -> str:
        row = self._connection.execute(
            "SELECT key FROM occurrence WHERE id = ?", (occurrence,)
        ).fetchone()
        return str(row[0]) if row is not None else ""

    # --- grants

    def grants(self, occurrence: int) -> list[Grant]:
        """Return every grant of an occurrence, oldest first."""
        return self._select_grants("occurrence = ?", occurrence)

    def grants_by_occurrence(self, occurrences: Sequence[int]) -> dict[int, list[Grant]]:
        """Return every grant of these occurrences, oldest first, by occurrence."""
        found: dict[int, list[Grant]] = {}
        grants = self._select_grants(
            "occurrence IN (SELECT value FROM json_each(?))", orjson.dumps(occurrences).decode()
        )
        for grant in grants:
            found.setdefault(grant.occurrence, []).append(grant)
        return found

    def require_grant_by_id(self, grant_id: int) -> Grant:
        """Return one grant. Raises IndexError if there is none."""
        return self._select_grants("id = ?", grant_id)[0]

    def open_grants(
        self, *, ids: Iterable[int] | None = None, scopes: Iterable[str] | None = None
    ) -> list[Grant]:
        """Return the grants whose StartRequest has no final answer, oldest first.

        Grants of dry runs are left out. Only consider the grants with these ids, and the events of
        these scopes; None: all.
        """
        scope = "(SELECT scope FROM occurrence WHERE occurrence.id = start_request.occurrence)"
        condition = "state IN ('granted', 'sent') AND NOT dry_run"
        values = []
        for column, wanted in (("id", ids), (scope, scopes)):
            if wanted is not None:
                condition += f" AND {column} IN (SELECT value FROM json_each(?))"  # noqa: S608  # our own text
                values.append(orjson.dumps(list(wanted)).decode())
        return self._select_grants(condition, *values)

    def occurrence_ids_to_check_transitions(
        self, *, all_live: bool = True, event_keys: Sequence[str] | None = None
    ) -> list[int]:
        """Return the ids of the occurrences for which a transition can be due.

        Those are the ones with counting votes or open grants, and the live ones: all of them, or
        only those with a counting decision about their EventId. Holds of an event that is gone wait
        until it comes back. ``event_keys``: only consider the events with these keys.

        Live occurrences come first.
        """
        if event_keys is not None and any("\0" in key for key in event_keys):
            event_keys = None  # json_each cuts a text at a NUL
        is_wanted = "key IN (SELECT value FROM json_each(:keys))" if event_keys is not None else "1"
        is_decided = (
            "key IN (SELECT key FROM occurrence WHERE id IN "
            "(SELECT occurrence FROM decision WHERE counts))"
        )
        rows = self._connection.execute(
            "SELECT id FROM occurrence WHERE id IN ("  # noqa: S608  # our own text
            "SELECT id FROM occurrence INDEXED BY occurrence_live "
            f"WHERE live AND {is_wanted} AND {'1' if all_live else is_decided} "
            "UNION SELECT occurrence FROM decision WHERE counts AND decision != 'hold' "
            "UNION SELECT occurrence FROM start_request WHERE state IN ('granted', 'sent')) "
            f"AND {is_wanted} ORDER BY live DESC, id",
            {"keys": orjson.dumps(event_keys).decode()},
        )
        return [occurrence for (occurrence,) in rows]

    def exists_counting_decision_or_open_grant(self) -> bool:
        """Whether any decision counts, also one about an event that is gone, or a grant is open."""
        row = self._connection.execute(
            "SELECT EXISTS (SELECT 1 FROM decision WHERE counts) OR "
            "EXISTS (SELECT 1 FROM start_request WHERE state IN ('granted', 'sent'))"
        ).fetchone()
        return bool(row[0])

    def insert_grant_row(
        self,
        occurrence: int,
        revision: str,
        rule: str,
        approval_id: str,
        at: datetime,
        *,
        dry_run: bool,
        cause: str,
        position: int,
    ) -> None:
        """Store a grant.

        ``cause`` is the ``causationid`` of its StartRequest's events, ``position`` that of its
        ``approval.granted``.
        """
        values = (occurrence, revision, rule, approval_id, format_sortable(at), dry_run, cause)
        self._connection.execute(
            "INSERT INTO start_request "
            "(occurrence, revision, rule, approval_id, granted_at, state, dry_run, cause, position)"
            " VALUES (?, ?, ?, ?, ?, 'granted', ?, ?, ?)",
            (*values, position),
        )

    def mark_grant_claimed(self, grant_id: int) -> None:
        """A StartRequest for the grant is about to be sent."""
        self._connection.execute(
            "UPDATE start_request SET state = 'sent', attempts = attempts + 1, status = NULL "
            "WHERE id = ?",
            (grant_id,),
        )

    def set_grant_state(self, grant_id: int, state: GrantState, status: int | None) -> None:
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
        verified = [self._verified_grant(grant) for grant in parse_rows(_GRANT, rows)]
        return [grant for grant in verified if grant is not None]

    def _verified_grant(self, grant: Grant) -> Grant | None:
        """Return a grant with the time that the journal has; None if it is open and not there."""
        if grant.state not in ("granted", "sent"):
            return grant
        event = self._journal.verified_event_at_position(
            grant.position, "approval.granted", self._event_key_of_occurrence(grant.occurrence)
        )
        if event is None or not _is_approval_granted_event_of_grant(event, grant):
            return None
        return replace(grant, granted_at=_parse_time_of_cloudevent(event))

    # --- reminders

    def is_reminded(self, occurrence: int, revision: str) -> bool:
        """Whether a reminder was recorded for this state of an event."""
        row = self._connection.execute(
            "SELECT 1 FROM reminder WHERE occurrence = ? AND revision = ?", (occurrence, revision)
        ).fetchone()
        return row is not None

    def add_reminder(self, occurrence: int, revision: str, at: datetime) -> None:
        """A reminder for this state of an event was recorded."""
        self._connection.execute(
            "INSERT INTO reminder VALUES (?, ?, ?)", (occurrence, revision, format_sortable(at))
        )

    # --- first answers

    def first_answer(self, principal: str, request_id: str) -> FirstAnswer | None:
        """Return the first answer to a request with this id."""
        rows = self._connection.execute(
            "SELECT digest, status, body FROM answer WHERE principal = ? AND request_id = ?",
            (principal, request_id),
        )
        return next(parse_rows(_FIRST_ANSWER, rows), None)

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

    def prune_answers_of_refusals(self, now: datetime) -> None:
        """Delete the first answers of each principal's refusals, except the newest.

        See `MAX_REFUSALS` and `REFUSAL_RETENTION`.
        """
        before = format_sortable(now - REFUSAL_RETENTION)
        refusals = "FROM answer WHERE principal = :principal AND status >= 300"
        principals = self._connection.execute("SELECT DISTINCT principal FROM answer").fetchall()
        for (principal,) in principals:
            self._connection.execute(
                f"DELETE {refusals} AND at < :before AND at <= "
                f"(SELECT at {refusals} ORDER BY at DESC LIMIT 1 OFFSET :newest)",
                {"principal": principal, "newest": MAX_REFUSALS, "before": before},
            )

    def prune_answers(self, before: datetime) -> None:
        """Delete the first answers from before that moment."""
        self._connection.execute("DELETE FROM answer WHERE at < ?", (format_sortable(before),))


def _decision_from_event(position: int | None, event: CloudEvent) -> Decision:
    """Return the decision that an ``approval.recorded`` tells of; its occurrence is not in it."""
    data = event.data
    return Decision(
        approval_id=data["approvalId"],
        occurrence=0,
        decision=data["decision"],
        principal=data["principal"],
        channel=data["channel"],
        revision=data["revision"],
        reason=data["reason"],
        at=_parse_time_of_cloudevent(event),
        expires=parse_timestamp(data.get("expires")),
        dry_run="dryRun" in data,
        counts=True,
        recorded_event_id=event.id,
        message_id=None,
        position=position,
    )


def _is_approval_granted_event_of_grant(event: CloudEvent, grant: Grant) -> bool:
    """Whether an ``approval.granted`` is the one that a grant claims to come from."""
    data = event.data
    granted = (data["approvalId"], data["revision"], data["rule"], "dryRun" in data)
    return granted == (grant.approval_id, grant.revision, grant.rule, grant.dry_run)


def _parse_time_of_cloudevent(event: CloudEvent) -> datetime:
    at = parse_timestamp(event.attributes["time"])
    assert at is not None  # noqa: S101  # every event has a time
    return at
