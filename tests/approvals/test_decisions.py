"""How votes and holds are recorded and counted, also in a dry run; claims, answers and causes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import orjson
import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.request import HOLD_NOTICE
from relay.errors import SourceRefused
from relay.events.timestamps import format_rfc3339
from relay.store import Mode
from relay.store.journal import read_all_rows
from tests.approvals.builders import (
    FREEZE,
    OPERATOR,
    REBOOT,
    REDEPLOY,
    SETTINGS,
    USER_REBOOT,
    ApprovalFile,
    build_caller,
    build_event,
    decide,
)
from tests.clocks import NOON


def test_a_quorum_is_recorded_vote_by_vote_and_then_granted(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    first = approvals.submit(reason="drained", ticket="CHG-7")
    told = {"eventId": "E-1", "decision": "approve", "rule": "databases", "required": 2}
    own = {"approvalId": first.body["approvalId"], "state": "pending", "votes": 1}
    assert (first.status, first.body) == (202, told | own)
    second = approvals.submit(by="bob")
    own = {"approvalId": second.body["approvalId"], "state": "granted", "votes": 2}
    assert second.body == told | own
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
    wanted = {"decision": "approve", "principal": "rule:users", "channel": "rule", "rule": "users"}
    details = approvals.data("approval.granted")
    assert (wanted | {"votes": 0, "required": 0}).items() <= details.items()
    assert approvals.cause("approval.granted") == approvals.events("event.scheduled")[0].id


def test_approval_events_carry_the_head_of_the_journal_before_them(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    before, row = list(read_all_rows(approvals.connection))[-2:]
    assert orjson.loads(row.body)["journalhead"] == f"{before.position}:{before.hash}"
    assert "journalhead" not in approvals.events("event.scheduled")[0].attributes


def test_an_event_id_has_no_case_and_is_told_as_azure_wrote_it(approvals: ApprovalFile) -> None:
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


def test_a_decision_waits_for_no_check_of_all_events(approvals: ApprovalFile) -> None:
    """Many can be decided at the moment at which something is due, with thousands of events."""
    other = build_event("E-2", event_type="Reboot")
    approvals.record_document(REBOOT, other)
    approvals.submit()
    approvals.submit(of=other)
    approvals.clock.advance(5 * 60)
    approvals.submit()
    assert [event.subject for event in approvals.events("approval.voided")] == ["E-1"]
    assert approvals.event_names()[-2:] == ["approval.voided", "approval.recorded"]
    approvals.apply_transitions()
    assert [event.subject for event in approvals.events("approval.voided")] == ["E-1", "E-2"]


def test_a_changed_event_voids_votes_once_even_if_it_changes_back(approvals: ApprovalFile) -> None:
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


def test_votes_under_a_hold_are_recorded_and_grant_at_its_release(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    assert decide(approvals, "hold", "eve") == "held"
    assert decide(approvals, "approve", "alice") == "held"
    assert decide(approvals, "approve", "bob") == "held"
    assert not approvals.events("approval.granted")
    assert decide(approvals, "release", "eve", message_id="m") == "granted"
    assert approvals.cause("approval.granted") == "m"
    assert approvals.data("approval.granted")["principal"] == "client:bob"
    recorded = approvals.events("approval.recorded")
    assert [each.data["votes"] for each in recorded] == [0, 1, 2, 2]
    assert [each.decision for each in approvals.status().decisions] == ["approve", "approve"]


def test_the_state_in_the_answer_to_a_release(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit("hold", "eve")
    assert decide(approvals, "release", "eve") == "released"
    approvals.submit("hold", "eve")
    approvals.submit()
    assert decide(approvals, "release", "eve") == "pending"
    approvals.submit("hold", "eve")
    approvals.submit("hold", "mallory")
    approvals.submit(by="bob")
    assert decide(approvals, "release", "eve") == "held"
    assert decide(approvals, "release", "mallory") == "granted"


def test_an_operator_releases_every_hold(approvals: ApprovalFile) -> None:
    approvals.record_document(USER_REBOOT)
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.submit("hold", "mallory", USER_REBOOT)
    assert decide(approvals, "release", OPERATOR, of=USER_REBOOT) == "granted"


def test_an_expired_hold_is_told_as_a_release_and_lets_votes_grant(approvals: ApprovalFile) -> None:
    approvals.close()
    approvals.crash(SETTINGS.model_copy(update={"hold_expires": 60.0}))
    approvals.record_document(REBOOT)
    approvals.submit("hold", "eve")
    approvals.submit()
    approvals.submit(by="bob")
    assert approvals.apply_transitions() == NOON + timedelta(seconds=60)
    approvals.clock.advance(60)
    for _ in range(3):
        approvals.apply_transitions()
    hold, _, _, release = approvals.events("approval.recorded")
    wanted = {"decision": "release", "principal": "relay", "channel": "relay", "votes": 2}
    assert wanted.items() <= release.data.items()
    assert HOLD_NOTICE in release.data["reason"]
    assert release.attributes["causationid"] == hold.id
    assert approvals.cause("approval.granted") == release.id
    assert [each.decision for each in approvals.status().decisions] == ["approve", "approve"]


def test_a_hold_stays_in_force_when_its_event_id_comes_back(approvals: ApprovalFile) -> None:
    """A document that is empty once must not let an automatic rule start what somebody holds."""
    approvals.record_document(USER_REBOOT)
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.record_document()
    approvals.crash()
    approvals.record_document(USER_REBOOT)
    assert approvals.claim() == []
    assert len(approvals.status().active_holds) == 1
    assert approvals.submit("release", "eve", USER_REBOOT).body["state"] == "granted"
    assert approvals.claim() != []


@pytest.mark.parametrize("is_back", [True, False])
def test_a_hold_expires_only_if_its_event_is_back(approvals: ApprovalFile, is_back: bool) -> None:
    about = build_event(event_source="User", due=1e6)
    approvals.record_document(about)
    approvals.submit("hold", "eve", about)
    approvals.record_document()
    if is_back:
        approvals.record_document(about)
    recorded_before = len(approvals.events("approval.recorded"))
    approvals.clock.advance(86401)
    approvals.apply_transitions()
    assert len(approvals.events("approval.recorded")) - recorded_before == int(is_back)
    holds = approvals.transact(lambda tx: tx.approvals.of_key("e-1").decisions)
    assert bool(holds) != is_back


@pytest.mark.parametrize(
    ("what", "expected", "configured", "switch", "trusted"),
    [
        ("on", "on", {}, "on", True),
        ("configured as a dry run", "dry-run", {"dry_run": True}, "on", True),
        ("switched to a dry run", "dry-run", {}, "dry-run", True),
        ("disabled", "off", {"enabled": False}, "on", True),
        ("disabled and a dry run", "off", {"enabled": False, "dry_run": True}, "dry-run", True),
        ("dry run and off", "off", {"dry_run": True}, "off", True),
        ("switched off", "off", {}, "off", True),
        ("an untrusted store", "off", {}, "on", False),
    ],
)
def test_the_stricter_of_configuration_and_switch_is_in_force(
    what: str, expected: Mode, configured: dict[str, Any], switch: Mode, trusted: bool
) -> None:
    settings = ApprovalsSettings.model_validate(configured)
    assert settings.mode(switch, trusted=trusted) == expected, what


def test_a_store_that_may_belong_to_another_vm_grants_nothing(approvals: ApprovalFile) -> None:
    approvals.trusted = False
    approvals.crash()
    approvals.record_document(USER_REBOOT)
    assert approvals.grants == []
    assert approvals.submit(by="eve", of=USER_REBOOT).status == 503


def test_a_dry_run_says_what_it_would_grant_and_grants_nothing(approvals: ApprovalFile) -> None:
    approvals.set_mode("dry-run")
    approvals.record_document(REBOOT)
    approvals.submit(by="mallory")
    approvals.submit()
    answer = approvals.submit(by="bob").body
    assert (answer["state"], "nothing is sent" in answer["notice"]) == ("granted", True)
    assert approvals.grants == []
    approvals.set_mode("on")
    assert approvals.status().vote_count == 0
    assert approvals.grants == []
    approvals.record_document(build_event(event_status="Started", not_before=None))
    assert [
        (recorded.name, recorded.data.get("dryRun", False))
        for recorded in approvals.events()
        if recorded.name.startswith("approval.")
    ] == [
        ("approval.refused", False),
        ("approval.recorded", True),
        ("approval.recorded", True),
        ("approval.voided", False),
    ]


def test_a_hold_after_a_dry_run_is_not_the_one_of_the_dry_run(approvals: ApprovalFile) -> None:
    """Which a later dry run can release."""
    approvals.record_document(USER_REBOOT, step=False)
    for mode in ("dry-run", "on"):
        approvals.set_mode(mode)
        assert approvals.submit("hold", "eve", USER_REBOOT).body["state"] == "held"
    approvals.set_mode("dry-run")
    approvals.submit("release", "eve", USER_REBOOT)
    approvals.set_mode("on")
    assert approvals.claim() == []


# --- claims, answers of IMDS, and all causes


def test_the_claim_follows_the_grant_and_says_what_will_be_sent(approvals: ApprovalFile) -> None:
    approvals.record_document(USER_REBOOT)
    (claimed,) = approvals.claim()
    kinds = [row.kind for row in read_all_rows(approvals.connection)]
    assert kinds == ["event.scheduled", "approval.granted", "claim"]
    note = orjson.loads(list(read_all_rows(approvals.connection))[-1].body)
    assert note == {
        "eventId": "E-1",
        "revision": USER_REBOOT.revision,
        "rule": "users",
        "approvalId": claimed.grant.approval_id,
        "attempt": 1,
        "granted": 2,
        "required": 0,
        "votes": 0,
        "recorded": [],
    }
    assert approvals.grants[0].state == "sent"


def test_an_accepted_start_request_is_told_once_and_uses_votes_up(approvals: ApprovalFile) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    approvals.accept(approvals.claim())
    details = approvals.data("startrequest.accepted")
    assert (details["status"], details["attempts"], details["reason"]) == (200, 1, None)
    assert approvals.cause("startrequest.accepted") == approvals.events("approval.granted")[0].id
    approvals.record_document(
        build_event(event_type="Redeploy", event_status="Started", not_before=None)
    )
    approvals.record_document()
    assert approvals.events("event.started")[0].data["approvedByRelay"] is True
    assert approvals.events("event.ended")[0].data["approvedByRelay"] is True
    assert not approvals.events("approval.voided", "startrequest.failed")


def test_a_refusal_by_imds_is_recorded_once_and_final(approvals: ApprovalFile) -> None:
    approvals.record_document(USER_REBOOT)
    (claimed,) = approvals.claim()
    approvals.answer([claimed], SourceRefused("400: wrong", status=400))
    for _ in range(2):
        approvals.apply_transitions()
        approvals.crash()
    details = approvals.data("startrequest.failed")
    assert (details["status"], details["attempts"], details["reason"]) == (400, 1, "400: wrong")
    assert approvals.claim() == []
    assert len(approvals.grants) == 1
    assert approvals.submit(by="eve", of=USER_REBOOT).status == 409


def test_a_message_causes_its_vote_its_grant_and_its_start_request(approvals: ApprovalFile) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit(
        by=build_caller("alice", channel="amqp"), of=REDEPLOY, request_id="m", message_id="m"
    )
    approvals.accept(approvals.claim())
    assert [
        approvals.cause(name)
        for name in ("approval.recorded", "approval.granted", "startrequest.accepted")
    ] == ["m"] * 3


def test_a_clock_that_was_set_back_changes_no_cause(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.clock.set_wall_clock(NOON - timedelta(hours=1))
    approvals.submit(by="bob")
    assert approvals.cause("approval.granted") == approvals.events("approval.recorded")[1].id


def test_a_release_causes_the_automatic_grant_that_follows(approvals: ApprovalFile) -> None:
    approvals.record_document(FREEZE)
    approvals.submit("hold", "eve", FREEZE)
    approvals.record_document(USER_REBOOT)
    assert approvals.grants == []
    assert decide(approvals, "release", "eve") == "granted"
    assert approvals.cause("approval.granted") == approvals.events("approval.recorded")[-1].id


def test_an_earlier_release_at_that_moment_causes_no_later_grant(approvals: ApprovalFile) -> None:
    """The cause is what led to the grant, not what has the same time."""
    approvals.record_document(FREEZE)
    approvals.submit("hold", "eve", FREEZE)
    approvals.submit("release", "eve", FREEZE)
    approvals.record_document(USER_REBOOT)
    assert approvals.cause("approval.granted") == approvals.events("event.updated")[0].id


def test_the_newest_vote_causes_a_grant_that_waited_for_the_switch(approvals: ApprovalFile) -> None:
    """The hold expires while approvals are off, so its release completes nothing."""
    approvals.crash(SETTINGS.model_copy(update={"hold_expires": 60.0}))
    approvals.record_document(REBOOT)
    approvals.submit("hold", "eve")
    approvals.submit(request_id="m1", message_id="m1")
    approvals.submit(by="bob", request_id="m2", message_id="m2")
    approvals.set_mode("off")
    approvals.clock.advance(60)
    approvals.apply_transitions()
    approvals.set_mode("on")
    approvals.accept(approvals.claim())
    assert approvals.cause("approval.granted") == "m2"
    assert approvals.cause("startrequest.accepted") == "m2"
