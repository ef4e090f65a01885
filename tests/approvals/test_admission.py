"""Who may decide, and when it is too late: a table of answers, and one of what a refusal says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.admission import find_decision_refusal
from relay.approvals.request import (
    HOLD_NOTICE,
    Caller,
    DecisionAnswer,
    DecisionKind,
    DecisionRequest,
    Rights,
    refuse,
)
from relay.events.model import ScheduledEvent
from relay.store import Decision, GrantState
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
    build_standing_hold,
    build_status,
    one_rule,
)


def ask(
    decision: DecisionKind = "approve",
    by: Caller | str = "alice",
    of: ScheduledEvent | None = None,
    *decisions: Decision,
    revision: str | None = None,
    **status: Any,
) -> DecisionAnswer | None:
    changes: dict[str, Any] = {} if revision is None else {"revision": revision}
    request = build_request(decision, by, of, **changes)
    return find_decision_refusal(request, build_status(of, *decisions, **status))


OTHERS_RELEASE = "they can release it, and so can anybody with the right operate"
HOLD, GRANT = build_decision("hold"), build_grant()
SHORT = build_decision("hold", expires=10)
BOTH = build_event(resources=("db-1", "web-1"))
NAMELESS = build_event(resources=())
PAUSED = build_event(event_status="Paused")
UPPER, UNDATED = build_event(event_status="SCHEDULED"), build_event(due=None)
DATABASES, WEB, MAIL, ANY = (
    build_caller(resources=(each,)) for each in ("DB-*", "web-*", "mail-*", "*")
)
OP, READER, VOTER = (
    build_caller("op", "operate"),
    build_caller("alice", "read"),
    build_caller("alice", "approve"),
)
SENT, ACCEPTED, REFUSED = (build_grant(state) for state in ("sent", "accepted", "refused"))
IN_FLIGHT: dict[str, Any] = {"grants": [SENT], "in_flight": [SENT]}
NO_RESOURCE = "you may not decide for an event that names no resource"
OFF = "approvals are off; an operator can turn them on: imds-relay approvals on"
NO_STATUS = build_event(event_status=None)
ONLY_SCHEDULED = "only a Scheduled event can be approved, this one is"


def _old(state: GrantState) -> dict[str, Any]:
    """A grant for another revision, which had this end."""
    return {"grants": [build_grant(state, revision="x")]}


@pytest.mark.parametrize(
    ("what", "expected", "refusal"),
    [
        ("a vote", 202, ask()),
        ("a vote of a voter who is in no group", 202, ask(by="drain")),
        ("a hold", 202, ask("hold")),
        ("a hold when it has ended", 409, ask("hold", live=False)),
        ("a release when it has ended", 409, ask("release", "alice", None, HOLD, live=False)),
        ("a hold when it has started", 409, ask("hold", of=STARTED)),
        ("a release when it has started", 409, ask("release", "alice", STARTED, HOLD)),
        ("a vote when the status is in upper case", 202, ask(of=UPPER)),
        ("a hold when the status is unknown", 202, ask("hold", of=PAUSED)),
        ("a vote just before voting closes", 202, ask(now=839.9)),
        ("a vote when voting closes", 409, ask(now=840)),
        ("a vote just before NotBefore without close_before", 202, ask(of=REDEPLOY, now=899.9)),
        ("a vote at NotBefore", 409, ask(of=REDEPLOY, now=900)),
        ("a vote at any time without NotBefore", 202, ask(of=UNDATED, now=1e6)),
        ("a hold at any time without NotBefore", 202, ask("hold", of=UNDATED, now=1e6)),
        ("a hold after voting closed", 202, ask("hold", now=840)),
        ("a hold at NotBefore", 409, ask("hold", now=900)),
        ("a release after voting closed", 202, ask("release", "alice", None, HOLD, now=840)),
        ("a vote for another revision", 409, ask(revision="x")),
        ("a hold for another revision", 202, ask("hold", revision="x")),
        ("a release for another revision", 202, ask("release", "alice", None, HOLD, revision="x")),
        ("a release of an expired hold", 409, ask("release", "alice", None, SHORT, now=10)),
        ("a release just before it expires", 202, ask("release", "alice", None, SHORT, now=9.9)),
        ("a release by an operator", 202, ask("release", OP, None, build_decision("hold", "bob"))),
        ("a release by its holder without the right", 403, ask("release", READER, None, HOLD)),
        ("a hold before the claim", 202, ask("hold", grants=[GRANT])),
        ("a hold between two attempts", 202, ask("hold", grants=[SENT])),
        (
            "a hold while the next attempt is about to be claimed",
            202,
            ask("hold", grants=[SENT], in_flight=[build_grant("sent", attempts=2)]),
        ),
        ("a hold after another revision was accepted", 202, ask("hold", **_old("accepted"))),
        ("a hold after the StartRequest was accepted", 409, ask("hold", grants=[ACCEPTED])),
        ("a hold after the grant failed", 202, ask("hold", grants=[REFUSED])),
        ("a vote after IMDS refused another revision", 202, ask(**_old("refused"))),
        ("a vote after an earlier grant failed", 202, ask(grants=[build_grant("failed")])),
        ("a vote without the right", 403, ask(by=build_caller("alice", "read", "hold"))),
        ("a vote for a resource that the rights do not cover", 403, ask(by=WEB)),
        ("a vote for a resource that the rights cover", 202, ask(by=DATABASES)),
        ("a vote where the rights cover one of two resources", 403, ask(by=DATABASES, of=BOTH)),
        ("a vote with limits for an event without resources", 403, ask(by=ANY, of=NAMELESS)),
        ("a vote without limits for an event without resources", 202, ask(of=NAMELESS)),
        ("a hold on a resource that the rights do not cover", 403, ask("hold", WEB)),
        ("a hold without a rule", 202, ask("hold", of=FREEZE)),
        ("a vote of a voter of another rule", 403, ask(by="drain", of=REDEPLOY)),
        ("a hold of somebody who is no voter", 202, ask("hold", "eve")),
        ("a vote of anybody if the rule is automatic", 202, ask(by="eve", of=USER_REBOOT)),
        ("a hold while off", 503, ask("hold", mode="off")),
        ("a vote in a dry run", 202, ask(mode="dry-run")),
        ("409 comes before 403", 409, ask(by="eve", revision="x")),
        ("403 comes before 503", 403, ask(by="eve", mode="off")),
        ("409 comes before 503", 409, ask(revision="x", mode="off")),
    ],
)
def test_who_may_decide_and_when(what: str, expected: int, refusal: DecisionAnswer | None) -> None:
    assert (refusal.status if refusal is not None else 202) == expected, what


def test_too_late_says_when_it_was_and_when_it_is() -> None:
    text = "too late: it closed at 2026-04-11T12:14:00Z, it is 2026-04-11T12:14:01Z"
    assert ask(now=841) == refuse(409, text)


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
    text = f"you may not decide for {uncovered}: your rights (resources) do not cover {pronoun}"
    assert ask(by=WEB, of=build_event(resources=resources)) == refuse(403, text)


def test_a_changed_event_says_which_revision_is_the_current_one() -> None:
    refusal = ask(revision="x")
    assert refusal is not None
    assert build_event().revision in refusal.body["detail"]


def test_a_not_before_at_the_beginning_of_time_breaks_nothing() -> None:
    """.NET writes "none" as the year 1; nothing can be subtracted from it."""
    refusal = ask(of=build_event(not_before="0001-01-01T00:00:00Z"))
    assert refusal is not None
    assert refusal.status == 409


LIMITED = Caller("slack:T1/U1", "slack", Rights(frozenset({"approve", "hold"}), None, (("db-*",),)))


EACH = one_rule({"each_resource": True, "from": ["client:alice", "slack:T1/U1", "vm:prod/*"]})
ONE = one_rule({"votes": 1, "from": ["client:alice", "vm:prod/*"]})


def machine(decision: DecisionKind = "approve", name: str = "prod/db-1") -> DecisionRequest:
    caller = Caller(f"vm:{name}", "fleet", Rights(frozenset({"approve", "hold"})))
    return build_request(decision, caller, BOTH)


ALONE = "vm:prod/db-1 may decide for itself only, "
OTHERS = f"{ALONE}not for web-1: with each_resource: true, a rule takes a vote of each machine"
UNNAMED = "may decide for itself only, and the event does not name it"


@pytest.mark.parametrize(
    ("status", "reason", "refusal"),
    [
        (409, "the event has ended", ask(live=False)),
        (409, "the event has started already", ask(of=STARTED)),
        (409, f"no hold is on this event; {HOLD_NOTICE}", ask("release")),
        (409, f"too late: the StartRequest is on its way; {HOLD_NOTICE}", ask("hold", **IN_FLIGHT)),
        (409, f"{ONLY_SCHEDULED} Paused", ask(of=PAUSED)),
        (409, f"{ONLY_SCHEDULED} without a status", ask(of=NO_STATUS)),
        (409, "IMDS refused the StartRequest for this event (400)", ask(grants=[REFUSED])),
        (403, "no rule of approvals.rules allows this event to be approved", ask(of=FREEZE)),
        (403, "rule databases takes votes from others only", ask(by="eve")),
        (403, "you may not hold: it is not in your rights (can)", ask("hold", VOTER)),
        (
            403,
            "you may not release: neither hold nor operate is in your rights (can)",
            ask("release", VOTER, None, HOLD),
        ),
        (
            403,
            f"somebody else took the hold; {OTHERS_RELEASE}; {HOLD_NOTICE}",
            ask("release", "alice", None, build_decision("hold", "bob")),
        ),
        (503, OFF, ask(mode="off")),
        # Every resource must be covered by a hold, also where votes need not.
        (403, NO_RESOURCE, ask("hold", LIMITED, NAMELESS, settings=EACH)),
        (
            403,
            "you may not decide for web-1: your rights (resources) do not cover it",
            ask("hold", DATABASES, BOTH, settings=EACH),
        ),
        (403, NO_RESOURCE, ask(of=NAMELESS, settings=EACH)),
        # A voter must cover at least one.
        (202, "", ask(by=DATABASES, of=BOTH, settings=EACH)),
        (
            403,
            "you may not decide for db-1, web-1: your rights (resources) do not cover them",
            ask(by=MAIL, of=BOTH, settings=EACH),
        ),
        (202, "", ask("hold", of=NAMELESS, settings=EACH)),
    ],
)
def test_a_refusal_says_why(status: int, reason: str, refusal: DecisionAnswer | None) -> None:
    is_transient = status == 503  # an operator can turn approvals on
    assert refusal == (refuse(status, reason, is_transient=is_transient) if reason else None)


def test_a_release_where_only_standing_holds_are_says_whose_they_are() -> None:
    holds = (
        build_standing_hold(600, "client:eve", hold_id="00000010-rest"),
        build_standing_hold(1200, "client:bob", hold_id="00000020-rest"),
    )
    status = replace(build_status(), standing_holds=holds)
    assert find_decision_refusal(build_request("release"), status) == refuse(
        409,
        "only the standing hold 00000020 of client:bob until 2026-04-11T12:20:00Z and the standing "
        "hold 00000010 of client:eve until 2026-04-11T12:10:00Z is on this event: "
        f"end it with imds-relay holds end; {HOLD_NOTICE}",
    )


def test_an_unknown_event_is_404() -> None:
    text = "no such event in this scope; see GET /v1/events, or `imds-relay events`"
    assert find_decision_refusal(build_request(), None) == refuse(404, text)


@pytest.mark.parametrize(
    ("refused", "decision_request", "approve"),
    [
        (None, machine(), EACH),
        (None, machine("hold"), EACH),
        (None, machine("hold"), ONE),
        (OTHERS, machine(), ONE),
        (OTHERS, machine(), one_rule("automatic")),
        (f"vm:prod/db-2 {UNNAMED}", machine(name="prod/db-2"), EACH),
        (f"vm:test/db-1 {UNNAMED}", machine("hold", "test/db-1"), EACH),
    ],
)
def test_a_machine_decides_for_itself_alone(
    refused: str | None, decision_request: DecisionRequest, approve: ApprovalsSettings
) -> None:
    about = replace(decision_request, revision=BOTH.revision)
    refusal = find_decision_refusal(about, build_status(BOTH, settings=approve))
    assert refusal == (None if refused is None else refuse(403, refused))


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
        machine("release"), build_status(about, hold, settings=one_rule("automatic", **people))
    )
    assert (refusal.status if refusal is not None else None) == status
