"""What the rules say: tables of single decisions, and laws that hold for every standing."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.approvals import ApprovalsSettings, Quorum
from relay.approvals.authorize import HOLD_NOTICE, Refusal, authorize
from relay.approvals.request import DecisionRequest
from relay.approvals.status import ApprovalStatus, approval_state
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
from relay.events.model import Event
from relay.outbox import Decision, Grant, Mode
from tests.approvals.builders import (
    SETTINGS,
    SPEAKS,
    approval,
    caller,
    decided,
    event,
    granted,
    standing,
)
from tests.approvals.manual_clock import NOON

USER = event(event_source="User")
FREEZE = event(event_type="Freeze")
ONE = event(event_type="Redeploy")
STARTED = event(event_status="Started", not_before=None)


def at(seconds: float) -> Any:
    return NOON + timedelta(seconds=seconds)


# --- judge: what is refused, and in which order


def status(request: DecisionRequest, how: ApprovalStatus | None) -> int:
    refusal = authorize(request, how)
    return 202 if refusal is None else refusal.status


def test_an_unknown_event_is_404() -> None:
    assert status(approval(), None) == 404


REFUSED: list[tuple[str, int, DecisionRequest, ApprovalStatus]] = [
    ("a vote", 202, approval(), standing()),
    ("a vote, from one who is named and in no group", 202, approval(by="drain"), standing()),
    ("a hold", 202, approval("hold"), standing()),
    ("a vote when it has ended", 409, approval(), standing(live=False)),
    ("a hold when it has ended", 409, approval("hold"), standing(live=False)),
    (
        "a release when it has ended",
        409,
        approval("release"),
        standing(None, decided("hold"), live=False),
    ),
    ("a vote when it has started", 409, approval(of=STARTED), standing(STARTED)),
    ("a hold when it has started", 409, approval("hold"), standing(STARTED)),
    ("a release when it has started", 409, approval("release"), standing(STARTED, decided("hold"))),
    (
        "a vote when nobody knows that status",
        409,
        approval(of=event(event_status="Paused")),
        standing(event(event_status="Paused")),
    ),
    (
        "a vote without a status",
        409,
        approval(of=event(event_status=None)),
        standing(event(event_status=None)),
    ),
    (
        "a vote whatever the case of the status",
        202,
        approval(of=event(event_status="SCHEDULED")),
        standing(event(event_status="SCHEDULED")),
    ),
    (
        "a hold when nobody knows that status",
        202,
        approval("hold"),
        standing(event(event_status="Paused")),
    ),
    ("a vote just before voting closes", 202, approval(), standing(now=839.9)),
    ("a vote when voting closes", 409, approval(), standing(now=840)),
    (
        "a vote just before NotBefore where it closes no sooner",
        202,
        approval(of=ONE),
        standing(ONE, now=899.9),
    ),
    ("a vote at NotBefore", 409, approval(of=ONE), standing(ONE, now=900)),
    (
        "a vote without NotBefore, late as it may be",
        202,
        approval(of=event(due=None)),
        standing(event(due=None), now=1e6),
    ),
    ("a hold after voting closed", 202, approval("hold"), standing(now=840)),
    ("a hold at NotBefore", 409, approval("hold"), standing(now=900)),
    (
        "a release after voting closed",
        202,
        approval("release"),
        standing(None, decided("hold"), now=840),
    ),
    ("a vote for another revision", 409, approval(revision="x"), standing()),
    ("a hold for another revision", 202, approval("hold", revision="x"), standing()),
    (
        "a release for another revision",
        202,
        approval("release", revision="x"),
        standing(None, decided("hold")),
    ),
    ("a release where nothing is held", 409, approval("release"), standing()),
    (
        "a release of an expired hold",
        409,
        approval("release"),
        standing(None, decided("hold", expires=10), now=10),
    ),
    (
        "a release just before the hold expires",
        202,
        approval("release"),
        standing(None, decided("hold", expires=10), now=9.9),
    ),
    (
        "a release of another's hold",
        403,
        approval("release"),
        standing(None, decided("hold", "bob")),
    ),
    (
        "a release of another's hold by the operator",
        202,
        approval("release", caller("op", "operate")),
        standing(None, decided("hold", "bob")),
    ),
    (
        "a release by its holder without the right",
        403,
        approval("release", caller("alice", "read")),
        standing(None, decided("hold")),
    ),
    ("a hold before the claim", 202, approval("hold"), standing(grants=[granted()])),
    ("a hold after the claim", 409, approval("hold"), standing(grants=[granted("sent")])),
    ("a hold after it was accepted", 409, approval("hold"), standing(grants=[granted("accepted")])),
    (
        "a hold after it was given up",
        202,
        approval("hold"),
        standing(grants=[granted("refused", status=400)]),
    ),
    (
        "a vote after IMDS refused it",
        409,
        approval(),
        standing(grants=[granted("refused", status=400)]),
    ),
    (
        "a vote after IMDS refused another state",
        202,
        approval(),
        standing(grants=[granted("refused", revision="x", status=400)]),
    ),
    (
        "a vote after an earlier grant was given up",
        202,
        approval(),
        standing(grants=[granted("failed")]),
    ),
    ("a vote without the right", 403, approval(by=caller("alice", "read", "hold")), standing()),
    (
        "a hold without the right",
        403,
        approval("hold", caller("alice", "read", "approve")),
        standing(),
    ),
    (
        "a vote for a machine of another's",
        403,
        approval(by=caller(resources=("web-*",))),
        standing(),
    ),
    ("a vote for one's own machine", 202, approval(by=caller(resources=("DB-*",))), standing()),
    (
        "a vote where one of two machines is another's",
        403,
        approval(by=caller(resources=("db-*",)), of=event(resources=("db-1", "web-1"))),
        standing(event(resources=("db-1", "web-1"))),
    ),
    (
        "a vote, limited, where no machine is named",
        403,
        approval(by=caller(resources=("*",)), of=event(resources=())),
        standing(event(resources=())),
    ),
    (
        "a vote, unlimited, where no machine is named",
        202,
        approval(of=event(resources=())),
        standing(event(resources=())),
    ),
    (
        "a hold on a machine of another's",
        403,
        approval("hold", caller(resources=("web-*",))),
        standing(),
    ),
    ("a vote without a rule", 403, approval(of=FREEZE), standing(FREEZE)),
    ("a hold without a rule", 202, approval("hold", of=FREEZE), standing(FREEZE)),
    ("a vote from one who is not asked", 403, approval(by="eve"), standing()),
    (
        "a vote from one who is asked by another rule only",
        403,
        approval(by="drain", of=ONE),
        standing(ONE),
    ),
    ("a hold from one who has no vote", 202, approval("hold", "eve"), standing()),
    (
        "a vote of anybody where the rule is automatic",
        202,
        approval(by="eve", of=USER),
        standing(USER),
    ),
    ("a vote while off", 503, approval(), standing(mode="off")),
    ("a hold while off", 503, approval("hold"), standing(mode="off")),
    ("a vote in a dry run", 202, approval(), standing(mode="dry-run")),
    ("409 comes before 403", 409, approval(by="eve", revision="x"), standing()),
    ("403 comes before 503", 403, approval(by="eve"), standing(mode="off")),
    ("409 comes before 503", 409, approval(revision="x"), standing(mode="off")),
]


@pytest.mark.parametrize(
    ("expected", "request_", "how"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_request_is_judged(expected: int, request_: DecisionRequest, how: ApprovalStatus) -> None:
    assert status(request_, how) == expected


def test_too_late_says_when_it_was_and_when_it_is() -> None:
    refusal = authorize(approval(), standing(now=841))
    assert refusal == Refusal(
        409, "too late: it closed at 2026-04-11T12:14:00Z, it is 2026-04-11T12:14:01Z"
    )


@pytest.mark.parametrize(
    ("uncovered", "resources", "pronoun"),
    [
        ("db-2", ("web-1", "db-2"), "it"),
        ("db-2, db-3", ("web-1", "db-2", "db-3"), "them"),
        (
            "db-0, db-1, db-2, db-3, db-4, db-5, db-6, db-7, db-8, db-9 and 2 more",
            tuple(f"db-{number}" for number in range(12)),
            "them",
        ),
    ],
    ids=["one resource", "two resources", "too many to name"],
)
def test_a_refusal_names_the_resources_that_the_caller_may_not_decide_for(
    uncovered: str, resources: tuple[str, ...], pronoun: str
) -> None:
    about = event(resources=resources)
    request = approval(by=caller(resources=("web-*",)), of=about)
    assert authorize(request, standing(about)) == Refusal(
        403,
        f"you may not decide for {uncovered}: your rights (resources) do not cover {pronoun}",
    )


def test_an_event_without_resources_is_refused_to_a_caller_with_limited_rights() -> None:
    about = event(resources=())
    request = approval(by=caller(resources=("*",)), of=about)
    assert authorize(request, standing(about)) == Refusal(
        403, "you may not decide for an event that names no resource"
    )


def test_a_changed_event_says_which_revision_is_the_current_one() -> None:
    refusal = authorize(approval(revision="x"), standing())
    assert refusal is not None
    assert event().revision in refusal.reason


@pytest.mark.parametrize(
    ("request_", "how"),
    [
        (approval("release"), standing()),
        (approval("release"), standing(None, decided("hold", "bob"))),
        (approval("hold"), standing(grants=[granted("sent")])),
    ],
)
def test_every_text_about_a_hold_says_what_it_does_not_stop(
    request_: DecisionRequest, how: ApprovalStatus
) -> None:
    refusal = authorize(request_, how)
    assert refusal is not None
    assert HOLD_NOTICE in refusal.reason
    assert all(
        word in HOLD_NOTICE for word in ("NotBefore", "other relays", "Azure Resource Manager")
    )


def test_a_not_before_at_the_beginning_of_time_breaks_nothing() -> None:
    """.NET writes "none" as the year 1, from which nothing can be taken away."""
    old = event(not_before="0001-01-01T00:00:00Z")
    assert standing(old).voting_closes_at == old.not_before_time
    assert status(approval(of=old), standing(old)) == 409


# --- how many votes there are


@pytest.mark.parametrize(
    ("votes", "decisions"),
    [
        (0, []),
        (1, [decided()]),
        (1, [decided(), decided(approval_id="again")]),
        (2, [decided(), decided(by="bob")]),
        (1, [decided(), decided(by="bob", revision="x")]),
        (1, [decided(), decided(by="bob", expires=5)]),
        (2, [decided(), decided(by="bob", expires=5.1)]),
        (1, [decided(), decided(by="eve")]),
        (1, [decided(), decided(by="bob", dry_run=True)]),
        (0, [decided("hold"), decided("hold", "bob")]),
    ],
)
def test_a_quorum_counts_principals_who_may_vote(votes: int, decisions: list[Decision]) -> None:
    """Of each one vote, for the state as it is, neither expired nor of a dry run."""
    how = standing(None, *decisions, now=5)
    assert (how.vote_count, how.is_satisfied) == (votes, votes >= 2)


def test_votes_of_a_dry_run_count_in_a_dry_run_and_so_do_those_that_were_meant() -> None:
    votes = decided(dry_run=True), decided(by="bob")
    assert standing(None, *votes, mode="dry-run").vote_count == 2
    assert standing(None, *votes).vote_count == 1
    assert standing(None, *votes, mode="off").vote_count == 1


def test_an_automatic_rule_asks_for_no_votes_and_counts_none() -> None:
    how = standing(USER, decided(of=USER))
    assert (how.votes_required, how.vote_count, how.is_satisfied) == (0, 0, True)


def test_the_first_rule_that_matches_decides_alone() -> None:
    both = event(event_source="User", event_type="Reboot")
    assert standing(both).rule is SETTINGS.rules[0]
    assert standing().rule is SETTINGS.rules[1]
    assert standing(FREEZE).rule is None


# --- step: what follows


VOTES = decided(), decided(by="bob")
REBOOT = SETTINGS.rules[1]


def allows(how: ApprovalStatus) -> bool:
    return any(isinstance(effect, CreateGrant) for effect in next_transitions(how))


@pytest.mark.parametrize(
    ("allowed", "how"),
    [
        (True, standing(None, *VOTES)),
        (True, standing(USER)),
        (True, standing(USER, mode="dry-run")),
        (True, standing(None, *VOTES, now=299)),
        (False, standing(None, *VOTES, now=300)),
        (
            True,
            standing(
                event(due=None),
                *(replace(vote, revision=event(due=None).revision) for vote in VOTES),
                now=299,
            ),
        ),
        (True, standing(None, *VOTES, grants=[granted("failed")])),
        (True, standing(None, *VOTES, grants=[granted("failed", status=400)])),
        (True, standing(None, *VOTES, grants=[granted(revision="x")])),
        (True, standing(None, *VOTES, grants=[granted("accepted", revision="x")])),
        (True, standing(None, *VOTES, grants=[granted(dry_run=True)])),
        (True, standing(USER, grants=[granted(of=USER)], mode="dry-run")),
        (True, standing(None, *VOTES, decided("hold", expires=5), now=5)),
        (False, standing(None, *VOTES[:1])),
        (False, standing(FREEZE)),
        (False, standing(USER, mode="off")),
        (False, standing(USER, live=False)),
        (False, standing(event(event_source="User", event_status="Started"))),
        (False, standing(event(event_source="User", event_status="Paused"))),
        (False, standing(event(event_source="User", event_status=None))),
        (False, standing(USER, now=900)),
        (False, standing(None, *VOTES, now=900)),
        (False, standing(None, *VOTES, decided("hold", "eve"))),
        (False, standing(None, *VOTES, decided("hold", "eve", revision="x"))),
        (False, standing(USER, decided("hold", expires=5), now=4.9)),
        (False, standing(None, *VOTES, grants=[granted()])),
        (False, standing(None, *VOTES, grants=[granted("sent")])),
        (False, standing(None, *VOTES, grants=[granted("sent", revision="x")])),
        (False, standing(None, *VOTES, grants=[granted("accepted")])),
        (False, standing(None, *VOTES, grants=[granted("refused", status=400)])),
        (False, standing(USER, grants=[granted(of=USER, dry_run=True)], mode="dry-run")),
    ],
)
def test_what_is_granted(allowed: bool, how: ApprovalStatus) -> None:
    assert allows(how) == allowed


@pytest.mark.parametrize(
    ("why", "how"),
    [
        (None, standing(None, decided())),
        ("changed", standing(None, decided(revision="x"))),
        ("changed", standing(STARTED, decided())),
        ("ended", standing(None, decided(), live=False)),
        ("ended", standing(None, decided(revision="x"), live=False)),
        ("expired", standing(None, decided(expires=5), now=5)),
        (None, standing(None, decided(expires=5), now=4.9)),
        ("expired", standing(None, decided(), now=900)),
        ("expired", standing(None, decided(expires=1000), now=900)),
        (None, standing(None, decided(), now=299.9)),
        ("expired", standing(None, decided(), now=300)),
        (None, standing(ONE, decided(by="eve", of=ONE), now=899.9)),
        (None, standing(None, decided(by="eve"))),
    ],
)
def test_why_a_vote_is_void(why: str | None, how: ApprovalStatus) -> None:
    expected: list[Transition] = [] if why is None else [VoidVotes(how.decisions, why)]  # type: ignore[arg-type]  # one of the three
    assert next_transitions(how) == expected


def test_votes_that_are_void_for_one_reason_are_told_together() -> None:
    gone = decided(revision="x"), decided(by="bob", revision="y")
    late = decided(by="drain", expires=5)
    assert next_transitions(standing(None, *gone, late, now=5)) == [
        VoidVotes(gone, "changed"),
        VoidVotes((late,), "expired"),
    ]


@pytest.mark.parametrize(
    "how",
    [
        standing(STARTED, decided(), grants=[granted("accepted")]),
        standing(None, decided(), grants=[granted("accepted")], live=False),
    ],
)
def test_votes_whose_start_request_was_accepted_have_served(how: ApprovalStatus) -> None:
    assert next_transitions(how) == [VoidVotes((decided(),), None)]


def test_votes_are_left_alone_while_their_start_request_is_in_flight() -> None:
    """Started was seen before the answer was: only the answer says whether the vote was void or has served."""
    how = standing(STARTED, decided(), grants=[granted("sent")])
    assert next_transitions(how, frozenset({1})) == []
    assert [type(effect) for effect in next_transitions(how)] == [VoidVotes, FailGrant]


def test_holds_outlive_the_event_and_of_their_end_nobody_is_told_then() -> None:
    """The same EventId may come back."""
    hold = decided("hold")
    assert next_transitions(standing(None, hold, live=False)) == []
    assert next_transitions(standing(None, decided("hold", expires=1), now=5, live=False)) == [
        VoidVotes((decided("hold", expires=1),), None)
    ]


def test_a_hold_survives_every_change_until_it_expires() -> None:
    hold = decided("hold", expires=100)
    for changed in (None, event(resources=("db-2",)), STARTED, USER):
        assert next_transitions(standing(changed, hold, now=99.9)) == []
    assert next_transitions(standing(None, hold, now=100)) == [ExpireHold(hold)]


def test_an_expired_hold_stops_nothing_any_more() -> None:
    hold = decided("hold", expires=5)
    assert next_transitions(standing(USER, hold, now=5)) == [
        ExpireHold(hold),
        CreateGrant(SETTINGS.rules[0]),
    ]


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (None, standing(None, *VOTES, grants=[granted()])),
        (None, standing(None, *VOTES, grants=[granted("sent")])),
        ("ended", standing(None, *VOTES, grants=[granted()], live=False)),
        ("started", standing(STARTED, *VOTES, grants=[granted()])),
        ("changed", standing(event(resources=("db-2",)), *VOTES, grants=[granted()])),
        ("NotBefore", standing(None, *VOTES, grants=[granted()], now=900)),
        (
            "expired",
            standing(None, VOTES[0], decided(by="bob", expires=5), grants=[granted()], now=5),
        ),
        ("rules", standing(FREEZE, grants=[granted(of=FREEZE)])),
        ("rules", standing(USER, grants=[granted(of=USER)], settings=ApprovalsSettings())),
        ("expired", standing(None, decided(), grants=[granted(dry_run=True)], mode="dry-run")),
    ],
)
def test_why_a_grant_is_given_up(words: str | None, how: ApprovalStatus) -> None:
    reason = failure_reason(how.grants[0], how)
    assert (reason is None) == (words is None)
    assert words is None or words in (reason or "")
    assert [effect for effect in next_transitions(how) if isinstance(effect, FailGrant)] == (
        [FailGrant(how.grants[0], reason)] if reason else []
    )


def test_a_claim_whose_outcome_nobody_knows_is_given_up_as_such() -> None:
    known = failure_reason(granted(), standing(STARTED))
    unknown = failure_reason(granted("sent"), standing(STARTED))
    assert known is not None
    assert unknown == f"{known}; whether IMDS took the StartRequest is not known"


def test_what_is_in_flight_is_not_given_up() -> None:
    how = standing(STARTED, grants=[granted("sent")])
    assert next_transitions(how, frozenset({1})) == []
    assert [type(effect) for effect in next_transitions(how, frozenset({2}))] == [FailGrant]


@pytest.mark.parametrize("state", ["accepted", "failed", "refused"])
def test_what_has_its_answer_is_given_up_by_nobody(state: Any) -> None:
    assert next_transitions(standing(None, grants=[granted(state)], live=False)) == []


# --- the last check


@pytest.mark.parametrize(
    ("expected", "grant", "how"),
    [
        (True, granted(), standing(None, *VOTES)),
        (True, granted("sent"), standing(None, *VOTES)),
        (True, granted(of=USER), standing(USER)),
        (False, granted(), standing(None, *VOTES, mode="off")),
        (False, granted(), standing(None, *VOTES, mode="dry-run")),
        (False, granted(dry_run=True), standing(None, *VOTES)),
        (False, granted(), standing(None, *VOTES, decided("hold", "eve"))),
        (False, granted(), standing(None, *VOTES, live=False)),
        (False, granted(), standing(None, *VOTES, now=900)),
        (False, granted(revision="x"), standing(None, *VOTES)),
        (False, granted(), standing(None, VOTES[0])),
        (False, granted(), standing(None, VOTES[0], decided(by="bob", expires=1), now=1)),
        (False, granted(), standing(None, VOTES[0], decided(by="bob", dry_run=True))),
        (
            False,
            granted(of=STARTED),
            standing(STARTED, *(replace(vote, revision=STARTED.revision) for vote in VOTES)),
        ),
        (
            False,
            granted(of=event(event_source="User", event_status="Paused")),
            standing(event(event_source="User", event_status="Paused")),
        ),
    ],
)
def test_the_last_check_asks_everything_again(
    expected: bool, grant: Grant, how: ApprovalStatus
) -> None:
    assert can_claim(grant, how) == expected


def test_a_vote_goes_with_the_rights_of_who_gave_it() -> None:
    """A client that was removed since, or may approve no more, or not for these machines, has no vote any more."""
    how = standing(None, *VOTES)
    assert how.is_satisfied
    for speaks in ({"client:alice": None}, {**SPEAKS, "client:bob": ("web-*",)}):
        left = replace(how, client_resources=speaks)
        assert [vote.principal for vote in left.counted_votes] == ["client:alice"]
        assert not can_claim(granted(), replace(left, grants=(granted(),)))
        assert [
            effect
            for effect in next_transitions(replace(left, grants=(granted(),)))
            if isinstance(effect, FailGrant)
        ]
    people = tuple(replace(vote, principal=f"local:{vote.approval_id}") for vote in VOTES)
    rules = SETTINGS.model_copy(update={"groups": {"oncall": [vote.principal for vote in people]}})
    assert standing(
        None, *people, settings=rules
    ).is_satisfied  # whose rights are not the configuration's


def test_a_vote_counts_no_longer_than_the_rule_of_now_allows() -> None:
    """Given under a rule that let it count until NotBefore, weighed under one that does not: hours turn, and files change."""
    given = decided(expires=None)
    assert standing(None, given, now=299).counted_votes
    assert not standing(None, given, now=300).counted_votes
    assert standing(None, decided(expires=60), now=59).counted_votes
    assert not standing(None, decided(expires=60), now=60).counted_votes


# --- when to look again


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        (None, standing()),
        (300, standing(None, decided())),
        (900, standing(ONE, decided(of=ONE))),
        (5, standing(None, decided(expires=5))),
        (5, standing(None, decided("hold", expires=5), decided(expires=7))),
        (7, standing(None, decided("hold", expires=5), decided(expires=7), now=5)),
        (900, standing(grants=[granted()])),
        (900, standing(grants=[granted("sent")])),
        (None, standing(grants=[granted("accepted")])),
        (None, standing(None, decided(), now=900)),
        (300, standing(event(due=None), decided())),
        (None, standing(replace(ONE, not_before=None), decided(of=ONE))),
    ],
)
def test_when_time_alone_changes_something(moment: float | None, how: ApprovalStatus) -> None:
    assert next_change_at(how) == (None if moment is None else at(moment))


# --- how it is shown


@pytest.mark.parametrize(
    ("state", "how"),
    [
        ("pending", standing()),
        ("pending", standing(mode="dry-run")),
        ("none", standing(mode="off")),
        ("none", standing(FREEZE)),
        ("none", standing(live=False)),
        ("none", standing(STARTED)),
        ("none", standing(STARTED, decided("hold"))),
        ("held", standing(None, decided("hold"))),
        ("held", standing(None, decided("hold"), grants=[granted()])),
        ("held", standing(FREEZE, decided("hold"))),
        ("pending", standing(None, decided("hold", expires=5), now=5)),
        ("granted", standing(None, *VOTES, grants=[granted()])),
        ("pending", standing(None, grants=[granted(revision="x")])),
        ("granted", standing(None, grants=[granted(dry_run=True)], mode="dry-run")),
        ("pending", standing(None, grants=[granted(dry_run=True)])),
        ("none", standing(grants=[granted("failed", dry_run=True)], live=False)),
        ("sent", standing(grants=[granted("sent")])),
        ("sent", standing(grants=[granted("sent")], now=901)),
        ("accepted", standing(grants=[granted("accepted")])),
        ("accepted", standing(STARTED, grants=[granted("accepted")])),
        ("accepted", standing(grants=[granted("accepted")], live=False)),
        ("accepted", standing(grants=[granted("failed"), granted("accepted", id=2)])),
        ("failed", standing(grants=[granted("failed")], live=False)),
        ("failed", standing(grants=[granted("failed")], now=901)),
        ("failed", standing(grants=[granted("refused", status=400)])),
        ("pending", standing(grants=[granted("failed")])),
        ("pending", standing(grants=[granted("refused", revision="x", status=400)])),
    ],
)
def test_how_an_approval_is_shown(state: str, how: ApprovalStatus) -> None:
    assert approval_state(how) == state


# --- laws

_REVISIONS = st.sampled_from([event().revision, USER.revision, "x"])
_EVENTS = st.sampled_from(
    [event(), USER, FREEZE, ONE, STARTED, event(due=None), event(event_status="Paused")]
)
_DECISIONS = st.builds(
    lambda kind, by, expires, dry, revision, number: decided(
        kind, by, expires=expires, dry_run=dry, revision=revision, approval_id=str(number)
    ),
    st.sampled_from(["approve", "approve", "hold"]),
    st.sampled_from(["alice", "bob", "drain", "eve"]),
    st.sampled_from([None, 5.0, 100.0, 1000.0]),
    st.booleans(),
    _REVISIONS,
    st.integers(0, 10**9),
)
_GRANTS = st.lists(
    st.builds(
        # What is granted as a dry run is never sent.
        lambda state, revision, dry, bad: granted(
            state,
            revision=revision,
            dry_run=dry and state not in ("sent", "accepted"),
            status=400 if bad else None,
        ),
        st.sampled_from(["granted", "sent", "accepted", "failed", "refused"]),
        _REVISIONS,
        st.booleans(),
        st.booleans(),
    ),
    max_size=3,
).map(lambda grants: tuple(replace(grant, id=number) for number, grant in enumerate(grants, 1)))


@st.composite
def standings(draw: st.DrawFn) -> ApprovalStatus:
    """Anything that could stand, and much that could not."""
    of: Event = draw(_EVENTS)
    decisions = draw(st.lists(_DECISIONS, max_size=5, unique_by=lambda one: one.approval_id))
    mode: Mode = draw(st.sampled_from(["on", "on", "dry-run", "off"]))
    now = draw(st.sampled_from([0.0, 4.9, 5.0, 99.0, 100.0, 899.0, 900.0, 1000.0]))
    return standing(
        of,
        *decisions,
        grants=draw(_GRANTS),
        mode=mode,
        now=now,
        live=draw(st.sampled_from([True, True, True, False])),
    )


def _has_quorum(how: ApprovalStatus) -> bool:
    """The rule is satisfied, said once more and in another way."""
    if how.rule is None:
        return False
    if not isinstance(how.rule.approve, Quorum):
        return True
    who = {
        one.principal.removeprefix("client:")
        for one in how.decisions
        if one.decision == "approve"
        and one.revision == how.occurrence.revision
        and (one.expires is None or one.expires > how.now)
        and (how.mode == "dry-run" or not one.dry_run)
    }
    may = {"databases": {"alice", "bob", "drain"}, "one": {"alice", "bob"}}[how.rule.name]
    return len(who & may) >= {"databases": 2, "one": 1}[how.rule.name]


def _may_start(how: ApprovalStatus) -> bool:
    of = how.occurrence.event
    held = any(
        one.decision == "hold" and (one.expires is None or one.expires > how.now)
        for one in how.decisions
    )
    return (
        how.occurrence.live
        and of.event_status == "Scheduled"
        and (of.not_before_time is None or how.now < of.not_before_time)
        and not held
        and _has_quorum(how)
    )


@given(standings())
def test_nothing_is_claimed_without_a_quorum_or_late_or_held_or_changed(
    how: ApprovalStatus,
) -> None:
    for grant in how.grants:
        if grant.state in ("granted", "sent"):
            wanted = (
                how.mode == "on"
                and not grant.dry_run
                and grant.revision == how.occurrence.revision
                and _may_start(how)
            )
            assert can_claim(grant, how) == wanted


@given(standings())
def test_what_is_allowed_could_start_now_and_nothing_else_is_under_way(how: ApprovalStatus) -> None:
    if allows(how):
        assert _may_start(how)
        assert how.mode != "off"
        assert all(grant.state != "sent" for grant in how.grants)


@given(standings(), st.frozensets(st.integers(1, 3)))
def test_each_effect_is_about_what_it_should_be(
    how: ApprovalStatus, in_flight: frozenset[int]
) -> None:
    effects = next_transitions(how, in_flight)
    discounted = [
        one.approval_id
        for effect in effects
        if isinstance(effect, VoidVotes)
        for one in effect.decisions
    ]
    expired = [effect.hold.approval_id for effect in effects if isinstance(effect, ExpireHold)]
    failed = [effect.grant for effect in effects if isinstance(effect, FailGrant)]
    assert len({*discounted, *expired}) == len(discounted) + len(expired)
    assert all(grant.state in ("granted", "sent") and grant.id not in in_flight for grant in failed)
    assert sum(isinstance(effect, CreateGrant) for effect in effects) <= 1
    if not how.occurrence.live and not in_flight:
        left = [one for one in how.decisions if one.approval_id not in discounted]
        assert all(one.decision == "hold" and not how.is_expired(one) for one in left)
        assert len(failed) == sum(grant.state in ("granted", "sent") for grant in how.grants)


def _after(how: ApprovalStatus, effects: list[Transition]) -> ApprovalStatus:
    for effect in effects:
        match effect:
            case VoidVotes(decisions, _):
                how = replace(
                    how, decisions=tuple(one for one in how.decisions if one not in decisions)
                )
            case ExpireHold(hold):
                how = replace(how, decisions=tuple(one for one in how.decisions if one != hold))
            case FailGrant(grant, _):
                how = replace(
                    how,
                    grants=tuple(
                        replace(one, state="failed") if one == grant else one for one in how.grants
                    ),
                )
            case CreateGrant(rule):
                new = granted(
                    id=len(how.grants) + 1,
                    revision=how.occurrence.revision,
                    rule=rule.name,
                    dry_run=how.mode == "dry-run",
                )
                how = replace(how, grants=(*how.grants, new))
    return how


@given(standings())
def test_steps_come_to_rest(how: ApprovalStatus) -> None:
    """Two passes, since giving up what was sent can make room for a grant; then nothing is left to be done."""
    for _ in range(2):
        how = _after(how, next_transitions(how))
    assert next_transitions(how) == []
    assert not (
        how.mode == "on"
        and _may_start(how)
        and not how.refused_by_imds
        and how.active_grant is None
    )


@given(standings())
def test_nothing_changes_before_the_moment_that_was_named(how: ApprovalStatus) -> None:
    """At rest, nothing follows from time alone until then."""
    for _ in range(2):
        how = _after(how, next_transitions(how))
    moment = next_change_at(how)
    for later in (1.0, 4.9, 5.0, 50.0, 100.0, 500.0, 900.0, 2000.0):
        then = NOON + timedelta(seconds=later)
        if then > how.now and (moment is None or then < moment):
            assert next_transitions(replace(how, now=then)) == []
