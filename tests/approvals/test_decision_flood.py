"""A principal that decides again and again fills neither the journal nor the disk."""

from __future__ import annotations

from datetime import timedelta

import pytest

from relay.approvals.engine import MAX_DECISIONS_ABOUT_EVENT
from relay.approvals.refusal_aggregation import MAX_RECORDED_ABOUT_EVENT
from relay.approvals.request import Caller, DecisionKind, Rights
from tests.approvals.builders import REBOOT, ApprovalFile
from tests.approvals.manual_clock import NOON


@pytest.mark.parametrize("decision", ["approve", "hold"])
@pytest.mark.parametrize("channel", ["http", "amqp"])
def test_of_the_same_decision_with_new_ids_only_the_first_ones_of_a_minute_have_events(
    approvals: ApprovalFile, decision: DecisionKind, channel: str
) -> None:
    approvals.record_document(REBOOT)
    for number in range(50):
        message_id = f"m{number}" if channel == "amqp" else None
        answer = approvals.submit(decision, request_id=f"r{number}", message_id=message_id)
        assert (answer.status, answer.repeat) == (202, False)
    assert approvals.event_names() == ["approval.recorded"] * MAX_RECORDED_ABOUT_EVENT
    approvals.clock.advance(60)
    approvals.submit(decision, request_id="later")
    assert len(approvals.events("approval.recorded")) == MAX_RECORDED_ABOUT_EVENT + 1


def test_the_same_decision_again_expires_later(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit("hold", request_id="r0")
    (hold,) = approvals.status().active_holds
    approvals.clock.advance(60)
    approvals.submit("hold", request_id="r1")
    (renewed,) = approvals.status().active_holds
    assert renewed.expires is not None
    assert hold.expires is not None
    assert renewed.expires - hold.expires == timedelta(minutes=1)


def test_a_copy_of_a_request_that_changed_nothing_changes_nothing_later(
    approvals: ApprovalFile,
) -> None:
    """Whoever captured it could otherwise take the hold again after its release."""
    approvals.record_document(REBOOT)
    for number in range(MAX_RECORDED_ABOUT_EVENT + 1):
        approvals.submit("hold", request_id=f"r{number}", signed_at="1700000000")
    approvals.submit("release", request_id="release")
    approvals.crash()
    last = f"r{MAX_RECORDED_ABOUT_EVENT}"
    copied = approvals.submit("hold", request_id=last, signed_at="1700000000")
    assert (copied.status, copied.repeat) == (202, True)
    assert not approvals.status().active_holds


@pytest.mark.parametrize("channel", ["http", "amqp"])
def test_who_holds_and_releases_in_turn_is_stopped_for_the_rest_of_the_minute(
    approvals: ApprovalFile, channel: str
) -> None:
    approvals.record_document(REBOOT)
    decisions: tuple[DecisionKind, DecisionKind] = ("hold", "release")
    for number in range(MAX_DECISIONS_ABOUT_EVENT):
        request_id = f"r{number}"
        message_id = request_id if channel == "amqp" else None
        answer = approvals.submit(
            decisions[number % 2], request_id=request_id, message_id=message_id
        )
        assert answer.status == 202
    answer = approvals.submit("hold")
    assert (answer.status, answer.body["detail"].endswith("wait a minute")) == (409, True)
    assert len(approvals.events("approval.recorded")) == MAX_DECISIONS_ABOUT_EVENT
    assert approvals.submit("hold", by="bob").status == 202
    approvals.clock.advance(60)
    assert approvals.submit("hold").status == 202


def test_who_decided_often_is_not_stopped_after_the_clock_was_set_back(
    approvals: ApprovalFile,
) -> None:
    """Otherwise nobody could hold the event until the clock is where it was."""
    approvals.record_document(REBOOT)
    decisions: tuple[DecisionKind, DecisionKind] = ("hold", "release")
    for number in range(MAX_DECISIONS_ABOUT_EVENT):
        approvals.clock.advance(20)
        assert approvals.submit(decisions[number % 2], request_id=f"r{number}").status == 202
    approvals.clock.set_wall_clock(NOON - timedelta(hours=1))
    assert approvals.submit("hold").status == 202
    assert len(approvals.status().active_holds) == 1


def test_clicks_within_a_minute_are_one_decision_whatever_their_ids(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(REBOOT)
    rights = Rights(frozenset({"hold"}))
    person = Caller("slack:T024/U7", "slack", rights)
    first = approvals.submit("hold", by=person, request_id="click 1")
    assert approvals.submit("hold", by=person, request_id="click 2") == first
    assert len(approvals.events("approval.recorded")) == 1
    approvals.clock.advance(60)
    approvals.submit("hold", by=person, request_id="click 3")
    assert len(approvals.events("approval.recorded")) == 2
