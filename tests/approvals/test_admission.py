"""Who may decide, and when it is too late: a table of answers, and one of what a refusal says."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.admission import find_decision_refusal
from relay.approvals.request import (
    HOLD_NOTICE,
    Caller,
    DecisionKind,
    DecisionRequest,
    Refusal,
    Rights,
)
from relay.approvals.status import ApprovalStatus
from relay.store import StandingHold
from tests.approvals.builders import (
    FREEZE,
    REBOOT,
    REDEPLOY,
    STARTED,
    USER_REBOOT,
    build_caller,
    build_decision,
    build_event,
    build_grant,
    build_request,
    build_status,
)
from tests.clocks import NOON


def http_status(request: DecisionRequest, status: ApprovalStatus | None) -> int:
    """202, or the status of the refusal."""
    refusal = find_decision_refusal(request, status)
    return 202 if refusal is None else refusal.status


REQUESTS: list[tuple[str, int, DecisionRequest, ApprovalStatus]] = [
    ("a vote", 202, build_request(), build_status()),
    ("a vote of a voter who is in no group", 202, build_request(by="drain"), build_status()),
    ("a hold", 202, build_request("hold"), build_status()),
    ("a hold when it has ended", 409, build_request("hold"), build_status(live=False)),
    (
        "a release when it has ended",
        409,
        build_request("release"),
        build_status(None, build_decision("hold"), live=False),
    ),
    ("a hold when it has started", 409, build_request("hold"), build_status(STARTED)),
    (
        "a release when it has started",
        409,
        build_request("release"),
        build_status(STARTED, build_decision("hold")),
    ),
    (
        "a vote when the status is in upper case",
        202,
        build_request(of=build_event(event_status="SCHEDULED")),
        build_status(build_event(event_status="SCHEDULED")),
    ),
    (
        "a hold when the status is unknown",
        202,
        build_request("hold"),
        build_status(build_event(event_status="Paused")),
    ),
    ("a vote just before voting closes", 202, build_request(), build_status(now=839.9)),
    ("a vote when voting closes", 409, build_request(), build_status(now=840)),
    (
        "a vote just before NotBefore without close_before",
        202,
        build_request(of=REDEPLOY),
        build_status(REDEPLOY, now=899.9),
    ),
    ("a vote at NotBefore", 409, build_request(of=REDEPLOY), build_status(REDEPLOY, now=900)),
    (
        "a vote at any time without NotBefore",
        202,
        build_request(of=build_event(due=None)),
        build_status(build_event(due=None), now=1e6),
    ),
    ("a hold after voting closed", 202, build_request("hold"), build_status(now=840)),
    ("a hold at NotBefore", 409, build_request("hold"), build_status(now=900)),
    (
        "a release after voting closed",
        202,
        build_request("release"),
        build_status(None, build_decision("hold"), now=840),
    ),
    ("a vote for another revision", 409, build_request(revision="x"), build_status()),
    ("a hold for another revision", 202, build_request("hold", revision="x"), build_status()),
    (
        "a release for another revision",
        202,
        build_request("release", revision="x"),
        build_status(None, build_decision("hold")),
    ),
    (
        "a release of an expired hold",
        409,
        build_request("release"),
        build_status(None, build_decision("hold", expires=10), now=10),
    ),
    (
        "a release just before the hold expires",
        202,
        build_request("release"),
        build_status(None, build_decision("hold", expires=10), now=9.9),
    ),
    (
        "a release of a hold of somebody else by an operator",
        202,
        build_request("release", build_caller("op", "operate")),
        build_status(None, build_decision("hold", "bob")),
    ),
    (
        "a release by its holder without the right",
        403,
        build_request("release", build_caller("alice", "read")),
        build_status(None, build_decision("hold")),
    ),
    ("a hold before the claim", 202, build_request("hold"), build_status(grants=[build_grant()])),
    (
        "a hold between two attempts",
        202,
        build_request("hold"),
        build_status(grants=[build_grant("sent")]),
    ),
    (
        "a hold while the next attempt is about to be claimed",
        202,
        build_request("hold"),
        build_status(grants=[build_grant("sent")], in_flight=[build_grant("sent", attempts=2)]),
    ),
    (
        "a hold after a StartRequest for an earlier revision was accepted",
        202,
        build_request("hold"),
        build_status(grants=[build_grant("accepted", revision="x")]),
    ),
    (
        "a hold after the StartRequest was accepted",
        409,
        build_request("hold"),
        build_status(grants=[build_grant("accepted")]),
    ),
    (
        "a hold after the grant failed",
        202,
        build_request("hold"),
        build_status(grants=[build_grant("refused", status=400)]),
    ),
    (
        "a vote after IMDS refused a StartRequest for another revision",
        202,
        build_request(),
        build_status(grants=[build_grant("refused", revision="x", status=400)]),
    ),
    (
        "a vote after an earlier grant failed",
        202,
        build_request(),
        build_status(grants=[build_grant("failed")]),
    ),
    (
        "a vote without the right",
        403,
        build_request(by=build_caller("alice", "read", "hold")),
        build_status(),
    ),
    (
        "a vote for a resource that the rights do not cover",
        403,
        build_request(by=build_caller(resources=("web-*",))),
        build_status(),
    ),
    (
        "a vote for a resource that the rights cover",
        202,
        build_request(by=build_caller(resources=("DB-*",))),
        build_status(),
    ),
    (
        "a vote where the rights cover one of two resources",
        403,
        build_request(
            by=build_caller(resources=("db-*",)), of=build_event(resources=("db-1", "web-1"))
        ),
        build_status(build_event(resources=("db-1", "web-1"))),
    ),
    (
        "a vote with limited rights for an event without resources",
        403,
        build_request(by=build_caller(resources=("*",)), of=build_event(resources=())),
        build_status(build_event(resources=())),
    ),
    (
        "a vote with unlimited rights for an event without resources",
        202,
        build_request(of=build_event(resources=())),
        build_status(build_event(resources=())),
    ),
    (
        "a hold on a resource that the rights do not cover",
        403,
        build_request("hold", build_caller(resources=("web-*",))),
        build_status(),
    ),
    ("a hold without a rule", 202, build_request("hold", of=FREEZE), build_status(FREEZE)),
    (
        "a vote of a voter of another rule",
        403,
        build_request(by="drain", of=REDEPLOY),
        build_status(REDEPLOY),
    ),
    ("a hold of somebody who is no voter", 202, build_request("hold", "eve"), build_status()),
    (
        "a vote of anybody if the rule is automatic",
        202,
        build_request(by="eve", of=USER_REBOOT),
        build_status(USER_REBOOT),
    ),
    ("a hold while off", 503, build_request("hold"), build_status(mode="off")),
    ("a vote in a dry run", 202, build_request(), build_status(mode="dry-run")),
    ("409 comes before 403", 409, build_request(by="eve", revision="x"), build_status()),
    ("403 comes before 503", 403, build_request(by="eve"), build_status(mode="off")),
    ("409 comes before 503", 409, build_request(revision="x"), build_status(mode="off")),
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
    refusal = find_decision_refusal(build_request(), build_status(now=841))
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
    about = build_event(resources=resources)
    request = build_request(by=build_caller(resources=("web-*",)), of=about)
    assert find_decision_refusal(request, build_status(about)) == Refusal(
        403,
        f"you may not decide for {uncovered}: your rights (resources) do not cover {pronoun}",
    )


def test_a_changed_event_says_which_revision_is_the_current_one() -> None:
    refusal = find_decision_refusal(build_request(revision="x"), build_status())
    assert refusal is not None
    assert build_event().revision in refusal.reason


def test_a_not_before_at_the_beginning_of_time_breaks_nothing() -> None:
    """.NET writes "none" as the year 1; nothing can be subtracted from it."""
    old = build_event(not_before="0001-01-01T00:00:00Z")
    assert build_status(old).voting_closes_at == old.not_before_time
    assert http_status(build_request(of=old), build_status(old)) == 409


NO_RESOURCES = build_event(resources=())


BOTH = build_event(resources=("db-1", "web-1"))


PAUSED = build_event(event_status="Paused")


WITHOUT_STATUS = build_event(event_status=None)


SENT = [build_grant("sent")]


LIMITED = Caller("slack:T1/U1", "slack", Rights(frozenset({"approve", "hold"}), None, (("db-*",),)))


def settings(approve: Any, **more: Any) -> ApprovalsSettings:
    """One rule that decides about everything."""
    return ApprovalsSettings.model_validate(
        {"rules": [{"name": "all", "approve": approve}], **more}
    )


EACH = settings({"each_resource": True, "from": ["client:alice", "slack:T1/U1", "vm:prod/*"]})


ONE = settings({"votes": 1, "from": ["client:alice", "vm:prod/*"]})


def standing_hold(principal: str, minutes: int) -> StandingHold:
    """A standing hold on every event."""
    return StandingHold(
        hold_id=f"{minutes:08d}-rest",
        principal=principal,
        channel="http",
        conditions="{}",
        within="[]",
        starts=NOON,
        ends=NOON + timedelta(minutes=minutes),
        reason="freeze",
        created=NOON,
    )


def machine(decision: DecisionKind = "approve", name: str = "prod/db-1") -> DecisionRequest:
    """The request of a machine."""
    caller = Caller(f"vm:{name}", "fleet", Rights(frozenset({"approve", "hold"})))
    return build_request(decision, caller, BOTH)


ALONE = "vm:prod/db-1 may decide for itself only, "


@pytest.mark.parametrize(
    ("expected", "decision_request", "status"),
    [
        (
            Refusal(404, "no such event in this scope; see GET /v1/events, or `imds-relay events`"),
            build_request(),
            None,
        ),
        (Refusal(409, "the event has ended"), build_request(), build_status(live=False)),
        (Refusal(409, "the event has started already"), build_request(), build_status(STARTED)),
        (
            Refusal(409, f"no hold is on this event; {HOLD_NOTICE}"),
            build_request("release"),
            build_status(),
        ),
        (
            Refusal(
                409,
                "only the standing hold 00000020 of client:bob until 2026-04-11T12:20:00Z and "
                "the standing hold 00000010 of client:eve until 2026-04-11T12:10:00Z is on this "
                f"event: end it with imds-relay holds end; {HOLD_NOTICE}",
            ),
            build_request("release"),
            replace(
                build_status(),
                standing_holds=(standing_hold("client:eve", 10), standing_hold("client:bob", 20)),
            ),
        ),
        (
            Refusal(409, f"too late: the StartRequest is on its way; {HOLD_NOTICE}"),
            build_request("hold"),
            build_status(grants=SENT, in_flight=SENT),
        ),
        (
            Refusal(409, "only a Scheduled event can be approved, this one is Paused"),
            build_request(of=PAUSED),
            build_status(PAUSED),
        ),
        (
            Refusal(409, "only a Scheduled event can be approved, this one is without a status"),
            build_request(of=WITHOUT_STATUS),
            build_status(WITHOUT_STATUS),
        ),
        (
            Refusal(409, "IMDS refused the StartRequest for this event (400)"),
            build_request(),
            build_status(grants=[build_grant("refused", status=400)]),
        ),
        (
            Refusal(403, "no rule of approvals.rules allows this event to be approved"),
            build_request(of=FREEZE),
            build_status(FREEZE),
        ),
        (
            Refusal(403, "rule databases takes votes from others only"),
            build_request(by="eve"),
            build_status(),
        ),
        (
            Refusal(403, "you may not hold: it is not in your rights (can)"),
            build_request("hold", build_caller("alice", "approve")),
            build_status(),
        ),
        (
            Refusal(403, "you may not release: neither hold nor operate is in your rights (can)"),
            build_request("release", build_caller("alice", "approve")),
            build_status(None, build_decision("hold")),
        ),
        (
            Refusal(
                403,
                "somebody else took the hold; they can release it, and so can anybody with the "
                f"right operate; {HOLD_NOTICE}",
            ),
            build_request("release"),
            build_status(None, build_decision("hold", "bob")),
        ),
        (
            Refusal(
                503, "approvals are off; an operator can turn them on: imds-relay approvals on"
            ),
            build_request(),
            build_status(mode="off"),
        ),
    ],
)
def test_a_refusal_says_why(
    expected: Refusal, decision_request: DecisionRequest, status: ApprovalStatus | None
) -> None:
    assert find_decision_refusal(decision_request, status) == expected


@pytest.mark.parametrize(
    ("refused", "decision_request", "status"),
    [
        (
            None,
            build_request("hold", of=build_event(due=None)),
            build_status(build_event(due=None)),
        ),
        (
            "you may not decide for an event that names no resource",
            build_request("hold", LIMITED, NO_RESOURCES),
            build_status(NO_RESOURCES, settings=EACH),
        ),
        (
            "you may not decide for web-1: your rights (resources) do not cover it",
            build_request("hold", build_caller(resources=("db-*",)), BOTH),
            build_status(BOTH, settings=EACH),
        ),
        (
            None,
            build_request(by=build_caller(resources=("db-*",)), of=BOTH),
            build_status(BOTH, settings=EACH),
        ),
        (None, build_request("hold", of=NO_RESOURCES), build_status(NO_RESOURCES, settings=EACH)),
    ],
    ids=[
        "a hold without NotBefore",
        "limits and no resources",
        "a hold must cover each resource also where votes need not",
        "a vote need not",
        "a hold of somebody without limits",
    ],
)
def test_a_caller_decides_only_for_what_their_rights_cover(
    refused: str | None, decision_request: DecisionRequest, status: ApprovalStatus
) -> None:
    refusal = find_decision_refusal(decision_request, status)
    assert (refusal.reason if refusal is not None else None) == refused


@pytest.mark.parametrize(
    ("refused", "decision_request", "approve"),
    [
        (None, machine(), EACH),
        (None, machine("hold"), EACH),
        (None, machine("hold"), ONE),
        (
            f"{ALONE}not for web-1: with each_resource: true, a rule takes a vote of each machine",
            machine(),
            ONE,
        ),
        (
            f"{ALONE}not for web-1: with each_resource: true, a rule takes a vote of each machine",
            machine(),
            settings("automatic"),
        ),
        (
            "vm:prod/db-2 may decide for itself only, and the event does not name it",
            machine(name="prod/db-2"),
            EACH,
        ),
        (
            "vm:test/db-1 may not decide about an event of scope prod",
            machine("hold", "test/db-1"),
            EACH,
        ),
    ],
)
def test_a_machine_decides_for_itself_alone(
    refused: str | None, decision_request: DecisionRequest, approve: ApprovalsSettings
) -> None:
    about = replace(decision_request, revision=BOTH.revision)
    refusal = find_decision_refusal(about, build_status(BOTH, settings=approve))
    assert refusal == (None if refused is None else Refusal(403, refused))


def test_a_machine_votes_for_a_whole_event_if_it_is_the_only_one() -> None:
    request = replace(machine(), revision=REBOOT.revision)
    assert find_decision_refusal(request, build_status(settings=ONE)) is None


@pytest.mark.parametrize(
    ("status", "holder"), [(None, "vm:prod/db-1"), (403, "vm:prod/db-2"), (403, "client:alice")]
)
def test_a_machine_releases_its_own_hold_even_if_the_event_does_not_name_it_any_more(
    status: int | None, holder: str
) -> None:
    """Nor does it release the hold of another if a person has both."""
    about = build_event(resources=("web-1",))
    people = {"people": {"fleet": ["vm:prod/*", "client:alice"]}}
    hold = build_decision("hold", principal=holder)
    refusal = find_decision_refusal(
        machine("release"),
        build_status(about, hold, settings=settings("automatic", **people)),
    )
    assert (refusal.status if refusal is not None else None) == status
