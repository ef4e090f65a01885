"""Follows every claim in the journal back to the grant and the votes that it came from.

A claim is the row that the relay writes before it sends a StartRequest. ``imds-relay audit`` calls
`audit_claims` after it has verified the chain. The chain shows that no row was changed. This shows
that each claim has an open grant of the same rule and revision before it, and as many votes in
force as the rule asked for. It folds the rows as the relay does (`relay.store.approvals`). Which
rule asked for how many votes, and which principals are one person, is as the claim says it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from relay.errors import StoreError
from relay.store.approvals import NOTHING, EventApprovals, fold
from relay.store.chain import JournalRow, read_pruning_checkpoint
from relay.store.journal import APPROVAL_ROWS, VALUE_ERRORS


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
