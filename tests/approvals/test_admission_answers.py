"""What a refusal says, what an accepted decision is and ends, and what its answer has."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from relay.approvals import ApprovalsSettings, admission
from relay.approvals.admission import (
    HOLD_NOTICE,
    SENT_BEFORE_NOTICE,
    Refusal,
    ambiguous_scope_refusal,
    build_accepted_answer,
    find_decision_refusal,
    find_decisions_to_end,
    hold_caveat,
)
from relay.approvals.request import Caller, DecisionKind, DecisionRequest, Rights
from relay.approvals.status import ApprovalStatus
from relay.outbox import Decision, Mode, StandingHold
from tests.approvals.builders import (
    FREEZE,
    OPERATOR,
    REBOOT,
    STARTED,
    USER_REBOOT,
    build_caller,
    build_decision,
    build_event,
    build_grant,
    build_occurrence,
    build_request,
    build_status,
)
from tests.approvals.manual_clock import NOON

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
        number=minutes,
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


# --- what a refusal says


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


def test_the_notices_about_holds_say_what_can_still_happen() -> None:
    assert HOLD_NOTICE == (
        "a hold stops this relay alone: Azure proceeds at NotBefore regardless, "
        "and other relays and Azure Resource Manager can approve"
    )
    assert SENT_BEFORE_NOTICE == (
        "a StartRequest was sent before, and Azure may have accepted it: the event can start at "
        "any moment; no further StartRequest is sent while it is held"
    )


@pytest.mark.parametrize("scopes", [("a", "b", "c"), ("c", "b", "a")])
def test_an_event_of_several_scopes_is_refused_with_their_names(scopes: tuple[str, ...]) -> None:
    assert ambiguous_scope_refusal([build_occurrence(scope=scope) for scope in scopes]) == Refusal(
        422, "expected the scope, because this EventId is known in several: a, b, c", "scope"
    )


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (10, "w-0, w-1, w-2, w-3, w-4, w-5, w-6, w-7, w-8, w-9"),
        (11, "w-0, w-1, w-2, w-3, w-4, w-5, w-6, w-7, w-8, w-9 and 1 more"),
    ],
)
def test_a_refusal_names_ten_resources_and_counts_the_rest(count: int, named: str) -> None:
    about = build_event(resources=tuple(f"w-{number}" for number in range(count)))
    refusal = find_decision_refusal(
        build_request("hold", build_caller(resources=("db-*",)), about), build_status(about)
    )
    assert refusal is not None
    assert refusal.reason.startswith(f"you may not decide for {named}: ")


# --- who may


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


def machine(decision: DecisionKind = "approve", name: str = "prod/db-1") -> DecisionRequest:
    """The request of a machine."""
    caller = Caller(f"vm:{name}", "fleet", Rights(frozenset({"approve", "hold"})))
    return build_request(decision, caller, BOTH)


ALONE = "vm:prod/db-1 may decide for itself only, "


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


# --- what a decision ends


VOTE, HOLD = build_decision(), build_decision("hold")
TRIED_VOTE = build_decision(approval_id="tried vote", dry_run=True)
TRIED_HOLD = build_decision("hold", approval_id="tried hold", dry_run=True)


@pytest.mark.parametrize(
    ("ended", "decision_request", "decisions"),
    [
        ([VOTE], build_request(), (VOTE, HOLD)),
        ([HOLD], build_request("hold"), (VOTE, HOLD)),
        ([HOLD], build_request("hold", revision="x"), (VOTE, HOLD)),
        ([], build_request(revision="x"), (VOTE, HOLD)),
        ([], build_request(by="bob"), (VOTE, HOLD)),
        ([HOLD], build_request("release"), (VOTE, HOLD)),
        ([], build_request("release", "bob"), (VOTE, HOLD)),
        ([HOLD], build_request("release", OPERATOR), (VOTE, HOLD)),
    ],
)
def test_a_decision_replaces_what_the_caller_decided_and_a_release_ends_holds_alone(
    ended: list[Decision], decision_request: DecisionRequest, decisions: tuple[Decision, ...]
) -> None:
    assert find_decisions_to_end(decision_request, build_status(None, *decisions)) == ended


@pytest.mark.parametrize(
    ("ended", "decision_request"),
    [
        ([TRIED_VOTE], build_request()),
        ([TRIED_HOLD], build_request("hold")),
        ([TRIED_HOLD], build_request("release")),
        ([TRIED_HOLD], build_request("release", OPERATOR)),
    ],
)
def test_a_dry_run_ends_no_decision_that_counts_outside_of_it(
    ended: list[Decision], decision_request: DecisionRequest
) -> None:
    decisions = VOTE, HOLD, TRIED_VOTE, TRIED_HOLD
    assert (
        find_decisions_to_end(decision_request, build_status(None, *decisions, mode="dry-run"))
        == ended
    )


@pytest.mark.parametrize("mode", ["on", "off"])
def test_outside_of_dry_runs_the_decisions_of_dry_runs_end_too(mode: Mode) -> None:
    status = build_status(None, HOLD, TRIED_HOLD, mode=mode)
    assert find_decisions_to_end(build_request("release"), status) == [HOLD, TRIED_HOLD]


@pytest.mark.parametrize(
    ("decision", "seconds"), [("approve", 300.0), ("hold", 60.0), ("release", None)]
)
def test_a_vote_expires_by_its_rule_a_hold_by_the_settings_and_a_release_never(
    decision: DecisionKind, seconds: float | None
) -> None:
    built = admission.build_decision(
        build_request(decision), build_status(), approval_id="a", hold_expires=60.0
    )
    assert built.expires == (None if seconds is None else NOON + timedelta(seconds=seconds))


# --- what the answer has


@pytest.mark.parametrize(
    ("decision", "status", "notice"),
    [
        ("hold", build_status(), None),
        ("hold", build_status(grants=SENT), SENT_BEFORE_NOTICE),
        ("hold", build_status(grants=[build_grant("refused", status=400)]), None),
        ("approve", build_status(grants=SENT), None),
        ("release", build_status(grants=SENT), None),
    ],
)
def test_the_answer_to_a_hold_alone_says_that_it_may_come_too_late(
    decision: DecisionKind, status: ApprovalStatus, notice: str | None
) -> None:
    answer = build_accepted_answer(build_request(decision), HOLD, status)
    assert answer.body.get("notice") == notice


def test_what_a_hold_does_not_stop_depends_on_what_was_sent() -> None:
    assert hold_caveat(build_status()) == HOLD_NOTICE
    assert hold_caveat(build_status(grants=SENT)) == f"{SENT_BEFORE_NOTICE}; {HOLD_NOTICE}"


@pytest.mark.parametrize(
    ("state", "decision", "status"),
    [
        ("held", "hold", build_status(None, HOLD)),
        ("pending", "approve", build_status(USER_REBOOT)),
        ("pending", "approve", build_status(None, VOTE)),
        ("granted", "approve", build_status(None, VOTE, grants=[build_grant()])),
        ("released", "release", build_status()),
        ("pending", "release", build_status(None, VOTE)),
        ("granted", "release", build_status(grants=[build_grant()])),
    ],
)
def test_the_answer_says_how_the_event_stands(
    state: str, decision: DecisionKind, status: ApprovalStatus
) -> None:
    answer = build_accepted_answer(build_request(decision), VOTE, status)
    assert (answer.status, answer.body["state"]) == (202, state)
