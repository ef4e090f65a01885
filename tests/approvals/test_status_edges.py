"""The status of an approval at its edges: what has come, who may still vote, and what was sent."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.limits import WaitingFor
from relay.approvals.status import ApprovalStatus, approval_json_fields, approval_state
from relay.approvals.transitions import Remind, due_transitions
from relay.outbox import Grant, StandingHold
from tests.approvals.builders import (
    FREEZE,
    STARTED,
    USER_REBOOT,
    build_decision,
    build_event,
    build_grant,
    build_status,
)
from tests.approvals.manual_clock import NOON

HOLD = build_decision("hold", "eve")
WAIT = WaitingFor(limit="databases", slots=1, machines=("db-2",), behind=None, until=None)
STANDING_HOLD = StandingHold(
    number=1,
    hold_id="h" * 32,
    conditions="{}",
    within="[]",
    starts=NOON,
    ends=NOON + timedelta(seconds=60),
    principal="client:eve",
    channel="http",
    reason="freeze",
    created=NOON,
)


def of(approve: Any, **more: Any) -> ApprovalsSettings:
    """One rule that decides about everything."""
    rule = {"name": "all", "approve": approve, **more.pop("rule", {})}
    return ApprovalsSettings.model_validate({"rules": [rule], **more})


def after_noon(seconds: float | None) -> datetime | None:
    return NOON + timedelta(seconds=seconds) if seconds is not None else None


# --- when voting closes


@pytest.mark.parametrize(
    ("status", "closes_at"),
    [
        (build_status(), 840),
        (build_status(USER_REBOOT), 900),
        (build_status(FREEZE), 900),
        (build_status(build_event(due=None)), None),
    ],
    ids=["close_before", "an automatic rule", "no rule", "no NotBefore"],
)
def test_voting_closes_at_not_before_unless_the_rule_closes_it_earlier(
    status: ApprovalStatus, closes_at: float | None
) -> None:
    assert status.voting_closes_at == after_noon(closes_at)


def test_voting_is_closed_from_the_moment_on_at_which_it_closes() -> None:
    assert build_status(now=839.9).is_past_voting_close_time is False
    assert build_status(now=840).is_past_voting_close_time is True
    assert build_status(build_event(due=None), now=1e6).is_past_voting_close_time is False


def test_an_event_of_which_nobody_was_reminded_is_due_for_its_reminder() -> None:
    quorum = {"votes": 1, "from": ["client:alice"], "remind": "10m"}
    status = build_status(settings=of(quorum), now=300)
    assert due_transitions(status) == [Remind()]
    assert due_transitions(replace(status, is_reminded=True)) == []


# --- who may vote


@pytest.mark.parametrize("about", [FREEZE, USER_REBOOT], ids=["no rule", "an automatic rule"])
def test_nobody_may_vote_where_no_vote_is_needed(about: Any) -> None:
    status = build_status(about)
    assert "client:alice" not in status.eligible_voters
    assert status.eligible_voters_without_vote == ()


def test_of_the_people_who_may_vote_those_are_missing_who_have_not_voted() -> None:
    people = {"ann": ["client:alice", "slack:T024/U7"], "bob": ["client:bob"]}
    quorum = {"votes": 2, "from": ["person:ann", "person:bob", "client:drain"]}
    status = build_status(None, build_decision(), settings=of(quorum, people=people))
    assert status.eligible_voters_without_vote == ("client:bob", "client:drain")


@pytest.mark.parametrize(
    ("voter", "is_missing"),
    [
        ("vm:prod/db-1", True),
        ("vm:prod/db-2", False),
        ("vm:test/db-1", False),
        ("vm:prod/*", True),
        ("vm:*/web-?", True),
        ("vm:test/*", False),
        ("client:prod", True),
    ],
)
def test_a_machine_is_missing_only_if_the_event_can_be_about_it(
    voter: str, *, is_missing: bool
) -> None:
    """Nobody knows how many machines a pattern means, so it counts if its scope is right."""
    status = build_status(settings=of({"votes": 1, "from": [voter]}))
    assert status.eligible_voters_without_vote == ((voter,) if is_missing else ())


# --- which votes count


@pytest.mark.parametrize("principal", ["client:alice", "mtls:alice"])
def test_the_vote_of_a_client_counts_only_while_the_client_is_configured(principal: str) -> None:
    settings = of({"votes": 1, "from": [principal]})
    status = build_status(None, build_decision(principal=principal), settings=settings)
    assert status.is_rule_satisfied_apart_from_holds
    assert not replace(status, resources_by_client={}).is_rule_satisfied_apart_from_holds
    assert not replace(
        status, resources_by_client={principal: ("web-*",)}
    ).is_rule_satisfied_apart_from_holds


def test_a_local_user_may_decide_for_what_a_client_of_the_same_person_may_not() -> None:
    """The rights of the socket's file are their authority. Chat users have the client's limits."""
    people = {"ann": ["local:ann", "client:web"]}
    settings = of({"votes": 1, "from": ["person:ann"]}, people=people)
    vote = build_decision(principal="local:ann")
    assert build_status(None, vote, settings=settings).is_rule_satisfied_apart_from_holds


@pytest.mark.parametrize(("resources", "counts"), [(("db-1",), 1), ((), 0), (("db-1", "db-2"), 0)])
def test_a_machine_votes_for_a_whole_event_only_if_that_names_it_and_nobody_else(
    resources: tuple[str, ...], counts: int
) -> None:
    about = build_event(resources=resources)
    vote = build_decision(of=about, principal="vm:prod/db-1")
    settings = of({"votes": 1, "from": ["vm:prod/*"]})
    assert build_status(about, vote, settings=settings).vote_count == counts


def test_resources_need_votes_of_their_own_only_with_each_resource() -> None:
    assert build_status().uncovered_resources == ()
    assert build_status(FREEZE).uncovered_resources == ()
    each = of({"each_resource": True, "from": ["vm:*/*"]})
    assert build_status(settings=each).uncovered_resources == ("db-1",)
    vote = build_decision(principal="vm:prod/db-1")
    assert build_status(None, vote, settings=each).uncovered_resources == ()


# --- holds


def test_a_hold_does_not_expire_with_the_votes_of_the_rule() -> None:
    assert build_status(None, build_decision("hold", expires=86400), now=301).active_holds
    assert build_status(None, build_decision("hold", expires=None), now=301).active_holds


def test_an_event_that_has_ended_has_no_hold_in_force() -> None:
    assert build_status(None, HOLD, live=False).active_holds == ()
    assert build_status(None, HOLD).active_holds == (HOLD,)


@pytest.mark.parametrize(
    ("status", "is_held"),
    [
        (build_status(), True),
        (build_status(now=59.9), True),
        (build_status(now=60), False),
        (build_status(now=-1), True),
        (build_status(live=False), False),
        (build_status(STARTED), False),
        (build_status(grants=[build_grant("accepted")]), False),
        (build_status(grants=[build_grant("accepted", revision="x")]), True),
        (build_status(grants=[build_grant("sent")]), True),
    ],
    ids=[
        "from its start on",
        "until its end",
        "at its end",
        "after the clock was set back",
        "ended",
        "started",
        "accepted",
        "accepted for another revision",
        "sent",
    ],
)
def test_a_standing_hold_holds_what_azure_can_still_be_kept_from_starting(
    status: ApprovalStatus, *, is_held: bool
) -> None:
    status = replace(status, standing_holds=(STANDING_HOLD,))
    assert status.active_standing_holds == ((STANDING_HOLD,) if is_held else ())
    assert status.is_held is is_held


# --- what was granted and sent


@pytest.mark.parametrize(
    ("grants", "is_approved", "is_claimed"),
    [
        ([], False, False),
        ([build_grant()], True, False),
        ([build_grant(revision="x")], False, False),
        ([build_grant("sent")], True, True),
        ([build_grant("accepted")], True, True),
        ([build_grant("sent", revision="x")], True, True),
        ([build_grant("accepted", revision="x")], True, True),
        ([build_grant("failed")], False, False),
        ([build_grant("refused", status=400)], False, False),
        ([build_grant("failed"), build_grant("sent", id=2)], True, True),
    ],
)
def test_an_event_is_approved_with_a_grant_and_claimed_with_a_start_request(
    grants: list[Grant], *, is_approved: bool, is_claimed: bool
) -> None:
    status = build_status(grants=grants)
    assert status.is_granted_or_claimed is is_approved
    assert status.is_grant_sent_or_accepted is is_claimed


def test_azure_may_have_started_an_event_after_any_start_request_without_a_400() -> None:
    never_sent = build_grant("failed", attempts=0)
    assert build_status(grants=[never_sent]).may_have_been_accepted_by_imds is False
    assert build_status(
        grants=[never_sent, build_grant("sent", id=2)]
    ).may_have_been_accepted_by_imds
    assert not build_status(
        grants=[build_grant("refused", status=400)]
    ).may_have_been_accepted_by_imds


# --- what people see


def test_an_event_with_a_grant_is_not_granted_any_more_once_not_before_has_passed() -> None:
    assert approval_state(build_status(grants=[build_grant()], now=900)) == "none"


def test_only_an_event_that_can_still_be_started_waits_for_a_limit() -> None:
    waiting = replace(build_status(), waiting_for=(WAIT,))
    assert approval_state(waiting) == "waiting"
    assert approval_state(replace(waiting, now=NOON + timedelta(seconds=900))) == "none"


def test_the_summary_names_the_runbook_of_the_rule() -> None:
    url = "https://wiki.example.com/databases"
    settings = of({"votes": 1, "from": ["client:alice"]}, rule={"runbook": url})
    assert approval_json_fields(build_status(settings=settings))["runbook"] == url
    assert approval_json_fields(build_status(FREEZE))["runbook"] is None
