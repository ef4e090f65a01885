"""Follows every claim in the journal back to the grant and the votes that it came from.

A claim is the row that the relay writes before it sends a StartRequest. ``imds-relay audit`` calls
`audit_start_request_claims` after it has verified the chain. The chain shows that no row was
changed. This shows that each claim has its ``approval.granted`` before it, and as many principals
whose votes are in the journal as the claim says were needed, and that the tables hold no vote or
grant that the journal does not. Which rule asked for how many votes, and whose counted, is not
computed again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from relay.errors import StoreError
from relay.events.cloudevent import CloudEvent
from relay.store.damage_check import VALUE_ERRORS
from relay.store.decisions import Decisions
from relay.store.journal import Journal, read_pruning_checkpoint
from relay.store.standing_holds import StandingHolds, standing_holds_only_in_first

_STANDING_HOLDS_SINCE = 5
"""The version of the state file from which there are standing holds."""
_POSITIONS_SINCE = 3
"""The version of the state file from which its tables say where the journal holds their rows."""


@dataclass(frozen=True, slots=True)
class ClaimAuditResult:
    """What was found.

    ``pruned`` counts the claims whose grant or votes are older than the kept journal. Each of
    ``problems`` is a sentence about something without a root.
    """

    claims: int
    pruned: int
    problems: tuple[str, ...]


class _PrunedError(Exception):
    """The row is older than the kept journal."""


class _UnjustifiedClaimError(Exception):
    """The text continues "the claim at position 7"."""


def audit_start_request_claims(connection: sqlite3.Connection) -> ClaimAuditResult:
    """Follow every claim, and every vote, hold and open grant of the tables.

    Raises StoreError if the tables hold what the relay did not write, and sqlite3.Error.
    """
    claims = pruned = 0
    problems: list[str] = []
    rows = connection.execute(
        "SELECT position, event_key, body FROM journal WHERE kind = 'claim' ORDER BY position"
    )
    for position, event_key, body in rows:
        claims += 1
        try:
            _StartRequestClaim(
                connection, position, event_key, orjson.loads(body)
            ).require_grant_and_votes()
        except _PrunedError:
            pruned += 1
        except _UnjustifiedClaimError as problem:
            problems.append(f"the claim at position {position} ({event_key}) {problem}")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    try:
        if version >= _POSITIONS_SINCE:
            problems += _table_journal_differences(connection)
        if version >= _STANDING_HOLDS_SINCE:
            problems += _standing_hold_table_differences(connection)
    except VALUE_ERRORS as error:
        text = " ".join(str(error).split())  # that of pydantic has several lines
        raise StoreError(f"tables: a value cannot be read: {text}") from error
    return ClaimAuditResult(claims, pruned, tuple(problems))


class _StartRequestClaim:
    """One claim of the journal, which a grant and votes before it must explain.

    ``note`` is the body of the claim. `ApprovalEngine.claim_grants` writes these keys:

    - ``eventId``: the EventId as Azure wrote it.
    - ``revision``: the revision of the event that was approved.
    - ``rule``: the name of the rule that granted.
    - ``approvalId``: the id of the approval, as in ``approval.granted``.
    - ``grant``: the id of the grant in its table.
    - ``attempt``: the number of the StartRequest for this grant, from 1.
    - ``granted``: the position of the ``approval.granted``.
    - ``required``: how many votes the rules asked for at the claim.
    - ``recorded``: the positions of the ``approval.recorded`` of the votes; empty without a quorum.
    - ``agent``: who was to execute the StartRequest. Only where there was a choice.

    An older version did not write ``granted``, ``required`` and ``recorded``.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        position: int,
        event_key: str,
        note: Mapping[str, Any],
    ) -> None:
        self._connection = connection
        self._journal = Journal(connection)
        self._checkpoint = read_pruning_checkpoint(connection).position
        self._position, self._event_key, self._note = position, event_key, note

    def require_grant_and_votes(self) -> None:
        """Return if the claim follows from its grant and votes.

        Raises _UnjustifiedClaimError, _PrunedError.
        """
        position = self._note.get("granted") or self._find_grant_position()
        granted = self._read_verified_earlier_event(position, "approval.granted")
        if granted is None:
            raise _UnjustifiedClaimError("follows from no approval.granted")
        facts = ("approvalId", "revision", "rule")
        if "dryRun" in granted.data or any(granted.data[key] != self._note[key] for key in facts):
            raise _UnjustifiedClaimError(f"does not agree with the grant at position {position}")
        # The rules can have changed since the grant. An older version did not say what they asked.
        required = self._note.get("required", granted.data["required"])
        recorded = self._note.get("recorded")
        if not required:
            return
        if recorded is not None:
            voters = {self._require_verified_voter(position) for position in recorded}
        else:
            voters = self._find_voters_in_journal()
            if len(voters) < required and not self._is_event_history_unpruned():
                raise _PrunedError
        if len(voters) < required:
            raise _UnjustifiedClaimError(f"follows from {len(voters)} of {required} recorded votes")

    def _find_grant_position(self) -> int | None:
        """An older version did not say where its grant is."""
        row = self._connection.execute(
            "SELECT max(position) FROM journal WHERE event_key = ? AND position < ? AND "
            "kind = 'approval.granted' "
            "AND json_extract(CAST(body AS TEXT), '$.data.approvalId') = ? "
            "AND json_extract(CAST(body AS TEXT), '$.data.dryRun') IS NULL",
            (self._event_key, self._position, self._note["approvalId"]),
        ).fetchone()
        if row[0] is None and not self._is_event_history_unpruned():
            raise _PrunedError
        return row[0]  # type: ignore[no-any-return]  # a position or None

    def _is_event_history_unpruned(self) -> bool:
        """Whether the journal still holds all rows about the event that came before the claim.

        Rows are pruned from the oldest on. So that is true if the ``event.scheduled`` is there,
        which comes before the votes and the grant.
        """
        if not self._checkpoint:
            return True
        row = self._connection.execute(
            "SELECT 1 FROM journal WHERE event_key = ? AND position < ? "
            "AND kind = 'event.scheduled' LIMIT 1",
            (self._event_key, self._position),
        ).fetchone()
        return row is not None

    def _find_voters_in_journal(self) -> set[str]:
        """An older version did not say where its votes are."""
        rows = self._connection.execute(
            "SELECT body FROM journal WHERE event_key = ? AND position < ? "
            "AND kind = 'approval.recorded'",
            (self._event_key, self._position),
        )
        votes = [
            event for (body,) in rows if self._is_vote_for_claim(event := CloudEvent.parse(body))
        ]
        return {vote.data["principal"] for vote in votes}

    def _require_verified_voter(self, position: int) -> str:
        event = self._read_verified_earlier_event(position, "approval.recorded")
        if event is None or not self._is_vote_for_claim(event):
            raise _UnjustifiedClaimError(
                f"counts a vote at position {position}, where there is none"
            )
        return str(event.data["principal"])

    def _is_vote_for_claim(self, event: CloudEvent) -> bool:
        data = event.data
        vote = (data["decision"], data["revision"], "dryRun" in data)
        return vote == ("approve", self._note["revision"], False)

    def _read_verified_earlier_event(self, position: int | None, kind: str) -> CloudEvent | None:
        if position is None or position >= self._position:
            return None
        if position <= self._checkpoint:
            raise _PrunedError
        return self._journal.verified_event_at_position(position, kind, self._event_key)


