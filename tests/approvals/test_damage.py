"""Rows of the journal that were changed, removed or cannot be read, and what the audit says."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path

import orjson
import pytest

from relay.approvals import ApprovalsSettings
from relay.store import StoreSettings
from relay.store.audit import audit_claims
from relay.store.file import open_for_reading
from relay.store.transaction import Transaction
from tests.approvals.builders import (
    REBOOT,
    REDEPLOY,
    SETTINGS,
    USER_REBOOT,
    ApprovalFile,
    build_creation,
    build_event,
    build_request,
    write_damaged_row,
)
from tests.approvals.running_gate import running_gate
from tests.clocks import NOON

OTHER = build_event("E-2", event_type="Freeze")
ROWS = (
    ("{vote}", "kind = 'approval.recorded' AND event_key = 'e-1'"),
    ("{granted}", "kind = 'approval.granted'"),
    ("{held}", "kind = 'standing-hold.created'"),
)


@pytest.fixture
def approvals(tmp_path: Path) -> Iterator[ApprovalFile]:
    """A file whose journal is not verified in the end."""
    file = ApprovalFile(tmp_path / "relay.db")
    yield file
    file.close()


def by_hand_running(approvals: ApprovalFile, *statements: str) -> None:
    """Write as another program does that knows the tables, while the relay runs."""
    approvals.connection.execute("DROP TRIGGER IF EXISTS journal_is_append_only")
    approvals.connection.execute("DROP TRIGGER IF EXISTS journal_is_pruned_behind_a_checkpoint")
    for statement in statements:
        approvals.connection.execute(reduce(lambda text, row: text.replace(*row), ROWS, statement))


def by_hand(approvals: ApprovalFile, *statements: str) -> None:
    by_hand_running(approvals, *statements)
    approvals.crash()


def prune(approvals: ApprovalFile, *, audit_retain: float = 400 * 86400.0) -> None:
    approvals.prune(retain=StoreSettings().retain, audit_retain=audit_retain)


def in_order(approvals: ApprovalFile, order: str, change: str) -> None:
    """Prune and change the file, in this order."""
    for step in order.split(", "):
        if step == "prune":
            prune(approvals)
        else:
            by_hand_running(approvals, change)


def problems(approvals: ApprovalFile) -> tuple[str, ...]:
    """What ``audit verify`` names."""
    with contextlib.closing(open_for_reading(approvals.path)) as connection:
        return audit_claims(connection).problems


@pytest.mark.parametrize(
    "change",
    [
        (
            "UPDATE journal SET body = CAST(replace(CAST(body AS TEXT), 'client:bob', 'client:eve')"
            " AS BLOB) WHERE {vote}"
        ),
        "UPDATE journal SET body = 'x' WHERE {vote}",
        "UPDATE journal SET hash = 'x' WHERE {vote}",
        "DELETE FROM journal WHERE {vote}",
        "DELETE FROM journal WHERE {granted}",
        "UPDATE journal SET kind = 'approval.voided' WHERE {granted}",
        # Rows that became such as are not read: only the chain shows that they are missing.
        "UPDATE journal SET event_key = 'e-9' WHERE {vote}",
        "UPDATE journal SET kind = 'event.updated' WHERE {vote}",
        "DELETE FROM journal WHERE event_key = 'e-1'",
        "UPDATE journal SET kind = 'mode' WHERE {held}",
        "UPDATE journal SET body = replace(body, 'db-', 'x-') WHERE {held}",
        "DELETE FROM journal WHERE {held}",
    ],
)
def test_approvals_are_off_after_rows_changed_while_the_relay_was_stopped(
    approvals: ApprovalFile, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They were a vote of a quorum, the hold of an event, and a standing hold."""
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.submit(by="bob")
    assert approvals.status().active_grant is not None
    approvals.submit("hold", by="eve")
    approvals.hold_ahead(match={"resources": ["db-*"]})
    approvals.record_document(REBOOT, OTHER)
    by_hand(approvals, change)
    for _ in range(2):
        approvals.record_document(REBOOT, OTHER, build_event("E-3", event_source="User"))
        assert approvals.claim() == []
    answer = approvals.submit()
    assert (answer.status, "audit verify" in answer.body["detail"]) == (503, True)
    assert caplog.text.count("approvals are off: journal: ") == 1
    assert approvals.transact(approvals.engine.effective_approval_mode) == "off"
    approvals.clock.advance(86400)
    prune(approvals, audit_retain=0.0)
    approvals.crash()
    assert approvals.submit().status == 503, "what was damaged is not pruned"


