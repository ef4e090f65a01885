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
    can_claim_grant,
    can_unsent_grant_keep_slot,
    due_transitions,
    next_change_at,
    open_grant_failure_reason,
)
from relay.store import Grant
from tests.approvals.builders import (
    FREEZE,
    REDEPLOY,
    SETTINGS,
    STARTED,
    USER_REBOOT,
    VOTES,
    build_decision,
    build_event,
    build_grant,
    build_status,
)
from tests.clocks import NOON

UNKNOWN_STATUS = build_event(event_source="User", event_status="Paused")
NO_STATUS = build_event(event_source="User", event_status=None)
NO_NOT_BEFORE = build_event(due=None)
VOTES_WITHOUT_NOT_BEFORE = [replace(vote, revision=NO_NOT_BEFORE.revision) for vote in VOTES]
HOLD = build_decision("hold", "eve")
REFUSED = build_grant("refused", status=400)


# --- grants


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(build_status(None, *VOTES), id="a quorum"),
        pytest.param(build_status(USER_REBOOT), id="an automatic rule"),
        pytest.param(build_status(USER_REBOOT, mode="dry-run"), id="a dry run"),
        pytest.param(build_status(None, *VOTES, now=299), id="votes about to expire"),
        pytest.param(
            build_status(NO_NOT_BEFORE, *VOTES_WITHOUT_NOT_BEFORE, now=299), id="no NotBefore"
        ),
        pytest.param(
            build_status(None, *VOTES, grants=[build_grant("failed")]), id="after a failure"
        ),
        pytest.param(
            build_status(None, *VOTES, grants=[build_grant("failed", status=400)]),
            id="after a failure and a shared 400",
        ),
        pytest.param(
            build_status(None, *VOTES, grants=[build_grant(revision="x")]),
            id="after a grant for another revision",
        ),
        pytest.param(
            build_status(None, *VOTES, grants=[build_grant("accepted", revision="x")]),
            id="after another revision was accepted",
        ),
        pytest.param(
            build_status(None, *VOTES, grants=[build_grant(dry_run=True)]),
            id="after a grant of a dry run",
        ),
        pytest.param(
            build_status(USER_REBOOT, grants=[build_grant(of=USER_REBOOT)], mode="dry-run"),
            id="in a dry run after a real grant",
        ),
        pytest.param(
            build_status(None, *VOTES, build_decision("hold", expires=5), now=5),
            id="after a hold expired",
        ),
    ],
)
def test_a_grant_is_created(status: ApprovalStatus) -> None:
    assert creates_grant(status)


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(build_status(None, *VOTES, now=300), id="the votes expired"),
        pytest.param(build_status(None, *VOTES[:1]), id="a vote is missing"),
        pytest.param(build_status(FREEZE), id="no rule"),
        pytest.param(build_status(USER_REBOOT, mode="off"), id="approvals are off"),
        pytest.param(build_status(USER_REBOOT, live=False), id="the event ended"),
        pytest.param(
            build_status(build_event(event_source="User", event_status="Started")),
            id="the event started",
        ),
        pytest.param(build_status(UNKNOWN_STATUS), id="the status is unknown"),
        pytest.param(build_status(NO_STATUS), id="there is no status"),
        pytest.param(build_status(USER_REBOOT, now=900), id="NotBefore, automatic"),
        pytest.param(build_status(None, *VOTES, now=900), id="NotBefore, votes"),
        pytest.param(build_status(None, *VOTES, HOLD), id="a hold"),
        pytest.param(
            build_status(None, *VOTES, build_decision("hold", "eve", revision="x")),
            id="a hold of another revision",
        ),
        pytest.param(
            build_status(USER_REBOOT, build_decision("hold", expires=5), now=4.9),
            id="a hold about to expire",
        ),
        pytest.param(build_status(None, *VOTES, grants=[build_grant()]), id="granted already"),
        pytest.param(build_status(None, *VOTES, grants=[build_grant("sent")]), id="sent already"),
        pytest.param(
            build_status(None, *VOTES, grants=[build_grant("sent", revision="x")]),
            id="another revision is being sent",
        ),
        pytest.param(
            build_status(None, *VOTES, grants=[build_grant("accepted")]), id="accepted already"
        ),
        pytest.param(build_status(None, *VOTES, grants=[REFUSED]), id="IMDS refused"),
        pytest.param(
            build_status(
                USER_REBOOT, grants=[build_grant(of=USER_REBOOT, dry_run=True)], mode="dry-run"
            ),
            id="granted already in this dry run",
        ),
    ],
)
def test_no_grant_is_created(status: ApprovalStatus) -> None:
    assert not creates_grant(status)


