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
    FailGrant,
    Transition,
    VoidVotes,
    can_claim_grant,
    can_unsent_grant_keep_slot,
    due_transitions,
    next_change_at,
    open_grant_failure_reason,
)
from relay.events.model import ScheduledEvent
from relay.store import Decision, Grant
from tests.approvals.builders import (
    FREEZE,
    REDEPLOY,
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
ODDLY_STARTED = build_event(event_source="User", event_status="Started")
LATE_VOTE = build_decision(by="eve", of=REDEPLOY)
MOVED = build_event(resources=("db-2",))
VOTES_WITHOUT_NOT_BEFORE = [replace(vote, revision=NO_NOT_BEFORE.revision) for vote in VOTES]
HOLD = build_decision("hold", "eve")
REFUSED = build_grant("refused", status=400)


def voted(*more: Decision, **status: Any) -> ApprovalStatus:
    """The status of a Reboot with its quorum, and with ``more``."""
    return build_status(None, *VOTES, *more, **status)


def user(*decisions: Decision, **status: Any) -> ApprovalStatus:
    return build_status(USER_REBOOT, *decisions, **status)


def one(vote: Decision, **status: Any) -> ApprovalStatus:
    return build_status(None, vote, **status)


def granted(**changes: Any) -> list[Grant]:
    return [build_grant(changes.pop("state", "granted"), **changes)]


VOTE, SHORT = build_decision(), build_decision(expires=5)
OLD, BRIEF = build_decision(revision="x"), build_decision("hold", expires=5)
OF_USER = granted(of=USER_REBOOT)


# --- grants


@pytest.mark.parametrize(
    ("what", "is_created", "status"),
    [
        ("a quorum", True, voted()),
        ("an automatic rule", True, user()),
        ("votes about to expire", True, voted(now=299)),
        ("no NotBefore", True, build_status(NO_NOT_BEFORE, *VOTES_WITHOUT_NOT_BEFORE, now=299)),
        ("after a failure", True, voted(grants=granted(state="failed"))),
        ("after a grant for another revision", True, voted(grants=granted(revision="x"))),
        ("another accepted", True, voted(grants=granted(state="accepted", revision="x"))),
        ("after a hold expired", True, voted(BRIEF, now=5)),
        ("the votes expired", False, voted(now=300)),
        ("a vote is missing", False, build_status(None, *VOTES[:1])),
        ("no rule", False, build_status(FREEZE)),
        ("approvals are off", False, user(mode="off")),
        ("a dry run, automatic", False, user(mode="dry-run")),
        ("a dry run, votes", False, voted(mode="dry-run")),
        ("the event ended", False, user(live=False)),
        ("the event started", False, build_status(ODDLY_STARTED)),
        ("the status is unknown", False, build_status(UNKNOWN_STATUS)),
        ("there is no status", False, build_status(NO_STATUS)),
        ("NotBefore, automatic", False, user(now=900)),
        ("NotBefore, votes", False, voted(now=900)),
        ("a hold", False, voted(HOLD)),
        ("a hold of another revision", False, voted(replace(HOLD, revision="x"))),
        ("a hold about to expire", False, user(BRIEF, now=4.9)),
        ("granted already", False, voted(grants=granted())),
        ("sent already", False, voted(grants=granted(state="sent"))),
        ("another is being sent", False, voted(grants=granted(state="sent", revision="x"))),
        ("accepted already", False, voted(grants=granted(state="accepted"))),
        ("IMDS refused", False, voted(grants=[REFUSED])),
    ],
)
def test_a_grant_is_created_or_not(what: str, is_created: bool, status: ApprovalStatus) -> None:
    assert (CreateGrant in transition_types(due_transitions(status))) == is_created, what


# --- votes and holds


@pytest.mark.parametrize(
    ("what", "reason", "status"),
    [
        ("a vote that counts", None, one(VOTE)),
        ("another revision", "changed", one(OLD)),
        ("the event started", "changed", build_status(STARTED, VOTE)),
        ("the event ended", "ended", one(VOTE, live=False)),
        ("changed, then ended", "ended", one(OLD, live=False)),
        ("expired", "expired", one(SHORT, now=5)),
        ("about to expire", None, one(SHORT, now=4.9)),
        ("NotBefore", "expired", one(VOTE, now=900)),
        ("NotBefore before expiry", "expired", one(build_decision(expires=1000), now=900)),
        ("about to expire by the current rule", None, one(VOTE, now=299.9)),
        ("expired by the current rule", "expired", one(VOTE, now=300)),
        ("just before NotBefore", None, build_status(REDEPLOY, LATE_VOTE, now=899.9)),
        ("a vote of nobody asked", None, one(build_decision(by="eve"))),
        ("a hold of an event that may come back", None, one(BRIEF, now=5, live=False)),
    ],
)
def test_why_a_vote_is_void(what: str, reason: Any, status: ApprovalStatus) -> None:
    expected = [] if reason is None else [VoidVotes(status.decisions, reason)]
    assert due_transitions(status) == expected, what


def test_one_transition_voids_all_votes_with_the_same_reason() -> None:
    changed = build_decision(revision="x"), build_decision(by="bob", revision="y")
    expired = build_decision(by="drain", expires=5)
    due = due_transitions(build_status(None, *changed, expired, now=5))
    assert due == [VoidVotes(changed, "changed"), VoidVotes((expired,), "expired")]


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
    in_flight = build_status(STARTED, build_decision(), grants=[sent], in_flight=[sent])
    assert due_transitions(in_flight) == []
    assert transition_types(due_transitions(status)) == [VoidVotes, FailGrant]


# --- grants that fail


@pytest.mark.parametrize(
    ("what", "words", "status"),
    [
        ("ended", "ended", voted(grants=granted(), live=False)),
        ("started", "started", build_status(STARTED, *VOTES, grants=granted())),
        ("changed", "changed", build_status(MOVED, *VOTES, grants=granted())),
        ("NotBefore", "NotBefore", voted(grants=granted(), now=900)),
        (
            "a vote expired",
            "expired",
            build_status(
                None, VOTES[0], replace(SHORT, principal="client:bob"), grants=granted(), now=5
            ),
        ),
        ("no rule", "rules", build_status(FREEZE, grants=granted(of=FREEZE))),
        ("the rule was removed", "rules", user(grants=OF_USER, settings=ApprovalsSettings())),
    ],
)
def test_why_a_grant_fails(what: str, words: str, status: ApprovalStatus) -> None:
    (grant,) = status.grants
    reason = open_grant_failure_reason(grant, status)
    assert reason is not None
    assert words in reason, what
    failures = [step for step in due_transitions(status) if isinstance(step, FailGrant)]
    assert failures == [FailGrant(grant, reason)]


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


def transition_types(transitions: list[Transition]) -> list[type[Transition]]:
    return [type(transition) for transition in transitions]


# --- the last check before the POST


def of(event: ScheduledEvent) -> ApprovalStatus:
    """The status of an event with a quorum for its state."""
    return build_status(event, *(replace(vote, revision=event.revision) for vote in VOTES))


BOB_SHORT, BOB_DRY = (build_decision(by="bob", expires=1), build_decision(by="bob", dry_run=True))
EXPIRED = build_status(None, VOTES[0], BOB_SHORT, now=1)
ODD = build_grant(of=UNKNOWN_STATUS)
PAUSED = build_event(event_status="Paused")


@pytest.mark.parametrize(
    ("what", "can_claim", "takes_slot", "grant", "status"),
    [
        ("granted", True, True, build_grant(), voted()),
        ("sent without an answer", True, False, build_grant("sent"), voted()),
        ("automatic", True, True, build_grant(of=USER_REBOOT), user()),
        ("failed before the event changed back", False, False, build_grant("failed"), voted()),
        ("accepted", False, False, build_grant("accepted"), voted()),
        ("approvals are off", False, True, build_grant(), voted(mode="off")),
        ("a dry run", False, True, build_grant(), voted(mode="dry-run")),
        ("a hold", False, False, build_grant(), voted(HOLD)),
        ("the event ended", False, False, build_grant(), voted(live=False)),
        ("NotBefore", False, False, build_grant(), voted(now=900)),
        ("another revision", False, False, build_grant(revision="x"), voted()),
        ("a vote is missing", False, False, build_grant(), one(VOTES[0])),
        ("a vote expired", False, False, build_grant(), EXPIRED),
        ("a vote of a dry run", False, False, build_grant(), build_status(None, VOTES[0], BOB_DRY)),
        ("the event started", False, False, build_grant(of=STARTED), of(STARTED)),
        ("the status is unknown", False, False, ODD, build_status(UNKNOWN_STATUS)),
        ("not Scheduled", False, False, build_grant(of=PAUSED), of(PAUSED)),
    ],
)
def test_the_last_check_repeats_every_condition(
    what: str, can_claim: bool, takes_slot: bool, grant: Grant, status: ApprovalStatus
) -> None:
    """What cannot be sent takes no slot of a limit, but for what was sent, which takes its own."""
    assert can_claim_grant(grant, status) == can_claim, what
    assert can_unsent_grant_keep_slot(grant, status) == takes_slot, what
    assert not can_unsent_grant_keep_slot(replace(grant, state="failed"), status)


def test_nothing_is_claimed_if_the_revision_is_not_that_of_the_stored_event() -> None:
    votes = [replace(vote, revision="x") for vote in VOTES]
    grant = build_grant(revision="x")
    status = build_status(None, *votes)
    other = replace(status, occurrence=replace(status.occurrence, revision="x"))
    assert open_grant_failure_reason(grant, other) is None
    assert not can_claim_grant(grant, other)


# --- when time changes something


@pytest.mark.parametrize(
    ("what", "seconds", "status"),
    [
        ("nothing was decided", None, build_status()),
        ("the vote expires by the rule", 300, one(VOTE)),
        ("the vote expires by itself", 5, one(SHORT)),
        ("the first of several", 5, build_status(None, VOTE, BRIEF)),
        ("NotBefore comes before", 900, one(build_decision("hold", expires=1000))),
        ("NotBefore ends a grant", 900, user(grants=OF_USER)),
        ("nothing is open any more", None, user(grants=granted(state="accepted"))),
        ("all has passed", None, one(SHORT, now=900)),
        ("there is no NotBefore", None, build_status(NO_NOT_BEFORE, grants=granted())),
    ],
)
def test_when_a_change_is_due(what: str, seconds: float | None, status: ApprovalStatus) -> None:
    expected = None if seconds is None else NOON + timedelta(seconds=seconds)
    assert next_change_at(status) == expected, what
