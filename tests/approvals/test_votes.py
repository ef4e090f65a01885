"""How votes are recorded, counted and voided: the rows, the events and the answers."""

from __future__ import annotations

from datetime import timedelta

import orjson

from relay.events.timestamps import format_rfc3339
from relay.store.chain import read_all_rows
from tests.approvals.builders import REBOOT, USER_REBOOT, ApprovalFile, build_event
from tests.clocks import NOON


def test_a_quorum_is_recorded_vote_by_vote_and_then_granted(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    first = approvals.submit(reason="drained", ticket="CHG-7")
    assert (first.status, first.body) == (
        202,
        {
            "approvalId": first.body["approvalId"],
            "eventId": "E-1",
            "decision": "approve",
            "state": "pending",
            "votes": 1,
            "required": 2,
            "rule": "databases",
        },
    )
    second = approvals.submit(by="bob")
    assert second.body == {
        **first.body,
        "approvalId": second.body["approvalId"],
        "state": "granted",
        "votes": 2,
    }
    assert approvals.event_names() == ["approval.recorded", "approval.recorded", "approval.granted"]
    recorded, completing = approvals.events("approval.recorded")
    assert recorded.data == {
        **approvals.status().occurrence.data,
        "approvalId": first.body["approvalId"],
        "decision": "approve",
        "principal": "client:alice",
        "channel": "http",
        "reason": "drained",
        "ticket": "CHG-7",
        "expires": format_rfc3339(NOON + timedelta(minutes=5)),
        "votes": 1,
        "required": 2,
        "rule": "databases",
    }
    granted = {**completing.data, "votes": 2}
    del granted["expires"]  # that of a vote
    assert approvals.data("approval.granted") == granted
    assert recorded.attributes["causationid"] == approvals.events("event.scheduled")[0].id
    assert approvals.cause("approval.granted") == completing.id
    assert [grant.approval_id for grant in approvals.grants] == [second.body["approvalId"]]


def test_an_automatic_rule_grants_in_its_own_name(approvals: ApprovalFile) -> None:
    approvals.record_document(USER_REBOOT)
    details = approvals.data("approval.granted")
    assert {
        key: details[key]
        for key in ("decision", "principal", "channel", "votes", "required", "rule")
    } == {
        "decision": "approve",
        "principal": "rule:users",
        "channel": "rule",
        "votes": 0,
        "required": 0,
        "rule": "users",
    }
    assert approvals.cause("approval.granted") == approvals.events("event.scheduled")[0].id


def test_approval_events_carry_the_head_of_the_journal_before_them(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    before, row = list(read_all_rows(approvals.connection))[-2:]
    assert orjson.loads(row.body)["journalhead"] == f"{before.position}:{before.hash}"
    assert "journalhead" not in approvals.events("event.scheduled")[0].attributes


def test_the_event_id_is_compared_without_case_and_reported_as_azure_wrote_it(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(REBOOT)
    assert approvals.submit(event_id="e-1").body["eventId"] == "E-1"
    assert approvals.events("approval.recorded")[0].subject == "E-1"


def test_a_vote_counts_until_it_expires_and_is_voided_once(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    moment = approvals.apply_transitions()
    assert moment == NOON + timedelta(minutes=5)
    approvals.clock.advance(300)
    for _ in range(3):
        approvals.apply_transitions()
    assert approvals.data("approval.voided")["why"] == "expired"
    assert approvals.cause("approval.voided") == approvals.events("approval.recorded")[0].id
    assert approvals.submit(by="bob").body["votes"] == 1


def test_a_changed_event_voids_its_votes_once_even_if_it_changes_back(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.record_document(build_event(resources=("db-1", "db-2")))
    voided = approvals.events("approval.voided")[0]
    assert voided.data["why"] == "changed"
    assert voided.data["resources"] == ["db-1", "db-2"]
    assert "dryRun" not in voided.data
    assert voided.attributes["causationid"] == approvals.events("event.updated")[0].id
    approvals.record_document(REBOOT)
    assert approvals.submit(by="bob").body["votes"] == 1
    assert len(approvals.events("approval.voided")) == 1
