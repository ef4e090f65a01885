"""Rows that somebody puts into the tables, changes or removes by hand: the journal decides."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from relay.approvals import ApprovalsSettings
from relay.store import StoreSettings
from relay.store.claim_audit import ClaimAuditResult, audit_start_request_claims
from relay.store.file import open_for_reading
from relay.store.retention import prune_all_tables
from relay.store.rows import PageLimit
from tests.approvals.builders import REBOOT, REDEPLOY, USER_REBOOT, ApprovalFile, build_event
from tests.approvals.manual_clock import NOON

INSERT_VOTE = """
INSERT INTO decision (approval_id, occurrence, decision, principal, channel, revision, at, dry_run,
                      counts, told, position)
SELECT 'forged', id, 'approve', 'client:bob', 'http', revision, '2026-04-11T12:00:00Z', 0, 1, 'x',
       {position}
FROM occurrence
"""
INSERT_GRANT = """
INSERT INTO start_request (occurrence, revision, rule, approval_id, granted_at, state, dry_run,
                           cause, position)
SELECT id, revision, 'one', 'forged', '2026-04-11T12:00:00Z', '{state}', 0, 'x', {position}
FROM occurrence
"""


def by_hand(approvals: ApprovalFile, *statements: str) -> None:
    """Write as another program does that knows the tables."""
    with contextlib.closing(sqlite3.connect(approvals.path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def problems(approvals: ApprovalFile) -> tuple[str, ...]:
    """What ``audit verify`` names."""
    with contextlib.closing(open_for_reading(approvals.path)) as connection:
        return audit_start_request_claims(connection).problems


@pytest.mark.parametrize("position", ["NULL", "1", "2", "99"])
def test_a_vote_that_is_put_into_the_table_counts_nowhere(
    approvals: ApprovalFile, position: str
) -> None:
    """Not beside a recorded vote either, and not by the position of that vote."""
    approvals.record_document(REBOOT)
    approvals.submit()
    by_hand(approvals, INSERT_VOTE.format(position=position))
    approvals.apply_transitions()
    assert approvals.status().vote_count == 1
    assert approvals.submit(by="eve").status == 403
    assert approvals.events("approval.refused")[0].data["votes"] == 1
    assert (approvals.grants, approvals.claim()) == ([], [])
    (problem,) = problems(approvals)
    assert problem == "the vote forged of client:bob (e-1) is not in the journal"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE decision SET principal = 'client:bob'",
        "UPDATE decision SET revision = (SELECT revision FROM occurrence WHERE live), counts = 1",
        "UPDATE decision SET expires = NULL, at = '2030-01-01T00:00:00Z', counts = 1",
        "UPDATE decision SET dry_run = 0, counts = 1",
    ],
)
def test_a_changed_vote_counts_as_it_was_recorded(approvals: ApprovalFile, change: str) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    before = approvals.status().decisions
    by_hand(approvals, change)
    assert approvals.status().decisions == before


def test_a_vote_for_one_event_counts_for_no_other(approvals: ApprovalFile) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit("approve", "alice", REDEPLOY)
    (vote,) = approvals.status().decisions
    assert vote.counts
    by_hand(approvals, "UPDATE occurrence SET key = 'e-2'")
    page, _ = approvals.transact(lambda tx: tx.occurrences.occurrence_page(None, PageLimit(10)))
    assert approvals.status("e-2").decisions == ()
    assert [occurrence.key for occurrence in page] == ["e-2"]


def test_a_removed_hold_on_one_event_stops_the_claim_of_no_other(approvals: ApprovalFile) -> None:
    other = build_event("E-2", event_source="User")
    approvals.record_document(USER_REBOOT, other)
    approvals.submit("hold", "eve", USER_REBOOT)
    by_hand(approvals, "DELETE FROM decision")
    assert [claim.event_id for claim in approvals.claim()] == ["E-2"]


@pytest.mark.parametrize("state", ["granted", "sent"])
@pytest.mark.parametrize("position", ["NULL", "1", "99"])
def test_a_grant_that_is_put_into_the_table_is_not_claimed(
    approvals: ApprovalFile, state: str, position: str
) -> None:
    approvals.record_document(REDEPLOY)
    by_hand(approvals, INSERT_GRANT.format(state=state, position=position))
    assert approvals.claim() == []
    approvals.apply_transitions()
    assert approvals.event_names() == []
    (problem,) = problems(approvals)
    assert problem == "the grant of approval forged (e-1) is not in the journal"


def test_a_grant_of_a_dry_run_is_not_claimed_when_somebody_makes_it_real(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(REDEPLOY)
    approvals.set_mode("dry-run")
    approvals.submit(of=REDEPLOY)
    by_hand(approvals, "UPDATE start_request SET dry_run = 0", "UPDATE decision SET dry_run = 0")
    approvals.set_mode("on")
    assert approvals.claim() == []


HOLD_REMOVALS = [
    "DELETE FROM decision WHERE decision = 'hold'",
    "UPDATE decision SET counts = 0 WHERE decision = 'hold'",
    "UPDATE decision SET expires = '2020-01-01T00:00:00Z' WHERE decision = 'hold'",
    "UPDATE decision SET decision = 'approve' WHERE decision = 'hold'",
    "UPDATE decision SET approval_id = 'other' WHERE decision = 'hold'",
    "UPDATE decision SET expires = '2020-01-01T00:00:00Z', position = NULL",
]


@pytest.mark.parametrize("removal", HOLD_REMOVALS)
@pytest.mark.parametrize("granted", [True, False], ids=["after the grant", "before the grant"])
def test_a_hold_that_is_removed_by_hand_still_holds(
    approvals: ApprovalFile, removal: str, granted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if not granted:
        approvals.set_mode("off")
    approvals.record_document(USER_REBOOT)
    if not granted:
        approvals.connection.execute("UPDATE meta SET value = 'on' WHERE key = 'mode'")
    approvals.submit("hold", "eve", USER_REBOOT)
    by_hand(approvals, removal)
    for _ in range(2):
        approvals.apply_transitions()
        assert approvals.claim() == []
        approvals.crash()
    assert [hold.principal for hold in approvals.status().active_holds][:1] == ["client:eve"]
    assert len(approvals.events("approval.recorded")) == 1
    approvals.submit("release", "eve", USER_REBOOT)
    if not approvals.claim():  # the row had another id, so the hold that it was is back
        approvals.submit("release", "eve", USER_REBOOT)
        (claimed,) = approvals.claim()
        assert claimed.event_id == "E-1"
    is_restored = "WHERE decision" in removal and "SET expires" not in removal
    has_logged = any(record.levelno == logging.ERROR for record in caplog.records)
    assert has_logged == (is_restored and "SET decision" not in removal)


def test_audit_names_a_hold_that_was_removed(approvals: ApprovalFile) -> None:
    approvals.record_document(USER_REBOOT)
    approvals.submit("hold", "eve", USER_REBOOT)
    assert problems(approvals) == ()
    by_hand(approvals, "DELETE FROM decision")
    (problem,) = problems(approvals)
    assert "of client:eve (e-1) is in the journal and not in its table" in problem


def void_by_change(approvals: ApprovalFile) -> None:
    """The event changes and changes back."""
    approvals.record_document(USER_REBOOT)
    approvals.record_document(REDEPLOY)


def void_by_end(approvals: ApprovalFile) -> None:
    """The event ends, and its EventId comes back in the same state."""
    approvals.record_document()
    approvals.record_document(REDEPLOY)


def use_up(approvals: ApprovalFile) -> None:
    """Azure accepts the StartRequest, the event ends, and its EventId comes back."""
    approvals.accept(approvals.claim())
    void_by_end(approvals)


@pytest.mark.parametrize("end", [void_by_change, void_by_end, use_up])
def test_a_vote_that_has_ended_does_not_count_again_by_hand(
    approvals: ApprovalFile, end: Callable[[ApprovalFile], None]
) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    end(approvals)
    count = len(approvals.events("approval.granted"))
    by_hand(
        approvals,
        "UPDATE decision SET counts = 1, occurrence = (SELECT max(id) FROM occurrence)",
    )
    approvals.apply_transitions()
    assert approvals.claim() == []
    granted = approvals.events("approval.granted")
    assert len(granted) == count or granted[-1].data["principal"].startswith("rule:")


def test_a_grant_that_is_forgotten_by_hand_does_not_use_its_votes_twice(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    approvals.accept(approvals.claim())
    by_hand(approvals, "DELETE FROM start_request")
    approvals.apply_transitions()
    assert approvals.claim() == []
    assert len(approvals.events("approval.granted")) == 1


def test_a_row_of_the_journal_without_the_right_hash_grants_nothing(
    tmp_path: Path,
) -> None:
    approvals = ApprovalFile(tmp_path / "relay.db")
    approvals.record_document(REDEPLOY)
    approvals.submit(by="bob", of=REDEPLOY, decision="hold")
    body = (
        "replace(replace(CAST(body AS TEXT), 'client:bob', 'client:alice'), '\"hold\"',"
        " '\"approve\"')"
    )
    by_hand(
        approvals,
        "INSERT INTO journal SELECT position + 1, at, kind, event_key, transition, "  # noqa: S608  # our own text
        f"CAST({body} AS BLOB), hash FROM journal WHERE kind = 'approval.recorded'",
        "UPDATE decision SET decision = 'approve', position = position + 1",
    )
    approvals.apply_transitions()
    assert approvals.status().vote_count == 0
    assert approvals.claim() == []
    approvals.close()


# --- what must keep working


def test_an_acceptance_takes_no_vote_on_a_state_that_came_while_it_was_sent(
    approvals: ApprovalFile, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer of IMDS shows the new state, but it ends the votes on the claimed state."""
    approvals.record_document(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    claims = approvals.claim()
    approvals.set_in_flight(*claims)
    changed = build_event(event_type="Redeploy", due=1800.0)
    approvals.record_document(changed)
    approvals.submit(by="bob", of=changed)
    approvals.accept(claims)
    approvals.set_in_flight()
    approvals.apply_transitions()
    assert [vote.principal for vote in approvals.status().counted_votes] == ["client:bob"]
    assert [claim.grant.revision for claim in approvals.claim()] == [changed.revision]
    assert problems(approvals) == ()
    assert "changed by another program" not in caplog.text


@pytest.fixture
def voted(approvals: ApprovalFile) -> ApprovalFile:
    """One of two votes, and a hold."""
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.submit("hold", "eve")
    return approvals


def test_votes_holds_and_grants_outlive_the_pruning_of_the_journal(voted: ApprovalFile) -> None:
    retention = StoreSettings(retain=0.0, audit_retain=0.0)
    soon = NOON + timedelta(seconds=60)
    for _ in range(2):
        voted.transact(lambda tx: prune_all_tables(tx, retention, soon))
    assert voted.status().vote_count == 1
    voted.submit("release", "eve")
    voted.submit(by="bob")
    voted.transact(lambda tx: prune_all_tables(tx, retention, soon))
    (claimed,) = voted.claim()
    voted.accept([claimed])
    assert problems(voted) == ()
    voted.record_document()
    voted.transact(lambda tx: prune_all_tables(tx, retention, soon))
    assert problems(voted) == ()


def downgrade(approvals: ApprovalFile) -> None:
    """Make the file one of the version before, whose events had no ``expires`` and ``ended``."""
    approvals.close()
    by_hand(
        approvals,
        "ALTER TABLE decision RENAME TO newer",
        "CREATE TABLE decision (id INTEGER PRIMARY KEY AUTOINCREMENT, approval_id TEXT NOT NULL "
        "UNIQUE, occurrence INTEGER NOT NULL REFERENCES occurrence (id), decision TEXT NOT NULL, "
        "principal TEXT NOT NULL, channel TEXT NOT NULL, revision TEXT NOT NULL, reason TEXT, "
        "at TEXT NOT NULL, expires TEXT, dry_run INTEGER NOT NULL, counts INTEGER NOT NULL, "
        "told TEXT NOT NULL, message_id TEXT)",
        "INSERT INTO decision SELECT id, approval_id, occurrence, decision, principal, channel, "
        "revision, reason, at, expires, dry_run, counts, told, message_id FROM newer",
        "DROP TABLE newer",
        "CREATE INDEX decision_of_occurrence ON decision (occurrence)",
        "CREATE INDEX decision_that_counts ON decision (occurrence) WHERE counts",
        "ALTER TABLE start_request RENAME TO newer",
        "CREATE TABLE start_request (id INTEGER PRIMARY KEY AUTOINCREMENT, occurrence INTEGER NOT "
        "NULL REFERENCES occurrence (id), revision TEXT NOT NULL, rule TEXT NOT NULL, approval_id "
        "TEXT NOT NULL, granted_at TEXT NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL "
        "DEFAULT 0, status INTEGER, dry_run INTEGER NOT NULL, cause TEXT NOT NULL)",
        "INSERT INTO start_request SELECT id, occurrence, revision, rule, approval_id, granted_at, "
        "state, attempts, status, dry_run, cause FROM newer",
        "DROP TABLE newer",
        "CREATE INDEX start_request_of_occurrence ON start_request (occurrence)",
        "CREATE INDEX start_request_open ON start_request (state) "
        "WHERE state IN ('granted', 'sent')",
        "DROP TABLE invitation",
        "CREATE TABLE invitation (token TEXT PRIMARY KEY, message INTEGER NOT NULL, occurrence "
        "INTEGER NOT NULL, revision TEXT NOT NULL, decision TEXT NOT NULL, wrong INTEGER NOT NULL "
        "DEFAULT 0, at TEXT NOT NULL) WITHOUT ROWID",
        "CREATE INDEX invitation_message ON invitation (message)",
        "CREATE INDEX invitation_occurrence ON invitation (occurrence)",
        "DROP TABLE agent",
        "DROP TABLE sighting",
        "DROP INDEX occurrence_of_scope",
        "DROP INDEX occurrence_ended",
        "ALTER TABLE occurrence DROP COLUMN scope",
        "DROP TABLE standing_hold",
        "DROP TABLE reminder",
        "DROP INDEX journal_of_standing_holds",
        "PRAGMA user_version = 2",
    )


def test_votes_and_holds_of_the_last_version_count_on(voted: ApprovalFile) -> None:
    downgrade(voted)
    voted.crash()
    assert voted.status().vote_count == 1
    assert [hold.principal for hold in voted.status().active_holds] == ["client:eve"]
    voted.submit("release", "eve")
    voted.submit(by="bob")
    (claimed,) = voted.claim()
    voted.accept([claimed])
    assert problems(voted) == ()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(
            "UPDATE journal SET body = CAST(replace(CAST(body AS TEXT), 'approve', 'hold') AS BLOB)"
            " WHERE kind = 'approval.recorded' AND position = (SELECT min(position) FROM journal "
            "WHERE kind = 'approval.recorded')",
            "follows from 1 of 2 recorded votes",
            id="a vote",
        ),
        pytest.param(
            "UPDATE journal SET body = CAST(replace(CAST(body AS TEXT), 'approve', 'hold') AS BLOB)"
            " WHERE kind = 'approval.recorded'",
            "follows from 0 of 2 recorded votes",
            id="all votes",
        ),
        pytest.param(
            "UPDATE journal SET kind = 'approval.voided' WHERE kind = 'approval.granted'",
            "follows from no approval.granted",
            id="the grant",
        ),
    ],
)
def test_the_audit_names_an_older_claim_without_a_root_if_only_other_events_were_pruned(
    approvals: ApprovalFile, change: str, problem: str
) -> None:
    approvals.record_document(build_event("E-0", due=None))
    approvals.clock.advance(10)
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.submit(by="bob")
    approvals.accept(approvals.claim())
    approvals.record_document()  # the event ended: its votes are not kept
    before = NOON + timedelta(seconds=5)
    assert approvals.transact(lambda tx: tx.journal.prune(before, approvals.clock.now())) == 1
    found = audit_older_claims(approvals, change)
    assert (found.claims, found.pruned) == (1, 0)
    (named,) = found.problems
    assert named.endswith(problem)


