"""Which events and rules the engine looks at, grants after a restart, and the summary."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.status import approval_json_fields
from tests.approvals.builders import (
    REBOOT,
    REDEPLOY,
    ApprovalFile,
    build_event,
)
from tests.clocks import NOON


def test_the_summary_says_what_is_missing_and_when_voting_closes(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT, build_event("E-2", event_type="Freeze", due=None))
    approvals.submit()
    assert approval_json_fields(approvals.status()) == {
        "state": "pending",
        "rule": "databases",
        "votes": 1,
        "required": 2,
        "missing": 1,
        "closes": "2026-04-11T12:14:00Z",
        "waitingFor": [],
        "standingHolds": [],
        "runbook": None,
    }
    nothing = {"state": "none", "rule": None, "votes": 0, "required": 0, "missing": 0}
    nothing |= {"closes": None, "waitingFor": [], "standingHolds": [], "runbook": None}
    assert approval_json_fields(approvals.status("E-2")) == nothing
    approvals.record_document()
    assert approval_json_fields(approvals.status())["missing"] == 0


VOTE = {"votes": 1, "from": ["client:alice"]}


def rules(*each: dict[str, Any]) -> ApprovalsSettings:
    """The rules of a relay, each with a name."""
    named = [{"name": f"r{number}", "approve": VOTE} | rule for number, rule in enumerate(each)]
    return ApprovalsSettings.model_validate({"rules": named})


def test_a_request_about_an_event_of_several_scopes_decides_nothing_until_it_names_one(
    tmp_path: Path,
) -> None:
    approvals = ApprovalFile(tmp_path / "hub.db", is_hub=True)
    approvals.record_in_scopes(REDEPLOY, "a", "b")
    answer = approvals.submit(of=REDEPLOY, request_id="r")
    assert (answer.status, answer.body["field"]) == (422, "scope")
    assert answer.body["detail"].endswith("known in several: a, b")
    assert "revision" not in answer.body
    assert approvals.event_names() == []
    assert approvals.submit(of=REDEPLOY, request_id="r", scope="b").body["state"] == "granted"
    (grant,) = approvals.events("approval.granted")
    assert grant.attributes["scope"] == "b"
    approvals.close()


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (202, {"arrival_scope": "b"}),
        (202, {"arrival_scope": "b", "scope": "b"}),
        (404, {"arrival_scope": "b", "scope": "a"}),
        (404, {"arrival_scope": "c"}),
        (404, {"arrival_scope": "c", "event_id": "E-1@b"}),
        (404, {"scope": "c"}),
    ],
)
def test_a_request_is_about_the_scope_for_which_it_arrived(
    tmp_path: Path, status: int, changes: dict[str, Any]
) -> None:
    approvals = ApprovalFile(tmp_path / "hub.db", is_hub=True)
    approvals.record_in_scopes(REDEPLOY, "a", "b")
    assert approvals.submit(of=REDEPLOY, **changes).status == status
    granted = approvals.events("approval.granted")
    assert [each.attributes["scope"] for each in granted] == ["b"] * (status == 202)
    approvals.close()


@pytest.mark.parametrize("position", [0, 1])
def test_a_rule_has_hours_though_another_has_none(tmp_path: Path, position: int) -> None:
    hours = {"time": {"from": "12:01", "to": "12:03"}, "event_type": ["Reboot"]}
    each: list[dict[str, Any]] = [
        {"match": hours, "approve": "automatic"},
        {"match": {"scope": ["x"]}},
    ]
    approvals = ApprovalFile(tmp_path / "relay.db", rules(*each[position:], *each[:position]))
    approvals.clock.advance(1.5)
    approvals.record_document(build_event())
    assert approvals.apply_transitions() == NOON + timedelta(minutes=1)
    approvals.clock.advance(58.5)
    approvals.apply_transitions()
    assert len(approvals.claim()) == 1
    approvals.close()
