"""The causationid of each event: the message or the event that led to it."""

from __future__ import annotations

from datetime import timedelta

from tests.approvals.builders import (
    FREEZE,
    REBOOT,
    REDEPLOY,
    SETTINGS,
    USER_REBOOT,
    ApprovalFile,
    build_caller,
    decide,
)
from tests.clocks import NOON


def test_a_message_is_the_cause_of_its_vote_its_grant_and_its_start_request(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit(
        by=build_caller("alice", channel="amqp"), of=REDEPLOY, request_id="m", message_id="m"
    )
    approvals.accept(approvals.claim())
    assert [
        approvals.cause(name)
        for name in ("approval.recorded", "approval.granted", "startrequest.accepted")
    ] == ["m"] * 3


def test_a_message_is_not_the_cause_of_a_grant_that_another_vote_completes(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(REBOOT)
    approvals.submit(request_id="m", message_id="m")
    approvals.submit(by="bob")
    approvals.accept(approvals.claim())
    assert approvals.cause("approval.granted") == approvals.events("approval.recorded")[1].id
    assert approvals.cause("startrequest.accepted") == approvals.events("approval.granted")[0].id


def test_a_clock_that_was_set_back_changes_no_cause(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.clock.set_wall_clock(NOON - timedelta(hours=1))
    approvals.submit(by="bob")
    assert approvals.cause("approval.granted") == approvals.events("approval.recorded")[1].id


def test_a_release_is_the_cause_of_the_automatic_grant_that_follows(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(FREEZE)
    approvals.submit("hold", "eve", FREEZE)
    approvals.record_document(USER_REBOOT)
    assert approvals.grants == []
    assert decide(approvals, "release", "eve") == "granted"
    assert approvals.cause("approval.granted") == approvals.events("approval.recorded")[-1].id


def test_an_earlier_release_at_the_same_moment_causes_no_later_grant(
    approvals: ApprovalFile,
) -> None:
    """The cause is what led to the grant, not what has the same time."""
    approvals.record_document(FREEZE)
    approvals.submit("hold", "eve", FREEZE)
    approvals.submit("release", "eve", FREEZE)
    approvals.record_document(USER_REBOOT)
    assert approvals.cause("approval.granted") == approvals.events("event.updated")[0].id


def test_the_newest_vote_is_the_cause_of_a_grant_that_waited_for_the_switch(
    approvals: ApprovalFile,
) -> None:
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