def audit_older_claims(approvals: ApprovalFile, *changes: str) -> ClaimAuditResult:
    """Audit the file as if an older version had recorded its claims, after further changes.

    Such a claim does not say where its grant and its votes are.
    """
    older = "json_remove(CAST(body AS TEXT), '$.granted', '$.required', '$.recorded')"
    approvals.connection.execute("BEGIN")
    approvals.connection.execute("DROP TRIGGER journal_is_append_only")
    approvals.connection.execute(
        f"UPDATE journal SET body = CAST({older} AS BLOB) WHERE kind = 'claim'"  # noqa: S608  # our own text
    )
    for change in changes:
        approvals.connection.execute(change)
    found = audit_start_request_claims(approvals.connection)
    approvals.connection.execute("ROLLBACK")
    return found


def test_a_claim_follows_from_the_votes_that_the_rules_asked_for_then(
    approvals: ApprovalFile,
) -> None:
    """The rules asked for more votes when the approval was granted."""
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.submit(by="bob")
    fields = approvals.settings.model_dump(mode="json", by_alias=True)
    (rule,) = (rule for rule in fields["rules"] if rule["name"] == "databases")
    rule["approve"] |= {"votes": 1, "from": ["client:alice"]}
    approvals.crash(ApprovalsSettings.model_validate(fields))
    assert len(approvals.claim()) == 1
    assert problems(approvals) == ()
