"""Laws of transitions and claims that hold for every status, also for those that cannot occur."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from relay.approvals.rules import Quorum
from relay.approvals.status import ApprovalStatus
from relay.approvals.transitions import (
    CreateGrant,
    ExpireHold,
    FailGrant,
    Transition,
    VoidVotes,
    can_claim_grant,
    due_transitions,
    next_change_at,
)
from relay.events.model import ScheduledEvent
from relay.store import Mode
from tests.approvals.builders import (
    FREEZE,
    REDEPLOY,
    STARTED,
    USER_REBOOT,
    build_decision,
    build_event,
    build_grant,
    build_status,
)
from tests.clocks import NOON

_VOTERS = {"databases": {"alice", "bob", "drain"}, "one": {"alice", "bob"}}
_VOTES_REQUIRED = {"databases": 2, "one": 1}
_PASSES_TO_REST = 2
"""A first pass can fail what was sent; only then can a second one grant."""

_REVISIONS = st.sampled_from([build_event().revision, USER_REBOOT.revision, "x"])
_EVENTS = st.sampled_from(
    [
        build_event(),
        USER_REBOOT,
        FREEZE,
        REDEPLOY,
        STARTED,
        build_event(due=None),
        build_event(event_status="Paused"),
    ]
)
_DECISIONS = st.builds(
    lambda kind, by, expires, dry_run, revision, number: build_decision(
        kind, by, expires=expires, dry_run=dry_run, revision=revision, approval_id=str(number)
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
        # A grant of a dry run is never sent.
        lambda state, revision, dry_run, is_refused: build_grant(
            state,
            revision=revision,
            dry_run=dry_run and state not in ("sent", "accepted"),
            status=400 if is_refused else None,
        ),
        st.sampled_from(["granted", "sent", "accepted", "failed", "refused"]),
        _REVISIONS,
        st.booleans(),
        st.booleans(),
    ),
    max_size=3,
).map(lambda grants: tuple(replace(grant, id=number) for number, grant in enumerate(grants, 1)))


@st.composite
def statuses(draw: st.DrawFn) -> ApprovalStatus:
    """Every status that can occur, and many that cannot."""
    about: ScheduledEvent = draw(_EVENTS)
    decisions = draw(
        st.lists(_DECISIONS, max_size=5, unique_by=lambda decision: decision.approval_id)
    )
    mode: Mode = draw(st.sampled_from(["on", "on", "dry-run", "off"]))
    now = draw(st.sampled_from([0.0, 4.9, 5.0, 99.0, 100.0, 899.0, 900.0, 1000.0]))
    live = draw(st.sampled_from([True, True, True, False]))
    return build_status(about, *decisions, grants=draw(_GRANTS), mode=mode, now=now, live=live)


def has_quorum(status: ApprovalStatus) -> bool:
    """Whether the rule is satisfied, written in another way than in the relay."""
    if status.rule is None:
        return False
    if not isinstance(status.rule.approve, Quorum):
        return True
    voters = {
        vote.principal.removeprefix("client:")
        for vote in status.decisions
        if vote.decision == "approve"
        and vote.revision == status.occurrence.revision
        and (vote.expires is None or vote.expires > status.now)
        and (status.mode == "dry-run" or not vote.dry_run)
    }
    name = status.rule.name
    return len(voters & _VOTERS[name]) >= _VOTES_REQUIRED[name]


def may_start(status: ApprovalStatus) -> bool:
    """Whether a StartRequest is allowed, written in another way than in the relay."""
    about = status.occurrence.event
    is_held = any(
        hold.decision == "hold" and (hold.expires is None or hold.expires > status.now)
        for hold in status.decisions
    )
    return (
        status.occurrence.live
        and about.event_status == "Scheduled"
        and (about.not_before_time is None or status.now < about.not_before_time)
        and not is_held
        and has_quorum(status)
    )


def apply(status: ApprovalStatus, transitions: list[Transition]) -> ApprovalStatus:
    """The status after these transitions."""
    for transition in transitions:
        match transition:
            case VoidVotes(voided, _):
                kept = tuple(vote for vote in status.decisions if vote not in voided)
                status = replace(status, decisions=kept)
            case ExpireHold(expired):
                kept = tuple(hold for hold in status.decisions if hold != expired)
                status = replace(status, decisions=kept)
            case FailGrant(failed, _):
                grants = tuple(
                    replace(grant, state="failed") if grant == failed else grant
                    for grant in status.grants
                )
                status = replace(status, grants=grants)
            case CreateGrant(rule):
                created = build_grant(
                    id=len(status.grants) + 1,
                    revision=status.occurrence.revision,
                    rule=rule.name,
                    dry_run=status.mode == "dry-run",
                )
                status = replace(status, grants=(*status.grants, created))
    return status


def apply_until_at_rest(status: ApprovalStatus) -> ApprovalStatus:
    """The status after every transition that is due now."""
    for _ in range(_PASSES_TO_REST):
        status = apply(status, due_transitions(status))
    return status


@given(statuses())
def test_a_grant_is_claimed_only_with_a_quorum_in_time_unheld_and_unchanged(
    status: ApprovalStatus,
) -> None:
    for grant in status.grants:
        if grant.state in ("granted", "sent"):
            expected = (
                status.mode == "on"
                and not grant.dry_run
                and grant.revision == status.occurrence.revision
                and may_start(status)
            )
            assert can_claim_grant(grant, status) == expected


@given(statuses())
def test_a_grant_is_created_only_for_what_may_start_and_is_not_being_sent(
    status: ApprovalStatus,
) -> None:
    if any(isinstance(transition, CreateGrant) for transition in due_transitions(status)):
        assert may_start(status)
        assert status.mode != "off"
        assert all(grant.state != "sent" for grant in status.grants)


@given(statuses(), st.frozensets(st.integers(1, 3)))
def test_each_decision_and_grant_has_at_most_one_transition(
    status: ApprovalStatus, in_flight: frozenset[int]
) -> None:
    attempts = frozenset((grant.id, grant.attempts) for grant in status.grants)
    status = replace(
        status, in_flight=frozenset(attempt for attempt in attempts if attempt[0] in in_flight)
    )
    transitions = due_transitions(status)
    ended_ids = [
        decision.approval_id
        for transition in transitions
        if isinstance(transition, VoidVotes)
        for decision in transition.decisions
    ]
    ended_ids += [
        transition.hold.approval_id
        for transition in transitions
        if isinstance(transition, ExpireHold)
    ]
    assert len(set(ended_ids)) == len(ended_ids)
    failed = [transition.grant for transition in transitions if isinstance(transition, FailGrant)]
    assert all(grant.state in ("granted", "sent") and grant.id not in in_flight for grant in failed)
    assert sum(isinstance(transition, CreateGrant) for transition in transitions) <= 1
    if not status.occurrence.live and not in_flight:
        kept = [decision for decision in status.decisions if decision.approval_id not in ended_ids]
        used = {grant.revision for grant in status.grants if grant.state == "accepted"}
        assert all(each.decision == "hold" or each.revision in used for each in kept)
        assert len(failed) == sum(grant.state in ("granted", "sent") for grant in status.grants)


@given(statuses())
def test_transitions_come_to_rest(status: ApprovalStatus) -> None:
    status = apply_until_at_rest(status)
    assert due_transitions(status) == []
    is_forgotten = (
        status.mode == "on"
        and may_start(status)
        and not status.is_refused_by_imds
        and status.active_grant is None
    )
    assert not is_forgotten


@given(statuses())
def test_nothing_is_due_before_the_next_change(status: ApprovalStatus) -> None:
    status = apply_until_at_rest(status)
    next_change = next_change_at(status)
    for seconds in (1.0, 4.9, 5.0, 50.0, 100.0, 500.0, 900.0, 2000.0):
        moment = NOON + timedelta(seconds=seconds)
        if moment > status.now and (next_change is None or moment < next_change):
            assert due_transitions(replace(status, now=moment)) == []
