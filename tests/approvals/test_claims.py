"""The claim before a StartRequest, what each answer of IMDS leads to, and all causes."""

from __future__ import annotations

from datetime import timedelta

import orjson

from relay.errors import SourceRefused
from relay.store.journal import read_all_rows
from tests.approvals.builders import (
    FREEZE,
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