def creates_grant(status: ApprovalStatus) -> bool:
    """Whether a grant follows from the status."""
    return any(isinstance(transition, CreateGrant) for transition in due_transitions(status))


# --- votes and holds


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        pytest.param(None, build_status(None, build_decision()), id="a vote that counts"),
        pytest.param(
            "changed", build_status(None, build_decision(revision="x")), id="another revision"
        ),
        pytest.param("changed", build_status(STARTED, build_decision()), id="the event started"),
        pytest.param(
            "ended", build_status(None, build_decision(), live=False), id="the event ended"
        ),
        pytest.param(
            "ended",
            build_status(None, build_decision(revision="x"), live=False),
            id="changed, then ended",
        ),
        pytest.param("expired", build_status(None, build_decision(expires=5), now=5), id="expired"),
        pytest.param(
            None, build_status(None, build_decision(expires=5), now=4.9), id="about to expire"
        ),
        pytest.param("expired", build_status(None, build_decision(), now=900), id="NotBefore"),
        pytest.param(
            "expired",
            build_status(None, build_decision(expires=1000), now=900),
            id="NotBefore before expiry",
        ),
        pytest.param(
            None,
            build_status(None, build_decision(), now=299.9),
            id="about to expire by the current rule",
        ),
        pytest.param(
            "expired",
            build_status(None, build_decision(), now=300),
            id="expired by the current rule",
        ),
        pytest.param(
            None,
            build_status(REDEPLOY, build_decision(by="eve", of=REDEPLOY), now=899.9),
            id="just before NotBefore",
        ),
        pytest.param(
            None, build_status(None, build_decision(by="eve")), id="a vote of nobody asked"
        ),
    ],
)
def test_why_a_vote_is_void(reason: Any, status: ApprovalStatus) -> None:
    expected = [] if reason is None else [VoidVotes(status.decisions, reason)]
    assert due_transitions(status) == expected


def test_one_transition_voids_all_votes_with_the_same_reason() -> None:
    changed = build_decision(revision="x"), build_decision(by="bob", revision="y")
    expired = build_decision(by="drain", expires=5)
    assert due_transitions(build_status(None, *changed, expired, now=5)) == [
        VoidVotes(changed, "changed"),
        VoidVotes((expired,), "expired"),
    ]


@pytest.mark.parametrize(
    "status",
    [
        build_status(STARTED, build_decision(), grants=[build_grant("accepted")]),
        build_status(None, build_decision(), grants=[build_grant("accepted")], live=False),
    ],
    ids=["the event started", "the event ended"],
)
def test_votes_of_an_accepted_start_request_are_used_up_silently(status: ApprovalStatus) -> None:
    assert due_transitions(status) == []


def test_votes_stay_while_their_start_request_is_in_flight() -> None:
    """Started was seen before the answer: only the answer says whether the votes were used."""
    sent = build_grant("sent")
    status = build_status(STARTED, build_decision(), grants=[sent])
    assert (
        due_transitions(build_status(STARTED, build_decision(), grants=[sent], in_flight=[sent]))
        == []
    )
    assert transition_types(due_transitions(status)) == [VoidVotes, FailGrant]


def test_holds_outlive_the_event() -> None:
    """The same EventId can come back."""
    hold, expired_hold = build_decision("hold"), build_decision("hold", expires=1)
    assert due_transitions(build_status(None, hold, live=False)) == []
    assert due_transitions(build_status(None, expired_hold, now=5, live=False)) == []


@pytest.mark.parametrize(
    "changed",
    [None, build_event(resources=("db-2",)), STARTED, USER_REBOOT],
    ids=["unchanged", "other resources", "started", "other source"],
)
def test_a_hold_survives_every_change_until_it_expires(changed: Any) -> None:
    hold = build_decision("hold", expires=100)
    assert due_transitions(build_status(changed, hold, now=99.9)) == []
    assert due_transitions(build_status(None, hold, now=100)) == [ExpireHold(hold)]


def test_a_grant_follows_the_expiry_of_the_last_hold() -> None:
    hold = build_decision("hold", expires=5)
    assert due_transitions(build_status(USER_REBOOT, hold, now=5)) == [
        ExpireHold(hold),
        CreateGrant(SETTINGS.rules[0]),
    ]