def test_a_row_that_cannot_be_read_turns_approvals_of_an_event_off(approvals: ApprovalFile) -> None:
    approvals.record_document(REDEPLOY)
    approvals.transact(lambda tx: write_damaged_row(tx, "approval.recorded", "e-1"))
    assert approvals.submit(of=REDEPLOY).status == 503
    assert approvals.claim() == []


def test_damage_that_was_seen_outlives_the_pruning_of_the_journal(approvals: ApprovalFile) -> None:
    """What the row says by now is in the chain, and only the hold is missing."""
    approvals.record_document(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    approvals.submit("hold", "eve", REDEPLOY)
    approvals.record_document(REDEPLOY, OTHER)
    by_hand_running(
        approvals,
        "UPDATE journal SET kind = 'approval.refused' WHERE CAST(body AS TEXT) LIKE '%client:eve%'",
    )
    assert approvals.claim() == []
    prune(approvals)
    approvals.apply_transitions()
    assert approvals.claim() == []
    approvals.record_document()
    approvals.clock.advance(60)
    approvals.connection.execute("UPDATE entry SET state = 'delivered'")
    prune(approvals, audit_retain=0.0)
    assert approvals.connection.execute("SELECT count(*) FROM journal").fetchone() == (0,)
    approvals.record_document(REDEPLOY)
    assert approvals.submit(of=REDEPLOY).status == 503, "until the next start"


def test_a_hold_whose_rows_are_removed_while_the_relay_runs_holds_the_event_that_comes_back(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(USER_REBOOT)
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.record_document(OTHER)
    approvals.record_document()
    by_hand_running(approvals, "DELETE FROM journal WHERE event_key = 'e-1'")
    approvals.record_document(USER_REBOOT)
    assert [grant.state for grant in approvals.grants] == ["failed"]
    assert approvals.claim() == []


def test_a_hold_that_is_cut_off_the_end_of_the_journal_holds(approvals: ApprovalFile) -> None:
    """The relay remembers what it committed: the rows that are left are a chain without it."""
    approvals.hold_ahead(match={"resources": ["nobody"]})
    approvals.record_document(USER_REBOOT)
    approvals.submit("hold", "eve", USER_REBOOT)
    by_hand_running(
        approvals,
        "DELETE FROM journal WHERE position >= "
        "(SELECT max(position) FROM journal WHERE kind = 'approval.recorded')",
    )
    assert approvals.claim() == []


@pytest.mark.parametrize(
    "change",
    [
        *("UPDATE journal SET kind = 'approval.refused'", "UPDATE journal SET event_key = 'e-2'"),
        *("UPDATE journal SET kind = 'relay.pinged'", "UPDATE journal SET body = '{}'"),
        "DELETE FROM journal",
    ],
)
@pytest.mark.parametrize("order", ["change", "prune, change", "change, prune"])
@pytest.mark.parametrize("voted", [False, True])
def test_a_hold_that_changes_while_the_relay_runs_is_missed(
    approvals: ApprovalFile,
    change: str,
    order: str,
    caplog: pytest.LogCaptureFixture,
    *,
    voted: bool,
) -> None:
    """Also if it changes so that nobody looks for it."""
    event = REDEPLOY if voted else USER_REBOOT
    approvals.record_document(event, step=False)
    if voted:
        approvals.submit(of=event)
    approvals.submit("hold", "eve", event)
    approvals.record_document(event, OTHER)
    assert approvals.status().is_held
    where = "kind = 'approval.recorded' AND CAST(body AS TEXT) LIKE '%client:eve%'"
    in_order(approvals, order, f"{change} WHERE {where}")
    approvals.apply_transitions()
    assert approvals.claim() == []
    assert not voted or "approvals of event e-1 are off: journal: " in caplog.text


@pytest.mark.parametrize("is_standing", [False, True])
async def test_a_hold_is_missed_also_if_other_work_failed_in_the_commit_that_recorded_it(
    tmp_path: Path, *, is_standing: bool
) -> None:
    queued, hold = threading.Event(), build_request("hold", "eve", REDEPLOY)
    asked = build_creation(at=NOON) if is_standing else hold
    async with running_gate(tmp_path, REDEPLOY) as harness:
        store, engine = harness.store, harness.gate.engine
        waiting = store.submit(lambda _: queued.wait())
        held = store.submit(lambda tx: engine.decide(tx, asked))
        failed = store.submit(lambda tx: tx.occurrences.require_occurrence(99))
        queued.set()
        assert (await waiting, (await held).accepted) == (True, True)
        with pytest.raises(KeyError):
            await failed
        with contextlib.closing(sqlite3.connect(harness.path)) as other:
            other.execute("DROP TRIGGER journal_is_append_only")
            other.execute(
                "UPDATE journal SET kind = 'approval.refused' "
                "WHERE kind IN ('approval.recorded', 'standing-hold.created')"
            )
            other.commit()
        await harness.record_document(REDEPLOY, OTHER)
        assert (await harness.submit(of=REDEPLOY)).body["state"] == "held"
        await harness.settle()
        assert harness.azure.sent == []


@pytest.mark.parametrize(
    "change", ["UPDATE journal SET kind = 'relay.pinged'", "DELETE FROM journal"]
)
@pytest.mark.parametrize("order", ["change", "prune, change", "change, prune"])
@pytest.mark.parametrize("is_only", [False, True])
def test_a_standing_hold_that_changes_while_the_relay_runs_goes_on(
    approvals: ApprovalFile, change: str, order: str, *, is_only: bool
) -> None:
    """It goes on until the change is found, which turns approvals off."""
    approvals.hold_ahead(match={"event_type": ["Reboot"]})
    if not is_only:
        approvals.hold_ahead(match={"event_type": ["Freeze"]})
    approvals.record_document(OTHER)
    approvals.record_document()
    in_order(approvals, order, f"{change} WHERE position = 1")
    approvals.record_document(USER_REBOOT)
    assert (approvals.grants, approvals.claim()) == ([], [])
    prune(approvals)
    assert approvals.transact(approvals.engine.effective_approval_mode) == "off"


def test_a_damaged_standing_hold_turns_approvals_off_while_the_relay_runs_and_is_not_pruned(
    approvals: ApprovalFile,
) -> None:
    approvals.hold_ahead(ends=90 * 86400.0)
    approvals.record_document(OTHER)
    approvals.record_document()
    by_hand_running(approvals, "UPDATE journal SET body = 'x' WHERE kind = 'standing-hold.created'")
    approvals.clock.advance(40 * 86400)
    for _ in range(2):  # the first forgets what was read before the damage
        prune(approvals, audit_retain=30 * 86400.0)
        assert approvals.transact(approvals.engine.effective_approval_mode) == "off"
    approvals.crash()
    approvals.record_document(build_event(event_source="User", due=50 * 86400.0))
    assert (approvals.grants, approvals.claim()) == ([], [])


@pytest.mark.parametrize("is_running", [True, False])
def test_pruned_rows_of_a_live_event_are_damage(approvals: ApprovalFile, is_running: bool) -> None:
    """Whoever can write to the file can write the checkpoint, too."""
    approvals.record_document(USER_REBOOT, step=False)
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.record_document(USER_REBOOT, OTHER)
    by_hand_running(
        approvals,
        "INSERT INTO checkpoint SELECT position, hash, at FROM journal WHERE position = 3",
        "DELETE FROM journal WHERE position <= 3",
    )
    if not is_running:
        approvals.crash()
        assert approvals.submit(of=OTHER).status == 503, "whose else they were is not known"
    for _ in range(2):
        approvals.apply_transitions()
        assert approvals.claim() == []
        prune(approvals)
    assert approvals.submit(of=USER_REBOOT).status == 503


def test_a_pruning_that_is_rolled_back_ends_no_hold(approvals: ApprovalFile) -> None:
    approvals.record_document(USER_REBOOT, step=False)
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.clock.advance(100)
    approvals.submit("hold", "carol", USER_REBOOT)
    approvals.record_document()
    now = approvals.clock.now()

    def prune_in_vain(tx: Transaction) -> None:
        tx.journal.prune(now - timedelta(seconds=50), now + timedelta(seconds=86350))
        tx.approvals.forget_pruned(any_row=True)
        assert [hold.principal for hold in tx.approvals.of_key("e-1").decisions] == ["client:carol"]
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # it is ours
        approvals.transact(prune_in_vain)
    approvals.record_document(USER_REBOOT)
    holds = [hold.principal for hold in approvals.status().active_holds]
    assert holds == ["client:eve", "client:carol"]


def test_what_was_read_is_right_after_a_rollback(approvals: ApprovalFile) -> None:
    """The vote has the place in the journal that the release had."""
    approvals.record_document(REDEPLOY)
    approvals.submit("hold", "eve", REDEPLOY)

    def release_in_vain(tx: Transaction) -> None:
        approvals.engine.decide(tx, build_request("release", "eve", REDEPLOY))
        assert tx.approvals.of_key("e-1").decisions == ()
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # it is ours
        approvals.transact(release_in_vain)
    approvals.submit(of=REDEPLOY)
    assert approvals.status().is_held
    assert approvals.claim() == []


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE journal SET body = 'x' WHERE kind = 'startrequest.accepted'",
        "UPDATE journal SET body = 'x' WHERE kind = 'claim'",
        "DELETE FROM journal WHERE event_key = 'e-1'",
    ],
)
def test_damaged_rows_keep_a_slot_and_end_in_no_cancellation(tmp_path: Path, change: str) -> None:
    """Azure may have accepted its StartRequest."""
    fields = SETTINGS.model_dump(mode="json", by_alias=True)
    fields["limits"] = [{"name": "one", "max": 1}]
    approvals = ApprovalFile(tmp_path / "relay.db", ApprovalsSettings.model_validate(fields))
    first, second = (
        build_event(f"E-{each}", event_source="User", resources=(f"db-{each}",)) for each in (1, 2)
    )
    approvals.record_document(first)
    approvals.accept(approvals.claim())
    approvals.record_document(first, OTHER)
    by_hand_running(approvals, change)
    if "UPDATE" in change:
        prune(approvals)
    approvals.record_document(first, second)
    assert approvals.claim() == []
    approvals.record_document(second)
    ended = approvals.connection.execute("SELECT body FROM journal WHERE kind = 'event.ended'")
    assert orjson.loads(ended.fetchone()[0])["data"]["outcome"] != "canceled"
    approvals.close()


