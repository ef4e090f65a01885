"""Limits on a state file: who gets the slots, and what is said about who waits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.approvals.limits import NEVER, Limit, Machine, Taking, assign, count_selected_machines
from relay.approvals.status import approval_json_fields, approval_state
from relay.errors import SourceUnavailable
from relay.events.build import common_event_data
from relay.events.data_types import LimitWait
from relay.events.model import ScheduledEvent
from tests.approvals.builders import (
    ApprovalFile,
    build_event,
    build_occurrence,
    checked_file,
    decide,
    one_rule,
    started,
)
from tests.clocks import NOON

DATABASES: dict[str, Any] = {
    "name": "databases",
    "match": {"resources": ["db-*"]},
    "max": 1,
    "rest": "2m",
}
_VOTE = {"votes": 1, "from": ["client:alice", "client:bob"]}


def approvals_with(
    folder: Path, limit: dict[str, Any], approve: Any = _VOTE
) -> AbstractContextManager[ApprovalFile]:
    return checked_file(folder, one_rule(approve, limits=[limit]))


def event(name: str, *machines: str, due: float | None = 900.0, **more: Any) -> ScheduledEvent:
    return build_event(name, due=due, resources=machines, **more)


A, B, C = event("A", "db-1"), event("B", "db-2"), event("C", "db-3")


def states(approvals: ApprovalFile, *names: str) -> dict[str, str]:
    return {name: approval_state(approvals.status(name)) for name in names}


def go(approvals: ApprovalFile) -> list[str]:
    """Send the StartRequests that may go now, and accept them; return the EventIds."""
    claims = approvals.claim()
    if claims:
        approvals.accept(claims)
    return [claim.event_id for claim in claims]


# --- the pure function


def taking(limit: str, occurrence: int, names: str, minutes: float | None = None) -> Taking:
    """An event that takes slots for these machines, at rest until some minutes after noon."""
    until = NEVER if minutes is None else NOON + timedelta(minutes=minutes)
    return Taking(limit, occurrence, machines(names), until)


def machines(names: str, scope: str = "prod") -> frozenset[Machine]:
    return frozenset(Machine(scope, name.lower(), name) for name in names.split())


BUSY = taking("db", 9, "x")


@pytest.mark.parametrize(
    ("sizes", "going", "line", "waits"),
    [
        # A machine takes one slot, however many events are about it.
        ({"db": 1}, [], [{"db": "a"}, {"db": "A"}, {"db": "b"}], ["", "", "db: a"]),
        ({"db": 3}, [], [{"db": "a b"}, {"db": "c"}, {"db": "d"}], ["", "", "db: a b c"]),
        # Equal names in two scopes are two machines.
        ({"db": 1}, [Taking("db", 9, machines("a", "x"))], [{"db": "a"}], ["db: x/a"]),
        # A later event does not pass, even if it needs fewer slots ...
        ({"db": 2}, [BUSY], [{"db": "a b"}, {"db": "c"}], ["db: x", "db: x, behind 0"]),
        # ... unless it needs no further slot.
        ({"db": 2}, [BUSY], [{"db": "a b"}, {"db": "x"}], ["db: x", ""]),
        # The first in line keeps its slots in its other limits, and those behind it keep none.
        ({"db": 1, "z": 1}, [BUSY], [{"db": "a", "z": "a"}, {"z": "b"}], ["db: x", "z: a"]),
        (
            {"db": 1, "all": 3},
            [BUSY, taking("all", 9, "x")],
            [{"db": "a", "all": "a"}, {"db": "b", "all": "b"}, {"all": "w"}],
            ["db: x", "db: x", ""],
        ),
        # An event that needs more slots than there are goes alone.
        ({"db": 1}, [], [{"db": "a b"}, {"db": "c"}], ["", "db: a b"]),
        ({"db": 1}, [BUSY], [{"db": "a b"}], ["db: x"]),
        # Its own slots are free for itself, and those of others are not.
        ({"db": 1}, [taking("db", 0, "a")], [{"db": "a"}, {"db": "b"}], ["", "db: a"]),
        ({"db": 1}, [taking("db", 0, "a"), BUSY], [{"db": "a"}], ["db: x"]),
        ({"db": 1}, [taking("db", 1, "b")], [{"db": "a"}, {"db": "b"}], ["db: b", ""]),
        # Two events of a machine that may be going already do not let each other go.
        ({"db": 1}, [taking("db", 0, "a"), BUSY], [{"db": "a"}, {"db": "a"}], ["db: x", "db: a x"]),
        (
            {"db": 1},
            [taking("db", 0, "a"), taking("db", 1, "a"), BUSY],
            [{"db": "a"}, {"db": "a"}],
            ["db: a x", "db: a x"],
        ),
        ({"db": 1}, [taking("db", 0, "a")], [{"db": "a"}, {"db": "a"}], ["", ""]),
        # Rests end by themselves: the first end that frees enough is told.
        ({"db": 1}, [taking("db", 9, "x", 3)], [{"db": "a"}], ["db: x until 12:03"]),
        (
            {"db": 3},
            [taking("db", 9, "x", 3), taking("db", 8, "y", 2), taking("db", 7, "y", 4)],
            [{"db": "a b"}],
            ["db: x y until 12:03"],
        ),
        ({"db": 2}, [taking("db", 9, "x", 3), taking("db", 8, "x y")], [{"db": "a"}], ["db: x y"]),
    ],
)
def test_who_gets_the_slots(
    sizes: dict[str, int], going: list[Taking], line: list[dict[str, str]], waits: list[str]
) -> None:
    found = assign(
        sizes,
        going,
        [
            (
                build_occurrence(build_event(str(number)), id=number),
                {limit: machines(names) for limit, names in needs.items()},
            )
            for number, needs in enumerate(line)
        ],
    )
    assert [" and ".join(map(_told, found[number])) for number in range(len(line))] == waits


def _told(wait: LimitWait) -> str:
    behind = f", behind {wait['behind']}" if wait["behind"] is not None else ""
    until = f" until {wait['until'][11:16]}" if wait["until"] is not None else ""
    return f"{wait['limit']}: {' '.join(wait['machines'])}{behind}{until}"


@pytest.mark.parametrize(
    ("match", "of", "names"),
    [
        ({}, A, "db-1"),
        ({"resources": ["db-*"]}, event("E", "db-1", "DB-2", "web-1"), "db-1 DB-2"),
        ({"resources": ["web-*"]}, A, ""),
        ({"resources": ["web-*"]}, event("E"), "event E"),
        ({"event_type": ["Freeze"]}, A, ""),
        ({"event_source": ["User"]}, A, ""),
        ({"duration": {"min": "1s"}}, A, ""),
        ({"scope": ["other*"]}, A, ""),
    ],
)
def test_what_a_limit_counts(match: dict[str, Any], of: ScheduledEvent, names: str) -> None:
    limit = Limit.model_validate({"name": "one", "match": match, "max": 1})
    found = limit.machines_of(common_event_data(of, 1), "prod")
    assert sorted(machine.name for machine in found) == sorted(
        [names] if names.startswith("event") else names.split()
    )


# --- one slot


def test_a_second_event_waits_until_the_first_is_over_and_its_rest_too(tmp_path: Path) -> None:
    with approvals_with(tmp_path, DATABASES) as approvals:
        approvals.record_document(A, B)
        assert decide(approvals, "approve", "alice", of=A) == "granted"
        answer = approvals.submit(of=B)
        wait = {"limit": "databases", "max": 1, "machines": ["db-1"], "behind": None, "until": None}
        assert answer.body["state"] == "waiting"
        assert answer.body["waitingFor"] == [wait]
        assert approvals.events("approval.recorded")[-1].data["waitingFor"] == [wait]
        assert go(approvals) == ["A"]
        assert states(approvals, "A", "B") == {"A": "accepted", "B": "waiting"}
        approvals.record_document(started(A), B)
        assert (go(approvals), states(approvals, "B")) == ([], {"B": "waiting"})

        approvals.clock.advance(60)
        approvals.record_document(B)
        summary = approval_json_fields(approvals.status("B"))
        assert (summary["state"], summary["missing"]) == ("waiting", 0)
        assert summary["waitingFor"] == [wait | {"until": "2026-04-11T12:03:00Z"}]
        assert approvals.apply_transitions() == NOON + timedelta(minutes=3)
        approvals.clock.advance(119.9)
        approvals.apply_transitions()
        assert go(approvals) == []
        approvals.clock.advance(0.1)
        approvals.apply_transitions()
        assert states(approvals, "B") == {"B": "granted"}
        assert go(approvals) == ["B"]


def test_a_pass_that_grants_says_when_the_grant_ends(tmp_path: Path) -> None:
    with approvals_with(tmp_path, DATABASES, "automatic") as approvals:
        approvals.record_document(A, B, step=False)
        assert approvals.apply_transitions() == A.not_before_time
        assert states(approvals, "A", "B") == {"A": "granted", "B": "waiting"}


def test_a_canceled_event_has_no_rest(tmp_path: Path) -> None:
    with approvals_with(tmp_path, DATABASES) as approvals:
        approvals.record_document(A, B)
        decide(approvals, "approve", "alice", of=A)
        decide(approvals, "approve", "alice", of=B)
        approvals.record_document(B)  # no StartRequest was sent for A
        assert approvals.events("event.ended")[-1].data["outcome"] == "canceled"
        assert states(approvals, "B") == {"B": "granted"}


@pytest.mark.parametrize("back", [60.0, 3600.0])
def test_a_clock_that_is_set_back_does_not_make_a_rest_endless(tmp_path: Path, back: float) -> None:
    with approvals_with(tmp_path, DATABASES) as approvals:
        approvals.record_document(started(A))
        approvals.record_document(B)
        approvals.clock.set_wall_clock(NOON - timedelta(seconds=back))
        decide(approvals, "approve", "alice", of=B)
        approvals.clock.advance(240)
        approvals.apply_transitions()
        assert states(approvals, "B") == {"B": "granted"}


# --- who is first


@pytest.mark.parametrize("approve", [_VOTE, "automatic"])
def test_a_change_of_one_event_lets_those_go_that_wait_for_it(tmp_path: Path, approve: Any) -> None:
    """The gate looks at the events that changed."""
    with approvals_with(tmp_path, DATABASES | {"rest": "0s"}, approve) as approvals:
        approvals.record_document(started(A), C, B)
        for one in (B, C):
            approvals.submit(of=one)
        assert states(approvals, "B", "C") == {"B": "waiting", "C": "waiting"}
        approvals.record_document(C, B, step=False)
        approvals.transact(
            lambda tx: approvals.engine.apply_due_transitions(tx, approvals.clock.now(), ["a"])
        )
        assert states(approvals, "B", "C") == {"B": "waiting", "C": "granted"}


# --- what is counted


def test_a_limit_with_hours_ends_with_them(tmp_path: Path) -> None:
    hours = {"name": "noon", "match": {"time": {"from": "12:00", "to": "12:02"}}, "max": 1}
    with approvals_with(tmp_path, hours) as approvals:
        approvals.record_document(A, B)
        decide(approvals, "approve", "alice", of=A)
        assert decide(approvals, "approve", "alice", of=B) == "waiting"
        assert approvals.apply_transitions() == NOON + timedelta(minutes=1)
        approvals.clock.advance(120)
        approvals.apply_transitions()
        assert states(approvals, "B") == {"B": "granted"}


# --- who gives a slot back


def test_start_requests_without_an_answer_take_slots_while_they_wait_too(tmp_path: Path) -> None:
    everything = {"name": "everything", "max": 3}
    web = event("W", "web-1")
    with approvals_with(tmp_path, DATABASES | {"max": 3}) as approvals:
        approvals.record_document(A, B, C, web)
        for one in (C, B, A):
            decide(approvals, "approve", "alice", of=one)
        approvals.answer(approvals.claim(), SourceUnavailable("timeout"))
        approvals.crash(one_rule(_VOTE, limits=[DATABASES, everything]))
        assert decide(approvals, "approve", "alice", of=web) == "waiting"
        (wait,) = approvals.status("W").waiting_for
        assert (wait["limit"], wait["machines"]) == ("everything", ["db-1", "db-2", "db-3"])


def test_a_start_request_without_an_answer_waits_while_another_has_started(tmp_path: Path) -> None:
    """Another event of its machine, which may be down already, is no reason for it to go."""
    same_machine = event("C", "db-1")
    with approvals_with(tmp_path, DATABASES | {"rest": "0s"}, "automatic") as approvals:
        approvals.record_document(A)
        approvals.answer(approvals.claim(), SourceUnavailable("timeout"))
        approvals.record_document(A, started(B), same_machine)
        assert approvals.claim() == []
        assert states(approvals, "C") == {"C": "waiting"}
        assert approvals.status("A").waiting_for[0]["machines"] == ["db-2"]
        approvals.record_document(A, same_machine)
        assert [claim.event_id for claim in approvals.claim()] == ["A", "C"]


def test_a_start_request_without_an_answer_comes_before_an_older_grant(tmp_path: Path) -> None:
    with approvals_with(tmp_path, DATABASES) as approvals:
        approvals.record_document(A, B)
        decide(approvals, "approve", "alice", of=A)
        decide(approvals, "approve", "alice", of=B)
        decide(approvals, "hold", "eve", of=A)
        approvals.apply_transitions()
        approvals.answer(approvals.claim(), SourceUnavailable("timeout"))
        assert decide(approvals, "release", "eve", of=A) == "waiting"
        assert go(approvals) == ["B"]


# --- what is said


def test_a_limit_keeps_no_vote_alive_and_the_end_says_for_what_it_waited(tmp_path: Path) -> None:
    with approvals_with(tmp_path, DATABASES) as approvals:
        approvals.record_document(started(A), B)
        assert decide(approvals, "approve", "alice", of=B) == "waiting"
        approvals.clock.advance(900)
        approvals.apply_transitions()
        voided = approvals.data("approval.voided")
        assert voided["why"] == "expired"
        assert [wait["limit"] for wait in voided["waitedFor"]] == ["databases"]
        assert voided["waitedFor"][0]["machines"] == ["db-1"]
        approvals.record_document(B)
        approvals.clock.advance(120)
        approvals.apply_transitions()
        assert go(approvals) == []
        assert approvals.events("approval.granted") == []


def test_a_rehearsal_gives_slots_to_what_it_would_grant(tmp_path: Path) -> None:
    with approvals_with(tmp_path, DATABASES) as approvals:
        approvals.set_mode("dry-run")
        approvals.record_document(A, B)
        assert decide(approvals, "approve", "alice", of=A) == "granted"
        assert decide(approvals, "approve", "alice", of=B) == "waiting"
        approvals.apply_transitions()
        assert approvals.grants == []
        approvals.set_mode("on")
        assert decide(approvals, "approve", "bob", of=B) == "granted"


def test_messages_about_events_that_wait_are_shown_again(tmp_path: Path) -> None:
    """Who takes the slots is part of what they show."""
    with approvals_with(tmp_path, DATABASES) as approvals:
        approvals.record_document(started(A), B, C, event("W", "web-1"))
        decide(approvals, "approve", "alice", of=B)
        approvals.connection.execute(
            "INSERT INTO message (id, sink, history_position, content_hash) "
            "SELECT id, 'ops', 0, key FROM occurrence"
        )
        approvals.connection.execute(
            "INSERT INTO message_about SELECT 'ops', id, id FROM occurrence"
        )
        approvals.connection.execute("UPDATE message SET refresh_at = NULL")
        approvals.transact(
            lambda tx: approvals.engine.apply_due_transitions(tx, approvals.clock.now(), ["a"])
        )
        rows = approvals.connection.execute(
            "SELECT content_hash FROM message WHERE refresh_at IS NOT NULL"
        )
        assert rows.fetchall() == [("b",)]


# --- shares


def test_a_share_is_rounded_down_and_at_least_one() -> None:
    limit = Limit.model_validate({"name": "tenth", "max": "10%"})
    assert [limit.capacity(count) for count in (0, 1, 9, 19, 20, 1000)] == [1, 1, 1, 1, 2, 100]
    assert Limit.model_validate({"name": "some", "max": "33.3%"}).capacity(1000) == 333


def test_a_share_counts_the_machines_that_match() -> None:
    limit = Limit.model_validate(
        {"name": "tenth", "match": {"resources": ["db-*"], "scope": ["prod*"]}, "max": "10%"}
    )
    machines = [
        ("prod", ["DB-1", "db-1"]),
        ("prod-b", ["x", "db-1"]),
        ("test", ["db-1"]),
        ("prod", ["web-1"]),
        ("prod", []),
    ]
    assert count_selected_machines(limit, machines) == 2


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "0%", "101%", "1", "ten", "10 %", None])
def test_a_limit_needs_a_number_or_a_share(wrong: object) -> None:
    with pytest.raises(ValidationError, match="a number of machines such as 1, or a share"):
        Limit.model_validate({"name": "x", "max": wrong})