# --- grants that fail


@pytest.mark.parametrize(
    ("words", "status"),
    [
        pytest.param(
            "ended", build_status(None, *VOTES, grants=[build_grant()], live=False), id="ended"
        ),
        pytest.param(
            "started", build_status(STARTED, *VOTES, grants=[build_grant()]), id="started"
        ),
        pytest.param(
            "changed",
            build_status(build_event(resources=("db-2",)), *VOTES, grants=[build_grant()]),
            id="changed",
        ),
        pytest.param(
            "NotBefore", build_status(None, *VOTES, grants=[build_grant()], now=900), id="NotBefore"
        ),
        pytest.param(
            "expired",
            build_status(
                None, VOTES[0], build_decision(by="bob", expires=5), grants=[build_grant()], now=5
            ),
            id="a vote expired",
        ),
        pytest.param("rules", build_status(FREEZE, grants=[build_grant(of=FREEZE)]), id="no rule"),
        pytest.param(
            "rules",
            build_status(
                USER_REBOOT, grants=[build_grant(of=USER_REBOOT)], settings=ApprovalsSettings()
            ),
            id="the rule was removed",
        ),
        pytest.param(
            "expired",
            build_status(
                None, build_decision(), grants=[build_grant(dry_run=True)], mode="dry-run"
            ),
            id="a vote is missing in a dry run",
        ),
    ],
)
def test_why_a_grant_fails(words: str, status: ApprovalStatus) -> None:
    (grant,) = status.grants
    reason = open_grant_failure_reason(grant, status)
    assert reason is not None
    assert words in reason
    failures = [step for step in due_transitions(status) if isinstance(step, FailGrant)]
    assert failures == [FailGrant(grant, reason)]


@pytest.mark.parametrize("state", ["granted", "sent"])
def test_a_grant_with_its_quorum_does_not_fail(state: Any) -> None:
    status = build_status(None, *VOTES, grants=[build_grant(state)])
    assert open_grant_failure_reason(status.grants[0], status) is None
    assert due_transitions(status) == []


def test_a_failed_claim_says_that_its_outcome_is_unknown() -> None:
    reason = open_grant_failure_reason(build_grant(), build_status(STARTED))
    assert reason is not None
    assert open_grant_failure_reason(build_grant("sent"), build_status(STARTED)) == (
        f"{reason}; whether IMDS took the StartRequest is not known"
    )


def test_a_grant_in_flight_does_not_fail() -> None:
    grant = build_grant("sent")
    in_flight = build_status(STARTED, grants=[grant], in_flight=[grant])
    other_in_flight = build_status(STARTED, grants=[grant], in_flight=[replace(grant, id=2)])
    assert due_transitions(in_flight) == []
    assert transition_types(due_transitions(other_in_flight)) == [FailGrant]


@pytest.mark.parametrize("state", ["accepted", "failed", "refused"])
def test_a_grant_with_a_final_answer_does_not_fail_again(state: Any) -> None:
    assert due_transitions(build_status(None, grants=[build_grant(state)], live=False)) == []


def transition_types(transitions: list[Transition]) -> list[type[Transition]]:
    """The types, in their order."""
    return [type(transition) for transition in transitions]


# --- the last check before the POST


@pytest.mark.parametrize(
    ("grant", "status"),
    [
        pytest.param(build_grant(), build_status(None, *VOTES), id="granted"),
        pytest.param(build_grant("sent"), build_status(None, *VOTES), id="sent without an answer"),
        pytest.param(build_grant(of=USER_REBOOT), build_status(USER_REBOOT), id="automatic"),
    ],
)
def test_a_grant_can_be_claimed(grant: Grant, status: ApprovalStatus) -> None:
    assert can_claim_grant(grant, status)


