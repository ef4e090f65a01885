"""Which votes count, and the state that follows from votes, holds and grants."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from relay.approvals.standing_holds import next_hold_change
from relay.approvals.status import ApprovalStatus, approval_state
from relay.approvals.transitions import FailGrant, can_claim_grant, due_transitions
from relay.events.model import relay_word
from tests.approvals.builders import (
    CLIENT_RESOURCES,
    FREEZE,
    SETTINGS,
    STARTED,
    USER_REBOOT,
    VOTES,
    build_decision,
    build_event,
    build_grant,
    build_standing_hold,
    build_status,
    one_rule,
)
from tests.clocks import NOON


def test_an_automatic_rule_needs_no_votes_and_counts_none() -> None:
    status = build_status(USER_REBOOT, build_decision(of=USER_REBOOT))
    assert (status.votes_required, status.vote_count, status.is_rule_satisfied) == (0, 0, True)


@pytest.mark.parametrize(
    ("what", "client_resources"),
    [
        ("bob was removed, or may not approve", {"client:alice": None}),
        ("bob may not decide for this resource", {**CLIENT_RESOURCES, "client:bob": ("web-*",)}),
    ],
)
def test_a_vote_counts_only_while_its_voter_may_give_it(
    what: str, client_resources: dict[str, tuple[str, ...] | None]
) -> None:
    assert build_status(None, *VOTES).is_rule_satisfied
    status = replace(
        build_status(None, *VOTES, grants=[build_grant()]), resources_by_client=client_resources
    )
    assert [vote.principal for vote in status.counted_votes] == ["client:alice"]
    assert not can_claim_grant(build_grant(), status)
    assert any(isinstance(transition, FailGrant) for transition in due_transitions(status)), what


def test_votes_of_local_users_need_no_client() -> None:
    votes = tuple(replace(vote, principal=f"local:{vote.approval_id}") for vote in VOTES)
    groups = {"oncall": [vote.principal for vote in votes]}
    settings = SETTINGS.model_copy(update={"groups": groups})
    assert build_status(None, *votes, settings=settings).is_rule_satisfied


def test_a_vote_counts_no_longer_than_the_current_rule_allows() -> None:
    """The rule can change after the vote: hours begin, and files are edited."""
    vote_until_not_before = build_decision(expires=None)
    assert build_status(None, vote_until_not_before, now=299).counted_votes
    assert not build_status(None, vote_until_not_before, now=300).counted_votes
    assert build_status(None, build_decision(expires=60), now=59).counted_votes
    assert not build_status(None, build_decision(expires=60), now=60).counted_votes


_HOLD, _BRIEF = build_decision("hold"), build_decision("hold", expires=5)
_REFUSED = build_grant("refused", status=400)
_ACCEPTED, _OTHER = build_grant("accepted"), build_grant(revision="x")
_DRY_VOTES = [replace(vote, dry_run=True) for vote in VOTES]
_OTHER_REVISION_REFUSED = build_grant("refused", revision="x", status=400)


@pytest.mark.parametrize(
    ("what", "state", "status"),
    [
        ("a quorum is missing", "pending", build_status()),
        ("missing in a dry run", "pending", build_status(mode="dry-run")),
        ("approvals are off", "none", build_status(mode="off")),
        ("no rule", "none", build_status(FREEZE)),
        ("ended", "none", build_status(live=False)),
        ("started", "none", build_status(STARTED)),
        ("started under a hold", "none", build_status(STARTED, _HOLD)),
        ("held", "held", build_status(None, _HOLD)),
        ("held after the grant", "held", build_status(None, _HOLD, grants=[build_grant()])),
        ("held without a rule", "held", build_status(FREEZE, _HOLD)),
        ("the hold expired", "pending", build_status(None, _BRIEF, now=5)),
        ("granted", "granted", build_status(None, *VOTES, grants=[build_grant()])),
        ("granted for another revision", "pending", build_status(grants=[_OTHER])),
        ("a dry run would grant it", "granted", build_status(None, *_DRY_VOTES, mode="dry-run")),
        ("votes of an earlier dry run", "pending", build_status(None, *_DRY_VOTES)),
        ("held in a dry run", "held", build_status(None, *_DRY_VOTES, _HOLD, mode="dry-run")),
        ("sent", "sent", build_status(grants=[build_grant("sent")])),
        ("held after a try", "held", build_status(None, _HOLD, grants=[build_grant("sent")])),
        ("sent before NotBefore", "sent", build_status(grants=[build_grant("sent")], now=901)),
        ("accepted", "accepted", build_status(grants=[build_grant("accepted")])),
        ("accepted and started", "accepted", build_status(STARTED, grants=[_ACCEPTED])),
        ("accepted and ended", "accepted", build_status(grants=[_ACCEPTED], live=False)),
        (
            "accepted after a failure",
            "accepted",
            build_status(grants=[build_grant("failed"), build_grant("accepted", id=2)]),
        ),
        ("ended first", "failed", build_status(grants=[build_grant("failed")], live=False)),
        ("NotBefore came first", "failed", build_status(grants=[build_grant("failed")], now=901)),
        ("IMDS refused", "failed", build_status(grants=[_REFUSED])),
        ("failed and open again", "pending", build_status(grants=[build_grant("failed")])),
        ("another revision refused", "pending", build_status(grants=[_OTHER_REVISION_REFUSED])),
    ],
)
def test_the_state_of_an_approval(what: str, state: str, status: ApprovalStatus) -> None:
    assert approval_state(status) == state, what


STANDING_HOLD = build_standing_hold()


def test_of_the_people_who_may_vote_those_are_missing_who_have_not_voted() -> None:
    people = {"ann": ["client:alice", "slack:T024/U7"], "bob": ["client:bob"]}
    quorum = {"votes": 2, "from": ["person:ann", "person:bob", "client:drain"]}
    status = build_status(None, build_decision(), settings=one_rule(quorum, people=people))
    assert status.voters_without_vote == ("client:bob", "client:drain")


@pytest.mark.parametrize(
    ("voter", "is_missing"),
    [
        ("vm:prod/db-1", True),
        ("vm:prod/db-2", False),
        ("vm:test/db-1", False),
        ("vm:prod/*", True),
        ("vm:*/web-?", True),
        ("vm:test/*", False),
        ("client:alice", True),
        ("client:db", True),
        ("client:web", False),
        ("client:gone", False),
    ],
)
def test_who_may_not_vote_on_the_event_is_not_missing(voter: str, *, is_missing: bool) -> None:
    """Nobody knows how many machines a pattern means, so it counts if its scope is right."""
    status = build_status(settings=one_rule({"votes": 1, "from": [voter]}))
    assert status.voters_without_vote == ((voter,) if is_missing else ())


def test_a_local_user_may_decide_for_what_a_client_of_the_same_person_may_not() -> None:
    """The rights of the socket's file are their authority. Chat users have the client's limits."""
    people = {"ann": ["local:ann", "client:web"]}
    settings = one_rule({"votes": 1, "from": ["person:ann"]}, people=people)
    vote = build_decision(principal="local:ann")
    assert build_status(None, vote, settings=settings).is_rule_satisfied


@pytest.mark.parametrize(("resources", "counts"), [(("db-1",), 1), ((), 0), (("db-1", "db-2"), 0)])
def test_a_machine_votes_for_a_whole_event_only_if_that_names_it_and_nobody_else(
    resources: tuple[str, ...], counts: int
) -> None:
    about = build_event(resources=resources)
    vote = build_decision(of=about, principal="vm:prod/db-1")
    settings = one_rule({"votes": 1, "from": ["vm:prod/*"]})
    assert build_status(about, vote, settings=settings).vote_count == counts


@pytest.mark.parametrize("resource", ["web_18", "_web_18", "web00000i", "WEB_18"])
def test_a_machine_votes_once_by_whatever_names_it_calls_itself(resource: str) -> None:
    about = build_event(resources=(resource,))
    names = ("web_18", "_web_18", "web00000i", "_web00000i")
    votes = [build_decision(of=about, principal=f"vm:prod/{name}") for name in names]
    settings = one_rule({"votes": 2, "from": ["client:alice", "vm:prod/*"]})
    status = build_status(about, *votes, settings=settings)
    assert (status.vote_count, status.votes_missing) == (1, 1)
    people = {"ann": ["client:alice", f"vm:prod/{relay_word(resource)}"]}
    settings = one_rule({"votes": 2, "from": ["client:alice", "vm:prod/*"]}, people=people)
    votes.append(build_decision(of=about, principal="client:alice"))
    assert build_status(about, *votes, settings=settings).vote_count == 1


@pytest.mark.parametrize(
    ("what", "status", "is_held"),
    [
        ("from its start on", build_status(), True),
        ("until its end", build_status(now=59.9), True),
        ("at its end", build_status(now=60), False),
        ("after the clock was set back", build_status(now=-1), True),
        ("ended", build_status(live=False), False),
        ("started", build_status(STARTED), False),
        ("accepted", build_status(grants=[build_grant("accepted")]), False),
        ("another accepted", build_status(grants=[replace(_ACCEPTED, revision="x")]), True),
        ("sent", build_status(grants=[build_grant("sent")]), True),
    ],
)
def test_a_standing_hold_holds_what_azure_can_still_be_kept_from_starting(
    what: str, status: ApprovalStatus, *, is_held: bool
) -> None:
    status = replace(status, standing_holds=(STANDING_HOLD,))
    assert status.active_standing_holds == ((STANDING_HOLD,) if is_held else ())
    assert status.is_held is is_held, what


@pytest.mark.parametrize(
    ("what", "now", "changes", "seconds"),
    [
        ("it begins", -1, {"created": NOON - timedelta(hours=1)}, 0),
        ("it ends, also after the clock was set back", -1, {}, 60),
        ("it ends", 0, {}, 60),
        ("it is over", 60, {}, None),
    ],
)
def test_when_a_standing_hold_changes_by_time_alone(
    what: str, now: float, changes: dict[str, Any], seconds: float | None
) -> None:
    expected = None if seconds is None else NOON + timedelta(seconds=seconds)
    hold = replace(STANDING_HOLD, **changes)
    assert next_hold_change(hold, NOON + timedelta(seconds=now)) == expected, what