# --- the audit


def in_rows(where: str, field: str, value: str) -> str:
    """A change of a field in the bodies of rows."""
    change = f"json_set(CAST(body AS TEXT), '$.{field}', {value})"
    return f"UPDATE journal SET body = {change} {where}"  # noqa: S608  # our own text


in_claim = partial(in_rows, "WHERE kind = 'claim'")
AGAIN = (
    "INSERT INTO journal SELECT 7, at, kind, event_key, transition, body, hash "
    "FROM journal WHERE kind = 'claim'"
)
NO_VOTE = "counts a vote at position 2, where there is none in force"
OTHER_GRANT = "does not agree with the grant at position 4"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (in_rows("WHERE {vote}", "data.decision", "'hold'"), NO_VOTE),
        (
            "UPDATE journal SET kind = 'approval.voided' WHERE {granted}",
            "follows from no approval.granted",
        ),
        (in_claim("required", "3"), "follows from 2 of 3 recorded votes"),
        (in_claim("recorded", "json('[2, 2]')"), "follows from 1 of 2 recorded votes"),
        (in_claim("rule", "'other'"), OTHER_GRANT),
        (in_claim("attempt", "2"), OTHER_GRANT),
        (AGAIN, "follows from a grant that was over (position 4)"),
    ],
)
def test_the_audit_names_a_claim_that_does_not_follow(
    approvals: ApprovalFile, change: str, problem: str
) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.submit(by="bob")
    approvals.accept(approvals.claim())
    assert problems(approvals) == ()
    by_hand(approvals, change)
    (named,) = problems(approvals)
    assert named.endswith(f"(e-1) {problem}")


