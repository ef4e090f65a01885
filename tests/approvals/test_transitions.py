"""Which transitions are due, the last check before a claim, and when time changes something."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.status import ApprovalStatus
from relay.approvals.transitions import (
    CreateGrant,
    ExpireHold,
    FailGrant,
    Transition,
    VoidVotes,
    can_claim,
    failure_reason,
    next_change_at,
    next_transitions,
)
from relay.outbox import Grant
from tests.approvals.builders import (
    FREEZE,
    REDEPLOY,
    SETTINGS,
    STARTED,
    USER_REBOOT,
    VOTES,
    decided,
    event,
    granted,
    standing,
)
from tests.approvals.manual_clock import NOON

UNKNOWN_STATUS = event(event_source="User", event_status="Paused")
NO_STATUS = event(event_source="User", event_status=None)
NO_NOT_BEFORE = event(due=None)
VOTES_WITHOUT_NOT_BEFORE = [replace(vote, revision=NO_NOT_BEFORE.revision) for vote in VOTES]
HOLD = decided("hold", "eve")
REFUSED = granted("refused", status=400)


# --- grants


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(standing(None, *VOTES), id="a quorum"),
        pytest.param(standing(USER_REBOOT), id="an automatic rule"),
        pytest.param(standing(USER_REBOOT, mode="dry-run"), id="a dry run"),
        pytest.param(standing(None, *VOTES, now=299), id="votes about to expire"),
        pytest.param(
            standing(NO_NOT_BEFORE, *VOTES_WITHOUT_NOT_BEFORE, now=299), id="no NotBefore"
        ),
        pytest.param(standing(None, *VOTES, grants=[granted("failed")]), id="after a failure"),
        pytest.param(
            standing(None, *VOTES, grants=[granted("failed", status=400)]),
            id="after a failure and a shared 400",
        ),
        pytest.param(
            standing(None, *VOTES, grants=[granted(revision="x")]),
            id="after a grant for another revision",
        ),
        pytest.param(
            standing(None, *VOTES, grants=[granted("accepted", revision="x")]),
            id="after another revision was accepted",
        ),
        pytest.param(
            standing(None, *VOTES, grants=[granted(dry_run=True)]), id="after a grant of a dry run"
        ),
        pytest.param(
            standing(USER_REBOOT, grants=[granted(of=USER_REBOOT)], mode="dry-run"),
            id="in a dry run after a real grant",
        ),
        pytest.param(
            standing(None, *VOTES, decided("hold", expires=5), now=5), id="after a hold expired"
        ),
    ],
)
def test_a_grant_is_created(status: ApprovalStatus) -> None:
    assert creates_grant(status)


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(standing(None, *VOTES, now=300), id="the votes expired"),
        pytest.param(standing(None, *VOTES[:1]), id="a vote is missing"),
        pytest.param(standing(FREEZE), id="no rule"),
        pytest.param(standing(USER_REBOOT, mode="off"), id="approvals are off"),
        pytest.param(standing(USER_REBOOT, live=False), id="the event ended"),
        pytest.param(
            standing(event(event_source="User", event_status="Started")), id="the event started"
        ),
        pytest.param(standing(UNKNOWN_STATUS), id="the status is unknown"),
        pytest.param(standing(NO_STATUS), id="there is no status"),
        pytest.param(standing(USER_REBOOT, now=900), id="NotBefore, automatic"),
        pytest.param(standing(None, *VOTES, now=900), id="NotBefore, votes"),
        pytest.param(standing(None, *VOTES, HOLD), id="a hold"),
        pytest.param(
            standing(None, *VOTES, decided("hold", "eve", revision="x")),
            id="a hold of another revision",
        ),
        pytest.param(
            standing(USER_REBOOT, decided("hold", expires=5), now=4.9), id="a hold about to expire"
        ),
        pytest.param(standing(None, *VOTES, grants=[granted()]), id="granted already"),
        pytest.param(standing(None, *VOTES, grants=[granted("sent")]), id="sent already"),
        pytest.param(
            standing(None, *VOTES, grants=[granted("sent", revision="x")]),
            id="another revision is being sent",
        ),
        pytest.param(standing(None, *VOTES, grants=[granted("accepted")]), id="accepted already"),
        pytest.param(standing(None, *VOTES, grants=[REFUSED]), id="IMDS refused"),
        pytest.param(
            standing(USER_REBOOT, grants=[granted(of=USER_REBOOT, dry_run=True)], mode="dry-run"),
            id="granted already in this dry run",
        ),
    ],
)
def test_no_grant_is_created(status: ApprovalStatus) -> None:
    assert not creates_grant(status)


def creates_grant(status: ApprovalStatus) -> bool:
    """Whether a grant follows from the status."""
    return any(isinstance(transition, CreateGrant) for transition in next_transitions(status))


# --- votes and holds


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        pytest.param(None, standing(None, decided()), id="a vote that counts"),
        pytest.param("changed", standing(None, decided(revision="x")), id="another revision"),
        pytest.param("changed", standing(STARTED, decided()), id="the event started"),
        pytest.param("ended", standing(None, decided(), live=False), id="the event ended"),
        pytest.param(
            "ended", standing(None, decided(revision="x"), live=False), id="changed, then ended"
        ),
        pytest.param("expired", standing(None, decided(expires=5), now=5), id="expired"),
        pytest.param(None, standing(None, decided(expires=5), now=4.9), id="about to expire"),
        pytest.param("expired", standing(None, decided(), now=900), id="NotBefore"),
        pytest.param(
            "expired", standing(None, decided(expires=1000), now=900), id="NotBefore before expiry"
        ),
        pytest.param(
            None, standing(None, decided(), now=299.9), id="about to expire by the current rule"
        ),
        pytest.param(
            "expired", standing(None, decided(), now=300), id="expired by the current rule"
        ),
        pytest.param(
            None,
            standing(REDEPLOY, decided(by="eve", of=REDEPLOY), now=899.9),
            id="just before NotBefore",
        ),
        pytest.param(None, standing(None, decided(by="eve")), id="a vote of nobody asked"),
    ],
)
def test_why_a_vote_is_void(reason: Any, status: ApprovalStatus) -> None:
    expected = [] if reason is None else [VoidVotes(status.decisions, reason)]
    assert next_transitions(status) == expected


def test_one_transition_voids_all_votes_with_the_same_reason() -> None:
    changed = decided(revision="x"), decided(by="bob", revision="y")
    expired = decided(by="drain", expires=5)
    assert next_transitions(standing(None, *changed, expired, now=5)) == [
        VoidVotes(changed, "changed"),
        VoidVotes((expired,), "expired"),
    ]


@pytest.mark.parametrize(
    "status",
    [
        standing(STARTED, decided(), grants=[granted("accepted")]),
        standing(None, decided(), grants=[granted("accepted")], live=False),
    ],
    ids=["the event started", "the event ended"],
)
def test_votes_of_an_accepted_start_request_are_used_up_silently(status: ApprovalStatus) -> None:
    assert next_transitions(status) == [VoidVotes((decided(),), None)]


def test_votes_stay_while_their_start_request_is_in_flight() -> None:
    """Started was seen before the answer: only the answer says whether the votes were used."""
    status = standing(STARTED, decided(), grants=[granted("sent")])
    assert next_transitions(status, frozenset({1})) == []
    assert transition_types(next_transitions(status)) == [VoidVotes, FailGrant]


def test_holds_outlive_the_event_and_expire_silently_then() -> None:
    """The same EventId can come back."""
    hold, expired_hold = decided("hold"), decided("hold", expires=1)
    assert next_transitions(standing(None, hold, live=False)) == []
    assert next_transitions(standing(None, expired_hold, now=5, live=False)) == [
        VoidVotes((expired_hold,), None)
    ]


@pytest.mark.parametrize(
    "changed",
    [None, event(resources=("db-2",)), STARTED, USER_REBOOT],
    ids=["unchanged", "other resources", "started", "other source"],
)
def test_a_hold_survives_every_change_until_it_expires(changed: Any) -> None:
    hold = decided("hold", expires=100)
    assert next_transitions(standing(changed, hold, now=99.9)) == []
    assert next_transitions(standing(None, hold, now=100)) == [ExpireHold(hold)]


def test_a_grant_follows_the_expiry_of_the_last_hold() -> None:
    hold = decided("hold", expires=5)
    assert next_transitions(standing(USER_REBOOT, hold, now=5)) == [
        ExpireHold(hold),
        CreateGrant(SETTINGS.rules[0]),
    ]


# --- grants that fail


@pytest.mark.parametrize(
    ("words", "status"),
    [
        pytest.param("ended", standing(None, *VOTES, grants=[granted()], live=False), id="ended"),
        pytest.param("started", standing(STARTED, *VOTES, grants=[granted()]), id="started"),
        pytest.param(
            "changed",
            standing(event(resources=("db-2",)), *VOTES, grants=[granted()]),
            id="changed",
        ),
        pytest.param(
            "NotBefore", standing(None, *VOTES, grants=[granted()], now=900), id="NotBefore"
        ),
        pytest.param(
            "expired",
            standing(None, VOTES[0], decided(by="bob", expires=5), grants=[granted()], now=5),
            id="a vote expired",
        ),
        pytest.param("rules", standing(FREEZE, grants=[granted(of=FREEZE)]), id="no rule"),
        pytest.param(
            "rules",
            standing(USER_REBOOT, grants=[granted(of=USER_REBOOT)], settings=ApprovalsSettings()),
            id="the rule was removed",
        ),
        pytest.param(
            "expired",
            standing(None, decided(), grants=[granted(dry_run=True)], mode="dry-run"),
            id="a vote is missing in a dry run",
        ),
    ],
)
def test_why_a_grant_fails(words: str, status: ApprovalStatus) -> None:
    (grant,) = status.grants
    reason = failure_reason(grant, status)
    assert reason is not None
    assert words in reason
    failures = [step for step in next_transitions(status) if isinstance(step, FailGrant)]
    assert failures == [FailGrant(grant, reason)]


@pytest.mark.parametrize("state", ["granted", "sent"])
def test_a_grant_with_its_quorum_does_not_fail(state: Any) -> None:
    status = standing(None, *VOTES, grants=[granted(state)])
    assert failure_reason(status.grants[0], status) is None
    assert next_transitions(status) == []


def test_a_failed_claim_says_that_its_outcome_is_unknown() -> None:
    reason = failure_reason(granted(), standing(STARTED))
    assert reason is not None
    assert failure_reason(granted("sent"), standing(STARTED)) == (
        f"{reason}; whether IMDS took the StartRequest is not known"
    )


def test_a_grant_in_flight_does_not_fail() -> None:
    status = standing(STARTED, grants=[granted("sent")])
    assert next_transitions(status, frozenset({1})) == []
    assert transition_types(next_transitions(status, frozenset({2}))) == [FailGrant]


@pytest.mark.parametrize("state", ["accepted", "failed", "refused"])
def test_a_grant_with_a_final_answer_does_not_fail_again(state: Any) -> None:
    assert next_transitions(standing(None, grants=[granted(state)], live=False)) == []


def transition_types(transitions: list[Transition]) -> list[type[Transition]]:
    """The types, in their order."""
    return [type(transition) for transition in transitions]


# --- the last check before the POST


@pytest.mark.parametrize(
    ("grant", "status"),
    [
        pytest.param(granted(), standing(None, *VOTES), id="granted"),
        pytest.param(granted("sent"), standing(None, *VOTES), id="sent without an answer"),
        pytest.param(granted(of=USER_REBOOT), standing(USER_REBOOT), id="automatic"),
    ],
)
def test_a_grant_can_be_claimed(grant: Grant, status: ApprovalStatus) -> None:
    assert can_claim(grant, status)


@pytest.mark.parametrize(
    ("grant", "status"),
    [
        pytest.param(granted(), standing(None, *VOTES, mode="off"), id="approvals are off"),
        pytest.param(granted(), standing(None, *VOTES, mode="dry-run"), id="a dry run"),
        pytest.param(granted(dry_run=True), standing(None, *VOTES), id="granted in a dry run"),
        pytest.param(granted(), standing(None, *VOTES, HOLD), id="a hold"),
        pytest.param(granted(), standing(None, *VOTES, live=False), id="the event ended"),
        pytest.param(granted(), standing(None, *VOTES, now=900), id="NotBefore"),
        pytest.param(granted(revision="x"), standing(None, *VOTES), id="another revision"),
        pytest.param(granted(), standing(None, VOTES[0]), id="a vote is missing"),
        pytest.param(
            granted(),
            standing(None, VOTES[0], decided(by="bob", expires=1), now=1),
            id="a vote expired",
        ),
        pytest.param(
            granted(),
            standing(None, VOTES[0], decided(by="bob", dry_run=True)),
            id="a vote of a dry run",
        ),
        pytest.param(
            granted(of=STARTED),
            standing(STARTED, *(replace(vote, revision=STARTED.revision) for vote in VOTES)),
            id="the event started",
        ),
        pytest.param(
            granted(of=UNKNOWN_STATUS), standing(UNKNOWN_STATUS), id="the status is unknown"
        ),
    ],
)
def test_the_last_check_repeats_every_condition(grant: Grant, status: ApprovalStatus) -> None:
    assert not can_claim(grant, status)


# --- when time changes something


@pytest.mark.parametrize(
    ("seconds", "status"),
    [
        pytest.param(None, standing(), id="nothing was decided"),
        pytest.param(300, standing(None, decided()), id="a vote expires by the current rule"),
        pytest.param(900, standing(REDEPLOY, decided(of=REDEPLOY)), id="NotBefore with a vote"),
        pytest.param(5, standing(None, decided(expires=5)), id="a vote expires"),
        pytest.param(
            5,
            standing(None, decided("hold", expires=5), decided(expires=7)),
            id="a hold expires before a vote",
        ),
        pytest.param(
            7,
            standing(None, decided("hold", expires=5), decided(expires=7), now=5),
            id="a vote expires after a hold",
        ),
        pytest.param(900, standing(grants=[granted()]), id="NotBefore with a grant"),
        pytest.param(900, standing(grants=[granted("sent")]), id="NotBefore with a claim"),
        pytest.param(None, standing(grants=[granted("accepted")]), id="accepted"),
        pytest.param(None, standing(None, decided(), now=900), id="after NotBefore"),
        pytest.param(300, standing(NO_NOT_BEFORE, decided()), id="a vote without NotBefore"),
        pytest.param(
            None,
            standing(replace(REDEPLOY, not_before=None), decided(of=REDEPLOY)),
            id="neither expiry nor NotBefore",
        ),
    ],
)
def test_when_time_alone_changes_something(seconds: float | None, status: ApprovalStatus) -> None:
    expected = NOON + timedelta(seconds=seconds) if seconds is not None else None
    assert next_change_at(status) == expected
