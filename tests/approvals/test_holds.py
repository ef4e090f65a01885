"""How holds are taken, released and expire."""

from __future__ import annotations

from datetime import timedelta

import pytest

from relay.approvals.request import HOLD_NOTICE
from tests.approvals.builders import (
    OPERATOR,
    REBOOT,
    SETTINGS,
    USER_REBOOT,
    ApprovalFile,
    build_event,
    decide,
)
from tests.clocks import NOON


def test_votes_under_a_hold_are_recorded_and_grant_at_its_release(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    assert decide(approvals, "hold", "eve") == "held"
    assert decide(approvals, "approve", "alice") == "held"
    assert decide(approvals, "approve", "bob") == "held"
    assert not approvals.events("approval.granted")
    assert decide(approvals, "release", "eve", message_id="m") == "granted"
    assert approvals.cause("approval.granted") == "m"
    assert approvals.data("approval.granted")["principal"] == "client:bob"
    assert [recorded.data["votes"] for recorded in approvals.events("approval.recorded")] == [
        0,
        1,
        2,
        2,
    ]
    assert [decision.decision for decision in approvals.status().decisions] == [
        "approve",
        "approve",
    ]


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


def test_an_expired_hold_is_recorded_as_a_release_and_lets_the_votes_grant(
    approvals: ApprovalFile,
) -> None:
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
    hold, release = (
        approvals.events("approval.recorded")[0],
        approvals.events("approval.recorded")[-1],
    )
    assert {key: release.data[key] for key in ("decision", "principal", "channel", "votes")} == {
        "decision": "release",
        "principal": "relay",
        "channel": "relay",
        "votes": 2,
    }
    assert HOLD_NOTICE in release.data["reason"]
    assert release.attributes["causationid"] == hold.id
    assert approvals.cause("approval.granted") == release.id
    assert len(approvals.events("approval.recorded")) == 4
    assert [decision.decision for decision in approvals.status().decisions] == [
        "approve",
        "approve",
    ]


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
def test_the_expiry_of_a_hold_is_recorded_only_if_its_event_is_back(
    approvals: ApprovalFile, is_back: bool
) -> None:
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