def test_a_claim_follows_from_the_votes_the_rules_asked_for_then(approvals: ApprovalFile) -> None:
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


# --- what must keep working


def test_an_acceptance_takes_no_vote_on_a_state_that_came_later(approvals: ApprovalFile) -> None:
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


def test_what_was_pruned_in_quiet_months_is_no_gap(approvals: ApprovalFile) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    approvals.record_document()
    for day in range(70):
        approvals.clock.advance(86400)
        approvals.record_document(build_event(f"Q-{day}", event_type="Freeze"))
        approvals.record_document()
        approvals.prune(audit_retain=30 * 86400.0)
    new = build_event("E-5", event_type="Redeploy", due=71 * 86400.0)
    approvals.record_document(new)
    assert [approvals.submit(of=new).status for _ in range(2)] == [202, 202]


def test_what_was_pruned_after_an_end_is_no_gap(
    approvals: ApprovalFile, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer to its StartRequest is still to come."""
    approvals.record_document(USER_REBOOT)
    (claimed,) = approvals.claim()
    approvals.record_document(step=False)
    ended = approvals.transact(
        lambda tx: tx.occurrences.require_occurrence(claimed.grant.occurrence)
    )
    approvals.prune(after=60)
    approvals.record_document(OTHER)
    approvals.transact(lambda tx: tx.approvals.verify(ended.key))
    assert approvals.transact(lambda tx: tx.approvals.of_occurrence(ended)).damage is None
    assert "are off" not in caplog.text


def test_a_hold_outlives_the_pruning_after_the_end_of_its_event(approvals: ApprovalFile) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit("hold", "eve", REDEPLOY)
    for _ in range(2):
        approvals.record_document()
        approvals.clock.advance(60)
        for _ in range(2):
            prune(approvals, audit_retain=0.0)
        approvals.record_document(REDEPLOY)
        assert approvals.status().is_held
    approvals.record_document()
    approvals.clock.advance(86400)
    prune(approvals, audit_retain=0.0)
    assert approvals.connection.execute("SELECT count(*) FROM journal").fetchone() == (0,)


def test_votes_holds_and_grants_outlive_the_pruning_of_the_journal(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.submit("hold", "eve")
    for _ in range(2):
        approvals.prune(after=60)
    assert approvals.status().vote_count == 1
    approvals.submit("release", "eve")
    approvals.submit(by="bob")
    approvals.prune(after=60)
    approvals.crash()
    (claimed,) = approvals.claim()
    approvals.accept([claimed])
    assert problems(approvals) == ()
    approvals.record_document()
    approvals.prune(after=60)
    assert problems(approvals) == ()
