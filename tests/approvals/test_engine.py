"""Grants after a restart with other rules, and the summary of an approval."""

from __future__ import annotations

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.status import approval_json_fields
from tests.approvals.builders import REBOOT, USER_REBOOT, ApprovalFile, build_event

_NO_RULES = ApprovalsSettings()
_ALL_AUTOMATIC = ApprovalsSettings.model_validate(
    {"rules": [{"name": "all", "approve": "automatic"}]}
)
_ALL_VOTE = ApprovalsSettings.model_validate(
    {"rules": [{"name": "all", "approve": {"votes": 1, "from": ["client:alice"]}}]}
)


@pytest.mark.parametrize("settings", [_NO_RULES, _ALL_VOTE], ids=["no rules", "votes"])
def test_a_grant_fails_if_its_rule_is_gone_or_needs_votes_now(
    approvals: ApprovalFile, settings: ApprovalsSettings
) -> None:
    approvals.record_document(USER_REBOOT)
    approvals.crash(settings)
    assert approvals.claim() == []
    approvals.apply_transitions()
    assert "rules changed" in approvals.data("startrequest.failed")["reason"]


def test_votes_count_by_the_current_rule(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit(by="drain")
    approvals.crash(_ALL_VOTE)
    assert approvals.status().vote_count == 0
    approvals.apply_transitions()
    assert approvals.grants == []
    assert approvals.submit().body["state"] == "granted"


def test_a_grant_by_votes_stays_if_the_rule_is_automatic_now(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.submit(by="bob")
    approvals.crash(_ALL_AUTOMATIC)
    approvals.apply_transitions()
    assert len(approvals.claim()) == 1
    assert len(approvals.grants) == 1


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
    assert approval_json_fields(approvals.status("E-2")) == {
        "state": "none",
        "rule": None,
        "votes": 0,
        "required": 0,
        "missing": 0,
        "closes": None,
        "waitingFor": [],
        "standingHolds": [],
        "runbook": None,
    }
    approvals.record_document()
    assert approval_json_fields(approvals.status())["missing"] == 0
