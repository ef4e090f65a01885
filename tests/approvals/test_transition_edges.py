"""Transitions at the edges: exact reasons, slots of grants, dry runs, and the last chance."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.limits import WaitingFor
from relay.approvals.status import ApprovalStatus
from relay.approvals.transitions import (
    ExpireHold,
    FailGrant,
    Transition,
    VoidVotes,
    add_waited_limits_to_transitions,
    can_claim_grant,
    can_unsent_grant_keep_slot,
    due_transitions,
    grant_expires_at,
    moment_before_votes_or_grants_expired,
    next_change_at,
    open_grant_failure_reason,
)
from relay.outbox import Decision, Grant, Mode
from tests.approvals.builders import (
    STARTED,
    VOTES,
    build_decision,
    build_event,
    build_grant,
    build_status,
)
from tests.approvals.manual_clock import NOON

HOLD = build_decision("hold", "eve")
SOON = ApprovalsSettings.model_validate(
    {
        "rules": [
            {
                "name": "soon",
                "approve": {"votes": 1, "from": ["client:alice"], "execution_expires": "60s"},
            }
        ]
    }
)
"""A grant expires 60 seconds after it was made."""
WAIT = WaitingFor(limit="databases", slots=1, machines=("db-2",), behind=None, until=None)
WAIT_TEXT = "it waits for limit databases (at most 1 machine at once): db-2 has the slots"
EXPIRED = "the approval was not sent within its execution_expires"


@pytest.mark.parametrize(
    ("expected", "grant", "status"),
    [
        (
            "the event ended before a StartRequest was accepted",
            build_grant(),
            build_status(None, *VOTES, live=False),
        ),
        (
            "the event started before a StartRequest was accepted",
            build_grant(),
            build_status(STARTED, *VOTES),
        ),
        (
            "the event changed before a StartRequest was accepted",
            build_grant(revision="x"),
            build_status(None, *VOTES),
        ),
        (
            "NotBefore passed before a StartRequest was accepted",
            build_grant(),
            build_status(None, *VOTES, now=900),
        ),
        (EXPIRED, build_grant(), build_status(None, build_decision(), settings=SOON, now=60)),
        (
            "the approval expired, or the rules changed, before a StartRequest was accepted",
            build_grant(),
            build_status(None),
        ),
    ],
    ids=["ended", "started", "changed", "NotBefore", "not sent in time", "without its quorum"],
)
def test_a_grant_that_fails_says_exactly_why(
    expected: str, grant: Grant, status: ApprovalStatus
) -> None:
    assert open_grant_failure_reason(grant, status) == expected


@pytest.mark.parametrize(
    ("grant", "expected"),
    [
        (build_grant(), 60),
        (build_grant("sent"), None),
        (build_grant("failed"), None),
        (build_grant(dry_run=True), None),
    ],
    ids=["waits to be sent", "sent", "failed", "in a dry run"],
)
def test_only_a_grant_that_waits_to_be_sent_expires(grant: Grant, expected: float | None) -> None:
    status = build_status(None, build_decision(), settings=SOON)
    moment = NOON + timedelta(seconds=expected) if expected is not None else None
    assert grant_expires_at(grant, status) == moment


def test_the_expiry_of_a_grant_is_the_next_change_before_that_of_its_votes() -> None:
    vote = build_decision(expires=300)
    status = build_status(None, vote, grants=[build_grant()], settings=SOON)
    assert next_change_at(status) == NOON + timedelta(seconds=60)


# --- slots of the limits


@pytest.mark.parametrize(
    ("grant", "mode"), [(build_grant(), "on"), (build_grant(dry_run=True), "dry-run")]
)
def test_a_grant_of_the_mode_in_force_keeps_its_slot(grant: Grant, mode: Mode) -> None:
    votes = [replace(vote, dry_run=grant.dry_run) for vote in VOTES]
    status = replace(build_status(None, *votes), mode=mode)
    assert can_unsent_grant_keep_slot(grant, status) is True


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


# --- the last chance, and what the event waited for


@pytest.mark.parametrize(
    ("seconds", "status"),
    [
        pytest.param(None, build_status(), id="nothing was decided"),
        pytest.param(None, build_status(now=900), id="NotBefore, and nothing was decided"),
        pytest.param(None, build_status(None, build_decision(expires=5), now=4.9), id="not yet"),
        pytest.param(5, build_status(None, build_decision(expires=5), now=5), id="a vote expired"),
        pytest.param(
            5,
            build_status(None, build_decision(expires=5), build_decision(expires=7), now=9),
            id="the first of two",
        ),
        pytest.param(
            None, build_status(None, build_decision("hold", expires=5), now=9), id="a hold expired"
        ),
        pytest.param(900, build_status(None, HOLD, now=900), id="NotBefore with a hold"),
        pytest.param(900, build_status(grants=[build_grant()], now=900), id="NotBefore"),
        pytest.param(
            60, build_status(grants=[build_grant()], settings=SOON, now=61), id="a grant expired"
        ),
        pytest.param(
            None,
            build_status(build_event(not_before="0001-01-01T00:00:00Z"), HOLD),
            id="the year 1",
        ),
    ],
)
def test_the_last_chance_is_just_before_time_ended_the_first(
    seconds: float | None, status: ApprovalStatus
) -> None:
    just_before = timedelta(seconds=seconds or 0, microseconds=-1)
    assert moment_before_votes_or_grants_expired(status) == (
        NOON + just_before if seconds is not None else None
    )


def test_what_ends_by_time_says_for_what_the_event_waited() -> None:
    before = replace(build_status(None, *VOTES), waiting_for=(WAIT,))
    grant = build_grant()
    untouched: list[Transition] = [
        VoidVotes(VOTES, "changed"),
        VoidVotes(VOTES, None),
        ExpireHold(HOLD),
    ]
    assert add_waited_limits_to_transitions(
        [VoidVotes(VOTES, "expired"), FailGrant(grant, EXPIRED)], before
    ) == [
        VoidVotes(VOTES, "expired", (WAIT,)),
        FailGrant(grant, f"{EXPIRED}; {WAIT_TEXT}"),
    ]
    assert add_waited_limits_to_transitions([*untouched], before) == untouched


def test_a_grant_that_could_not_be_sent_before_either_says_nothing_of_waiting() -> None:
    failed = FailGrant(build_grant(revision="x"), "the event changed")
    before = replace(build_status(None, *VOTES), waiting_for=(WAIT,))
    assert add_waited_limits_to_transitions([failed], before) == [failed]


def test_an_event_that_waited_for_nothing_says_nothing_of_waiting() -> None:
    transitions: list[Transition] = [VoidVotes(VOTES, "expired"), FailGrant(build_grant(), EXPIRED)]
    assert add_waited_limits_to_transitions(transitions, build_status(None, *VOTES)) == transitions


# --- what a grant that expired takes with it


def test_a_grant_that_was_not_sent_in_time_takes_its_votes_with_it() -> None:
    vote = build_decision()
    status = build_status(None, vote, grants=[build_grant()], settings=SOON, now=60)
    assert due_transitions(status) == [
        VoidVotes((vote,), "expired"),
        FailGrant(build_grant(), EXPIRED),
    ]


@pytest.mark.parametrize(
    ("vote", "grant"),
    [
        (build_decision(), build_grant(revision="x")),
        (build_decision(dry_run=True), build_grant()),
    ],
    ids=["of another revision", "of a dry run"],
)
def test_a_grant_that_was_not_sent_in_time_leaves_other_votes(vote: Decision, grant: Grant) -> None:
    status = build_status(None, vote, grants=[grant], settings=SOON, now=60)
    assert not any(isinstance(step, VoidVotes) for step in due_transitions(status))


def test_nothing_is_claimed_if_the_revision_is_not_that_of_the_stored_event() -> None:
    votes = [replace(vote, revision="x") for vote in VOTES]
    grant = build_grant(revision="x")
    status = build_status(None, *votes)
    other = replace(status, occurrence=replace(status.occurrence, revision="x"))
    assert open_grant_failure_reason(grant, other) is None
    assert not can_claim_grant(grant, other)