@pytest.mark.parametrize(
    ("grant", "status"),
    [
        pytest.param(build_grant(), build_status(None, *VOTES, mode="off"), id="approvals are off"),
        pytest.param(build_grant(), build_status(None, *VOTES, mode="dry-run"), id="a dry run"),
        pytest.param(
            build_grant(dry_run=True), build_status(None, *VOTES), id="granted in a dry run"
        ),
        pytest.param(build_grant(), build_status(None, *VOTES, HOLD), id="a hold"),
        pytest.param(build_grant(), build_status(None, *VOTES, live=False), id="the event ended"),
        pytest.param(build_grant(), build_status(None, *VOTES, now=900), id="NotBefore"),
        pytest.param(build_grant(revision="x"), build_status(None, *VOTES), id="another revision"),
        pytest.param(build_grant(), build_status(None, VOTES[0]), id="a vote is missing"),
        pytest.param(
            build_grant(),
            build_status(None, VOTES[0], build_decision(by="bob", expires=1), now=1),
            id="a vote expired",
        ),
        pytest.param(
            build_grant(),
            build_status(None, VOTES[0], build_decision(by="bob", dry_run=True)),
            id="a vote of a dry run",
        ),
        pytest.param(
            build_grant(of=STARTED),
            build_status(STARTED, *(replace(vote, revision=STARTED.revision) for vote in VOTES)),
            id="the event started",
        ),
        pytest.param(
            build_grant(of=UNKNOWN_STATUS), build_status(UNKNOWN_STATUS), id="the status is unknown"
        ),
    ],
)
def test_the_last_check_repeats_every_condition(grant: Grant, status: ApprovalStatus) -> None:
    assert not can_claim_grant(grant, status)


# --- when time changes something


@pytest.mark.parametrize(
    ("seconds", "status"),
    [
        pytest.param(None, build_status(), id="nothing was decided"),
        pytest.param(
            300, build_status(None, build_decision()), id="a vote expires by the current rule"
        ),
        pytest.param(
            900, build_status(REDEPLOY, build_decision(of=REDEPLOY)), id="NotBefore with a vote"
        ),
        pytest.param(5, build_status(None, build_decision(expires=5)), id="a vote expires"),
        pytest.param(
            5,
            build_status(None, build_decision("hold", expires=5), build_decision(expires=7)),
            id="a hold expires before a vote",
        ),
        pytest.param(
            7,
            build_status(None, build_decision("hold", expires=5), build_decision(expires=7), now=5),
            id="a vote expires after a hold",
        ),
        pytest.param(900, build_status(grants=[build_grant()]), id="NotBefore with a grant"),
        pytest.param(900, build_status(grants=[build_grant("sent")]), id="NotBefore with a claim"),
        pytest.param(None, build_status(grants=[build_grant("accepted")]), id="accepted"),
        pytest.param(None, build_status(None, build_decision(), now=900), id="after NotBefore"),
        pytest.param(
            300, build_status(NO_NOT_BEFORE, build_decision()), id="a vote without NotBefore"
        ),
        pytest.param(
            None,
            build_status(replace(REDEPLOY, not_before=None), build_decision(of=REDEPLOY)),
            id="neither expiry nor NotBefore",
        ),
    ],
)
def test_when_time_alone_changes_something(seconds: float | None, status: ApprovalStatus) -> None:
    expected = NOON + timedelta(seconds=seconds) if seconds is not None else None
    assert next_change_at(status) == expected


@pytest.mark.parametrize(
    ("grant", "status"),
    [
        pytest.param(build_grant("failed"), build_status(None, *VOTES), id="failed"),
        pytest.param(build_grant("sent"), build_status(None, *VOTES), id="sent"),
        pytest.param(build_grant(dry_run=True), build_status(None, *VOTES), id="of a dry run"),
        pytest.param(build_grant(), build_status(None, *VOTES, mode="dry-run"), id="in a dry run"),
        pytest.param(build_grant(), build_status(None, *VOTES, live=False), id="ended"),
        pytest.param(
            build_grant(of=build_event(event_status="Paused")),
            build_status(
                build_event(event_status="Paused"),
                *(
                    replace(vote, revision=build_event(event_status="Paused").revision)
                    for vote in VOTES
                ),
            ),
            id="not Scheduled",
        ),
        pytest.param(build_grant(), build_status(None, *VOTES, HOLD), id="held"),
        pytest.param(build_grant(revision="x"), build_status(None, *VOTES), id="changed"),
        pytest.param(build_grant(), build_status(None, VOTES[0]), id="without its quorum"),
    ],
)
def test_a_grant_that_cannot_be_sent_takes_no_slot(grant: Grant, status: ApprovalStatus) -> None:
    assert can_unsent_grant_keep_slot(grant, status) is False


def test_nothing_is_claimed_if_the_revision_is_not_that_of_the_stored_event() -> None:
    votes = [replace(vote, revision="x") for vote in VOTES]
    grant = build_grant(revision="x")
    status = build_status(None, *votes)
    other = replace(status, occurrence=replace(status.occurrence, revision="x"))
    assert open_grant_failure_reason(grant, other) is None
    assert not can_claim_grant(grant, other)