def _table_journal_differences(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield a sentence for each row of the tables that differs from the journal."""
    decisions = Decisions(connection, Journal(connection))
    occurrences = connection.execute("SELECT id, key, live FROM occurrence ORDER BY id").fetchall()
    for occurrence, key, is_live in occurrences:
        # This reads the table, and leaves out each vote that the journal does not hold.
        held = decisions.for_occurrence(occurrence, counting=True)
        # This reads the table, with the holds of earlier occurrences. A hold is never left out.
        held += decisions.holds_of_earlier_occurrences(key, occurrence)
        rooted = {decision.approval_id for decision in held}
        rows = connection.execute(
            "SELECT approval_id, principal FROM decision WHERE counts AND occurrence = ?",
            (occurrence,),
        )
        for approval_id, principal in rows:
            if approval_id not in rooted:
                yield f"the vote {approval_id} of {principal} ({key}) is not in the journal"
        # This reads the table, and leaves out each open grant that the journal does not hold.
        rooted_grants = {grant.id for grant in decisions.grants(occurrence)}
        grants = connection.execute(
            "SELECT id, approval_id FROM start_request WHERE occurrence = ?", (occurrence,)
        )
        for grant, approval_id in grants:
            if grant not in rooted_grants:
                yield f"the grant of approval {approval_id} ({key}) is not in the journal"
        # This reads the journal alone.
        for decision in decisions.decisions_in_force_from_journal(key).values() if is_live else ():
            if decision.decision == "hold" and decision.approval_id not in rooted:
                yield (
                    f"the hold {decision.approval_id} of {decision.principal} ({key}) is in the "
                    "journal and not in its table"
                )


def _standing_hold_table_differences(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield a sentence for each standing hold that the table has otherwise than the journal."""
    holds = StandingHolds(connection, Journal(connection))
    in_table, in_journal = (
        holds.list_open(),
        holds.list_open_in_journal(datetime.min.replace(tzinfo=UTC)),
    )
    for hold in standing_holds_only_in_first(in_table, in_journal):
        yield f"the standing hold {hold.hold_id} of {hold.principal} is not so in the journal"
    for hold in standing_holds_only_in_first(in_journal, in_table):
        yield (
            f"the standing hold {hold.hold_id} of {hold.principal} is in the journal and not so in "
            "its table"
        )
