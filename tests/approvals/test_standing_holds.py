"""Standing holds: which events they hold, from when until when, and who makes and ends them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.approvals.request import HOLD_NOTICE
from relay.approvals.standing_holds import MAX_OPEN, StandingHoldBody
from relay.approvals.status import approval_json_fields, approval_state
from relay.sentences import describe_conditions
from tests.approvals.builders import (
    BY_ALICE,
    OPERATOR,
    REBOOT,
    SETTINGS,
    USER_REBOOT,
    ApprovalFile,
    build_caller,
    build_event,
    one_rule,
)
from tests.approvals.running_gate import running_gate
from tests.clocks import NOON


def held(approvals: ApprovalFile, event_id: str = "E-1") -> bool:
    return approval_state(approvals.status(event_id)) == "held"


def test_a_standing_hold_keeps_automatic_rules_from_later_events(approvals: ApprovalFile) -> None:
    answer = approvals.hold_ahead(match={"event_source": ["User"]})
    assert (answer.status, answer.body["principal"]) == (201, "client:eve")
    approvals.record_document(USER_REBOOT)
    assert held(approvals)
    assert (approvals.events("approval.granted"), approvals.claim()) == ([], [])
    (summary,) = approval_json_fields(approvals.status())["standingHolds"]
    told = {"principal": "client:eve", "until": "2026-04-11T12:10:00Z", "reason": "freeze"}
    assert summary == {"holdId": answer.body["holdId"], **told}


def test_votes_under_a_standing_hold_are_kept_and_grant_at_its_end(approvals: ApprovalFile) -> None:
    hold_id = approvals.hold_ahead().body["holdId"]
    approvals.record_document(REBOOT)
    approvals.submit()
    answer = approvals.submit(by="bob")
    assert (answer.body["state"], answer.body["votes"]) == ("held", 2)
    assert answer.body["standingHolds"][0]["principal"] == "client:eve"
    recorded = approvals.events("approval.recorded")[-1].data
    assert recorded["standingHolds"][0]["until"] == "2026-04-11T12:10:00Z"
    assert approvals.claim() == []
    assert approvals.end_ahead(hold_id).status == 200
    (claimed,) = approvals.claim()
    assert claimed.event_id == "E-1"


def test_the_expiry_of_a_standing_hold_is_told_and_lets_events_go(approvals: ApprovalFile) -> None:
    hold_id = approvals.hold_ahead(ends=60.0).body["holdId"]
    approvals.record_document(USER_REBOOT)
    assert approvals.apply_transitions() == NOON + timedelta(seconds=60)
    approvals.clock.advance(59.0)
    approvals.apply_transitions()
    assert approvals.events("standing-hold.expired") == []
    approvals.clock.advance(1.0)
    assert approvals.claim() == []  # it does not apply any more, and nothing is granted yet
    approvals.apply_transitions()
    (expired,) = approvals.events("standing-hold.expired")
    assert (expired.subject, expired.data["notice"]) == (hold_id, HOLD_NOTICE)
    assert len(approvals.claim()) == 1
    approvals.apply_transitions()
    assert len(approvals.events("standing-hold.expired")) == 1


def test_events_are_granted_after_standing_holds_whatever_is_named(approvals: ApprovalFile) -> None:
    approvals.hold_ahead(ends=60.0)
    approvals.record_document(USER_REBOOT)
    approvals.clock.advance(60.0)
    now = approvals.clock.now()
    approvals.transact(lambda tx: approvals.engine.apply_due_transitions(tx, now, ["e-9"]))
    assert len(approvals.events("approval.granted")) == 1


def test_a_standing_hold_applies_from_its_start(approvals: ApprovalFile) -> None:
    approvals.hold_ahead(starts=60.0)
    approvals.record_document(REBOOT)
    assert not held(approvals)
    assert approvals.apply_transitions() == NOON + timedelta(seconds=60)
    approvals.clock.advance(60.0)
    assert held(approvals)


@pytest.mark.parametrize(
    ("match", "changes", "is_held"),
    [
        ({}, {}, True),
        ({"event_type": ["reboot"]}, {}, True),
        ({"event_type": ["Freeze"]}, {}, False),
        ({"event_type": ["Freeze"]}, {"event_type": None}, True),
        ({"event_source": ["User"]}, {}, False),
        ({"event_source": ["User"]}, {"event_source": None}, True),
        ({"duration": {"max": "8s"}}, {"duration": 9}, False),
        ({"duration": {"max": "8s"}}, {"duration": None}, True),
        ({"resources": ["db-*"]}, {"resources": ("web-1", "db-1")}, True),
        ({"resources": ["db-*"]}, {"resources": ()}, True),
        ({"resources": ["db-*"]}, {"resources": ("web-1",)}, False),
        ({"scope": ["pro?"]}, {}, True),
        ({"scope": ["test"]}, {}, False),
    ],
)
def test_what_azure_does_not_say_counts_as_a_condition_that_is_met(
    approvals: ApprovalFile, match: dict[str, Any], changes: dict[str, Any], is_held: bool
) -> None:
    approvals.hold_ahead(match=match)
    approvals.record_document(build_event(**changes))
    assert held(approvals) == is_held


# --- who may


@pytest.mark.parametrize("limits", [{"resources": ("*",)}, {"limits": (("db-*",),)}])
def test_whose_rights_are_for_some_machines_only_makes_and_ends_no_standing_hold(
    approvals: ApprovalFile, limits: dict[str, Any]
) -> None:
    limited = build_caller("db", "operate", **limits)
    made = approvals.hold_ahead(limited, {"resources": ["db-1"]})
    assert (made.status, "hold each event as it comes" in made.body["detail"]) == (403, True)
    assert approvals.events("standing-hold.created") == []
    hold_id = approvals.hold_ahead(OPERATOR).body["holdId"]
    ended = approvals.end_ahead(hold_id, limited)
    assert (ended.status, "for some machines only" in ended.body["detail"]) == (403, True)
    assert approvals.events("standing-hold.ended") == []


def test_a_standing_hold_is_ended_once(approvals: ApprovalFile) -> None:
    hold_id = approvals.hold_ahead().body["holdId"]
    assert approvals.end_ahead(hold_id, OPERATOR).status == 200
    (event,) = approvals.events("standing-hold.ended")
    assert event.data["endedBy"] == "client:op"
    assert approvals.end_ahead(hold_id).status == 409
    assert approvals.end_ahead("unknown").status == 404


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("event_type", "Rebot", "did you mean Reboot?"),
        ("event_type", "restart", "got restart: it would hold nothing"),
        ("event_source", "Plattform", "did you mean Platform?"),
    ],
)
def test_a_standing_hold_on_what_azure_does_not_send_is_refused(
    approvals: ApprovalFile, field: str, value: str, meant: str
) -> None:
    """A freeze with a typing error would be confirmed and hold nothing."""
    answer = approvals.hold_ahead(match={field: [value]})
    assert (answer.status, answer.body["field"]) == (422, f"match.{field}")
    assert meant in answer.body["detail"]


@pytest.mark.parametrize(
    ("starts", "ends", "problem"),
    [
        (None, -1.0, "in the future"),
        (None, 0.0, "in the future"),
        (20.0, 10.0, "after starts"),
        (None, 367 * 86400.0, "within 366 days"),
    ],
)
def test_the_time_of_a_standing_hold_is_ahead_and_bounded(
    approvals: ApprovalFile, starts: float | None, ends: float, problem: str
) -> None:
    answer = approvals.hold_ahead(starts=starts, ends=ends)
    assert (answer.status, answer.body["field"]) == (422, "ends")
    assert problem in answer.body["detail"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"match": {"colour": ["red"]}},
        {"match": {"time": {"from": "11:00", "to": "12:01"}}},
        {"match": {"resources": []}},
        {"ends": "tomorrow"},
        {"ends": "2026-04-11T12:10:00"},
        {"ends": "2026-02-30T12:10:00Z"},
        {"reason": ""},
        {"reason": None},
    ],
)
def test_a_body_that_is_wrong_is_refused(wrong: dict[str, Any]) -> None:
    good = {"match": {}, "ends": "2026-04-11T12:10:00Z", "reason": "freeze"}
    StandingHoldBody.model_validate(good)
    with pytest.raises(ValidationError):
        StandingHoldBody.model_validate(good | wrong)


def test_conditions_come_back_as_the_configuration_writes_them(approvals: ApprovalFile) -> None:
    match = {
        "event_type": ["Reboot"],
        "duration": {"min": "500ms", "max": "2m"},
        "resources": ["db-*"],
    }
    answer = approvals.hold_ahead(match=match)
    assert answer.body["match"] == match | {"duration": {"min": "500ms", "max": "120s"}}
    told = "event_type Reboot; duration min 500ms, max 120s; resources db-*"
    assert describe_conditions(answer.body) == told
    again = approvals.hold_ahead(match=answer.body["match"])
    assert again.body["match"] == answer.body["match"]


# --- repeats and bounds


def test_the_number_of_standing_holds_is_bounded(approvals: ApprovalFile) -> None:
    answers = [approvals.hold_ahead().status for _ in range(MAX_OPEN + 1)]
    assert answers == [201] * MAX_OPEN + [409]


# --- what the answers say


def test_every_text_about_a_standing_hold_says_that_azure_proceeds(approvals: ApprovalFile) -> None:
    created = approvals.hold_ahead().body
    ended = approvals.end_ahead(created["holdId"]).body
    approvals.hold_ahead(ends=1.0)
    approvals.clock.advance(1.0)
    approvals.apply_transitions()
    texts = [created, ended, *(event.data for event in approvals.events())]
    assert len(texts) == 6
    assert {text["notice"] for text in texts} == {HOLD_NOTICE}


def test_answers_name_the_ten_standing_holds_that_end_last(approvals: ApprovalFile) -> None:
    for number in range(12):
        approvals.hold_ahead(ends=60.0 * (number + 1), reason=f"r{number}")
    approvals.record_document(REBOOT)
    named = approval_json_fields(approvals.status())["standingHolds"]
    assert [hold["reason"] for hold in named] == [f"r{number}" for number in range(11, 1, -1)]
    assert len(approvals.submit().body["standingHolds"]) == 10


# --- old rows


def test_a_standing_hold_in_force_stays_in_the_journal_at_any_age(approvals: ApprovalFile) -> None:
    hold_id = approvals.hold_ahead(ends=300 * 86400.0).body["holdId"]
    approvals.clock.advance(200 * 86400.0)
    approvals.prune(audit_retain=1.0)
    assert len(approvals.events("standing-hold.created")) == 1
    approvals.record_document(build_event(due=None, event_source="User"))
    assert held(approvals)
    approvals.end_ahead(hold_id)
    approvals.clock.advance(86400.0)
    approvals.prune(audit_retain=1.0)
    assert approvals.events("standing-hold.created") == []
    assert approvals.transact(lambda tx: tx.standing_holds.find(hold_id)) is None


# --- the gate


async def test_a_standing_hold_during_the_fresh_read_stops_a_start_request(tmp_path: Path) -> None:
    async with running_gate(tmp_path, settings=SETTINGS) as gate:
        gate.azure.may_read.clear()
        await gate.record_document(USER_REBOOT)
        await gate.wait_for_events("approval.granted")
        assert gate.azure.reads == 1
        answer = await gate.hold_ahead()
        gate.azure.may_read.set()
        await gate.settle()
        gate.clock.advance(1.0)  # the gate pauses after a claim that it did not get
        await gate.settle()
        assert gate.azure.sent == []
        await gate.end_ahead(answer.body["holdId"])
        await gate.wait_for_start_requests(1)


async def test_a_standing_hold_expires_in_time_though_nothing_else_happens(tmp_path: Path) -> None:
    async with running_gate(tmp_path, settings=one_rule(BY_ALICE)) as harness:
        await harness.settle()
        await harness.hold_ahead(ends=30.0)
        await harness.settle()
        harness.clock.advance(30)
        await harness.wait_for_events("standing-hold.expired")
