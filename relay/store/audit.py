"""Verifies the journal, and follows every claim back to the grant and the votes it came from.

``imds-relay audit`` and each start of the relay verify the chain of hashes, which shows that no row
was changed. A claim is the row that the relay writes before it sends a StartRequest. `audit_claims`
shows that each claim has an open grant of the same rule and revision before it, and as many votes
in force as the rule asked for. It folds the rows as the relay does (`relay.store.approvals`). Which
rule asked for how many votes, and which principals are one person, is as the claim says it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from relay.errors import StoreError
from relay.store import JournalHead
from relay.store.approvals import NOTHING, EventApprovals, fold
from relay.store.journal import (
    APPROVAL_ROWS,
    VALUE_ERRORS,
    JournalRow,
    check_row,
    read_all_rows,
    read_pruning_checkpoint,
)


def verify_journal(
    connection: sqlite3.Connection, expected: JournalHead | None = None
) -> tuple[JournalHead, int]:
    """Verify the whole chain; return the head and the number of rows.

    ``expected`` is an earlier head, such as a ``journalhead`` that a consumer received. It reveals
    a journal whose end was cut off. Raises StoreError that names the first wrong position.
    """
    count = -1  # the checkpoint is no row
    try:
        # The savepoint gives one view of the file, even while a relay prunes it.
        connection.execute("SAVEPOINT verify")
        try:
            for head in _verified_heads(connection):
                count += 1
                if expected is not None and head.position == expected.position and head != expected:
                    raise StoreError(
                        f"journal: the row at position {head.position} is not the one that was "
                        "seen before"
                    )
        finally:
            connection.execute("RELEASE verify")  # fails, too, if the file is damaged
    except sqlite3.Error as error:
        raise StoreError(f"journal: it cannot be read: {error}") from error
    if expected is not None and expected.position > head.position:
        raise StoreError(
            f"journal: it ends at position {head.position}, {expected.position} was seen before: "
            "its tail was cut"
        )
    return head, count


def _verified_heads(connection: sqlite3.Connection) -> Iterator[JournalHead]:
    """Yield the head before the first row, and the head that each row became."""
    head = read_pruning_checkpoint(connection)
    yield head
    for (position,) in connection.execute("SELECT position FROM occurrence WHERE live"):
        if position <= head.position:  # the relay prunes no row of a live event
            raise StoreError(f"journal: the row of a live event at position {position} was removed")
    for row in read_all_rows(connection):
        if row.position != head.position + 1:
            raise StoreError(
                f"journal: expected position {head.position + 1}, found {row.position}: "
                "rows were removed or inserted"
            )
        check_row(head.hash, row)
        head = JournalHead(row.position, row.hash)
        yield head


# --- claims


@dataclass(frozen=True, slots=True)
class ClaimAuditResult:
    """``pruned``: claims whose grant or votes are older than the journal; ``problems``: texts."""

    claims: int
    pruned: int
    problems: tuple[str, ...]


_PRUNED = "follows from rows that are older than the kept journal"


def audit_claims(connection: sqlite3.Connection) -> ClaimAuditResult:
    """Follow every claim. Raises StoreError at a row that is not the relay's, or sqlite3.Error."""
    claims = pruned = 0
    problems: list[str] = []
    pruned_until = read_pruning_checkpoint(connection).position
    known: dict[str, EventApprovals] = {}
    rows = connection.execute(f"SELECT * FROM journal WHERE {APPROVAL_ROWS} ORDER BY position")  # noqa: S608  # our own text
    for row in map(JournalRow._make, rows):
        key = row.event_key or ""
        before = known.get(key, NOTHING)
        try:
            if row.kind == "claim":
                claims += 1
                problem = _problem_of_claim(before, orjson.loads(row.body), pruned_until)
                if problem == _PRUNED:
                    pruned += 1
                elif problem is not None:
                    problems.append(f"the claim at position {row.position} ({key}) {problem}")
            known[key] = fold(before, row)
        except VALUE_ERRORS as error:
            text = " ".join(str(error).split())  # some have several lines
            raise StoreError(
                f"journal: the row at position {row.position} cannot be read: {text}"
            ) from error
    return ClaimAuditResult(claims, pruned, tuple(problems))


def _problem_of_claim(
    before: EventApprovals, note: Mapping[str, Any], pruned_until: int
) -> str | None:
    """Return why a claim does not follow from what came before it; None if it does.

    `relay.approvals.recording` writes the ``eventId``, ``revision``, ``rule`` and ``approvalId``
    of the grant, the position of its ``approval.granted`` as ``granted``, the number of the
    StartRequest for it as ``attempt``, from 1, and where there was a choice who was to execute it
    as ``agent``. ``required`` is how many votes the rule asked for, ``votes`` how many persons had
    voted, and ``recorded`` the positions of their ``approval.recorded``; empty without a quorum.
    """
    grant = next((each for each in before.grants if each.id == note["granted"]), None)
    if grant is None:
        return _PRUNED if note["granted"] <= pruned_until else "follows from no approval.granted"
    claimed = (note["approvalId"], note["revision"], note["rule"], note["attempt"])
    if not grant.is_open:
        return f"follows from a grant that was over (position {grant.id})"
    if claimed != (grant.approval_id, grant.revision, grant.rule, grant.attempts + 1):
        return f"does not agree with the grant at position {grant.id}"
    votes = {
        each.position: each.principal
        for each in before.decisions
        if (each.decision, each.revision, each.dry_run) == ("approve", grant.revision, False)
    }
    for position in note["recorded"]:
        if position not in votes:
            if position <= pruned_until:
                return _PRUNED
            return f"counts a vote at position {position}, where there is none in force"
    voters = {votes[position] for position in note["recorded"]}
    if not note["required"] <= note["votes"] <= len(voters) and note["required"]:
        voted = min(len(voters), note["votes"])
        return f"follows from {voted} of {note['required']} recorded votes"
    return None
