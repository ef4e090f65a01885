"""Grants after a restart with other rules, and the summary of an approval."""

from __future__ import annotations

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.explain import approval_summary
from tests.approvals.builders import REBOOT, USER_REBOOT, Book, event

_NO_RULES = ApprovalsSettings()
_ALL_AUTOMATIC = ApprovalsSettings.model_validate(
    {"rules": [{"name": "all", "approve": "automatic"}]}
)
_ALL_VOTE = ApprovalsSettings.model_validate(
    {"rules": [{"name": "all", "approve": {"votes": 1, "from": ["client:alice"]}}]}
)


@pytest.mark.parametrize("settings", [_NO_RULES, _ALL_VOTE])
def test_a_grant_whose_rule_is_gone_or_wants_votes_now_is_given_up(
    approvals: Book, settings: ApprovalsSettings
) -> None:
    approvals.see(USER_REBOOT)
    approvals.crash(settings)
    assert approvals.claim() == []
    approvals.step()
    assert "rules changed" in approvals.data("startrequest.failed")["reason"]


def test_votes_are_weighed_by_the_rule_as_it_is(approvals: Book) -> None:
    approvals.see(REBOOT)
    approvals.submit(by="drain")
    approvals.crash(_ALL_VOTE)
    assert approvals.stands().vote_count == 0
    approvals.step()
    assert approvals.grants == []
    assert approvals.submit().body["state"] == "granted"


def test_a_grant_by_votes_holds_where_the_rule_is_automatic_now(approvals: Book) -> None:
    approvals.see(REBOOT)
    approvals.submit()
    approvals.submit(by="bob")
    approvals.crash(_ALL_AUTOMATIC)
    approvals.step()
    assert len(approvals.claim()) == 1
    assert len(approvals.grants) == 1


def test_an_approval_is_shown_with_what_is_missing_and_until_when(approvals: Book) -> None:
    approvals.see(REBOOT, event("E-2", event_type="Freeze", due=None))
    approvals.submit()
    assert approval_summary(approvals.stands()) == {
        "state": "pending",
        "rule": "databases",
        "votes": 1,
        "required": 2,
        "missing": 1,
        "closes": "2026-04-11T12:14:00Z",
    }
    assert approval_summary(approvals.stands("E-2")) == {
        "state": "none",
        "rule": None,
        "votes": 0,
        "required": 0,
        "missing": 0,
        "closes": None,
    }
    approvals.see()
    assert approval_summary(approvals.stands())["missing"] == 0
