"""Who may decide, and when it is too late: one table over every refusal."""

from __future__ import annotations

import pytest

from relay.approvals.authorize import HOLD_NOTICE, Refusal, authorize
from relay.approvals.request import DecisionRequest
from relay.approvals.status import ApprovalStatus
from tests.approvals.builders import (
    FREEZE,
    REDEPLOY,
    STARTED,
    USER_REBOOT,
    approval,
    caller,
    decided,
    event,
    granted,
    standing,
)


def http_status(request: DecisionRequest, status: ApprovalStatus | None) -> int:
    """202, or the status of the refusal."""
    refusal = authorize(request, status)
    return 202 if refusal is None else refusal.status


def test_an_unknown_event_is_404() -> None:
    assert http_status(approval(), None) == 404


REQUESTS: list[tuple[str, int, DecisionRequest, ApprovalStatus]] = [
    ("a vote", 202, approval(), standing()),
    ("a vote of a voter who is in no group", 202, approval(by="drain"), standing()),
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
        "a vote when the status is unknown",
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
        "a vote when the status is in upper case",
        202,
        approval(of=event(event_status="SCHEDULED")),
        standing(event(event_status="SCHEDULED")),
    ),
    (
        "a hold when the status is unknown",
        202,
        approval("hold"),
        standing(event(event_status="Paused")),
    ),
    ("a vote just before voting closes", 202, approval(), standing(now=839.9)),
    ("a vote when voting closes", 409, approval(), standing(now=840)),
    (
        "a vote just before NotBefore without close_before",
        202,
        approval(of=REDEPLOY),
        standing(REDEPLOY, now=899.9),
    ),
    ("a vote at NotBefore", 409, approval(of=REDEPLOY), standing(REDEPLOY, now=900)),
    (
        "a vote at any time without NotBefore",
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
    ("a release without a hold", 409, approval("release"), standing()),
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
        "a release of a hold of somebody else",
        403,
        approval("release"),
        standing(None, decided("hold", "bob")),
    ),
    (
        "a release of a hold of somebody else by an operator",
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
    (
        "a hold after the StartRequest was accepted",
        409,
        approval("hold"),
        standing(grants=[granted("accepted")]),
    ),
    (
        "a hold after the grant failed",
        202,
        approval("hold"),
        standing(grants=[granted("refused", status=400)]),
    ),
    (
        "a vote after IMDS refused the StartRequest",
        409,
        approval(),
        standing(grants=[granted("refused", status=400)]),
    ),
    (
        "a vote after IMDS refused a StartRequest for another revision",
        202,
        approval(),
        standing(grants=[granted("refused", revision="x", status=400)]),
    ),
    (
        "a vote after an earlier grant failed",
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
        "a vote for a resource that the rights do not cover",
        403,
        approval(by=caller(resources=("web-*",))),
        standing(),
    ),
    (
        "a vote for a resource that the rights cover",
        202,
        approval(by=caller(resources=("DB-*",))),
        standing(),
    ),
    (
        "a vote where the rights cover one of two resources",
        403,
        approval(by=caller(resources=("db-*",)), of=event(resources=("db-1", "web-1"))),
        standing(event(resources=("db-1", "web-1"))),
    ),
    (
        "a vote with limited rights for an event without resources",
        403,
        approval(by=caller(resources=("*",)), of=event(resources=())),
        standing(event(resources=())),
    ),
    (
        "a vote with unlimited rights for an event without resources",
        202,
        approval(of=event(resources=())),
        standing(event(resources=())),
    ),
    (
        "a hold on a resource that the rights do not cover",
        403,
        approval("hold", caller(resources=("web-*",))),
        standing(),
    ),
    ("a vote without a rule", 403, approval(of=FREEZE), standing(FREEZE)),
    ("a hold without a rule", 202, approval("hold", of=FREEZE), standing(FREEZE)),
    ("a vote of somebody who is no voter", 403, approval(by="eve"), standing()),
    (
        "a vote of a voter of another rule",
        403,
        approval(by="drain", of=REDEPLOY),
        standing(REDEPLOY),
    ),
    ("a hold of somebody who is no voter", 202, approval("hold", "eve"), standing()),
    (
        "a vote of anybody if the rule is automatic",
        202,
        approval(by="eve", of=USER_REBOOT),
        standing(USER_REBOOT),
    ),
    ("a vote while off", 503, approval(), standing(mode="off")),
    ("a hold while off", 503, approval("hold"), standing(mode="off")),
    ("a vote in a dry run", 202, approval(), standing(mode="dry-run")),
    ("409 comes before 403", 409, approval(by="eve", revision="x"), standing()),
    ("403 comes before 503", 403, approval(by="eve"), standing(mode="off")),
    ("409 comes before 503", 409, approval(revision="x"), standing(mode="off")),
]


@pytest.mark.parametrize(
    ("expected", "decision_request", "status"),
    [row[1:] for row in REQUESTS],
    ids=[row[0] for row in REQUESTS],
)
def test_a_request_is_accepted_or_refused(
    expected: int, decision_request: DecisionRequest, status: ApprovalStatus
) -> None:
    assert http_status(decision_request, status) == expected


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
    ("decision_request", "status"),
    [
        (approval("release"), standing()),
        (approval("release"), standing(None, decided("hold", "bob"))),
        (approval("hold"), standing(grants=[granted("sent")])),
    ],
    ids=["there is no hold", "somebody else took the hold", "the grant is claimed"],
)
def test_every_text_about_a_hold_says_what_it_does_not_stop(
    decision_request: DecisionRequest, status: ApprovalStatus
) -> None:
    refusal = authorize(decision_request, status)
    assert refusal is not None
    assert HOLD_NOTICE in refusal.reason
    assert all(
        word in HOLD_NOTICE for word in ("NotBefore", "other relays", "Azure Resource Manager")
    )


def test_a_not_before_at_the_beginning_of_time_breaks_nothing() -> None:
    """.NET writes "none" as the year 1; nothing can be subtracted from it."""
    old = event(not_before="0001-01-01T00:00:00Z")
    assert standing(old).voting_closes_at == old.not_before_time
    assert http_status(approval(of=old), standing(old)) == 409
