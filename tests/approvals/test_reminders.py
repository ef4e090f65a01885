"""Reminders of missing votes: one for each state of an event, and only where a vote would help."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.approvals import ApprovalsSettings
from relay.approvals.rules import Rule
from relay.approvals.status import ApprovalStatus
from relay.approvals.transitions import remind_at
from tests.approvals.builders import (
    STARTED,
    VOTES,
    ApprovalFile,
    build_decision,
    build_event,
    build_grant,
    build_status,
)
from tests.approvals.running_gate import running_gate
from tests.clocks import NOON

RUNBOOK = "https://wiki.example.com/databases#maintenance"
LONGEST_RUNBOOK = "https://wiki.example.com/".ljust(500, "x")


def settings(**approve: Any) -> ApprovalsSettings:
    """Two votes, and a reminder ten minutes before NotBefore."""
    quorum = {"votes": 2, "from": ["client:alice", "client:bob"], "remind": "10m"} | approve
    rule = {"name": "all", "approve": quorum, "runbook": RUNBOOK}
    return ApprovalsSettings.model_validate({"rules": [rule], "hold_expires": "60s"})


@pytest.fixture
def approvals(tmp_path: Path) -> Iterator[ApprovalFile]:
    """A state file with an event a quarter of an hour before its NotBefore."""
    file = ApprovalFile(tmp_path / "relay.db", settings())
    file.record_document(build_event())
    yield file
    file.close()


def reminders(approvals: ApprovalFile, after: float = 0.0) -> int:
    """Let time pass, and return how many reminders were recorded."""
    approvals.clock.advance(after)
    approvals.apply_transitions()
    return len(approvals.events("approval.reminder"))


def test_one_reminder_comes_when_not_before_is_near(approvals: ApprovalFile) -> None:
    assert approvals.apply_transitions() == NOON + timedelta(minutes=5)
    assert reminders(approvals, 299.0) == 0
    approvals.submit()
    assert reminders(approvals, 1.0) == 1
    (reminder,) = approvals.events("approval.reminder")
    wanted = {
        "votes": 1,
        "required": 2,
        "missing": 1,
        "rule": "all",
        "mayVote": ["client:bob"],
        "uncoveredResources": [],
        "closes": "2026-04-11T12:15:00Z",
        "runbook": RUNBOOK,
    }
    assert wanted.items() <= dict(reminder.data).items()
    assert reminder.attributes["causationid"] == approvals.events("event.scheduled")[0].id
    assert reminders(approvals, 60.0) == 1


def test_a_restart_reminds_nobody_again(approvals: ApprovalFile) -> None:
    assert reminders(approvals, 301.0) == 1
    approvals.crash()
    assert reminders(approvals, 1.0) == 1
    approvals.clock.set_wall_clock(NOON)
    assert reminders(approvals) == 1


def test_each_state_of_an_event_has_one_reminder(approvals: ApprovalFile) -> None:
    assert reminders(approvals, 301.0) == 1
    other = build_event(resources=("db-2",))
    approvals.record_document(other)
    assert reminders(approvals) == 2
    approvals.record_document(build_event())
    assert reminders(approvals) == 2
    approvals.record_document(build_event(due=3600.0))
    assert reminders(approvals) == 2
    assert reminders(approvals, 3600.0 - 900.0) == 3


def test_nobody_is_reminded_while_approvals_are_off(approvals: ApprovalFile) -> None:
    approvals.set_mode("off")
    assert reminders(approvals, 400.0) == 0
    approvals.set_mode("dry-run")
    assert reminders(approvals) == 1


def test_no_reminder_is_sent_without_the_key(tmp_path: Path) -> None:
    file = ApprovalFile(tmp_path / "none.db", settings(remind=None))
    file.record_document(build_event())
    assert reminders(file, 800.0) == 0
    assert not file.engine.acts_unasked
    file.close()


@pytest.mark.parametrize("close_before", ["10m", "11m"])
def test_a_reminder_after_the_end_of_voting_is_an_error(close_before: str) -> None:
    with pytest.raises(ValidationError, match="remind: expected more than close_before"):
        settings(close_before=close_before)


@pytest.mark.parametrize(
    "url",
    [
        "http://wiki.example.com",
        "https://",
        "https://user:secret@wiki.example.com/",
        "https://wiki.example.com/a b",
        "https://wiki.example.com/a)b",
        "https://wiki.example.com/a|b",
        "https://wiki.example.com/a>b",
        "https://wiki.example.com/\n",
        f"{LONGEST_RUNBOOK}x",
        "javascript:alert(1)",
    ],
)
def test_a_runbook_is_an_https_url(url: str) -> None:
    rule = {"name": "all", "approve": "automatic", "runbook": url}
    with pytest.raises(ValidationError, match="expected an https:// URL"):
        ApprovalsSettings.model_validate({"rules": [rule]})


@pytest.mark.parametrize(
    "url",
    [
        "https://w",
        "https://wiki-1.example.com:8443",
        "https://wiki.example.com?page=1",
        "https://wiki.example.com/a/%20/b?c=d&e=f+g#h-i_j.k~l:m@n;o,p!q$r*",
        LONGEST_RUNBOOK,
    ],
)
def test_the_url_of_a_runbook_is_taken_as_it_is_written(url: str) -> None:
    rule = Rule.model_validate({"name": "all", "approve": "automatic", "runbook": url})
    assert rule.runbook == url


async def test_the_gate_reminds_where_nobody_has_decided_anything(tmp_path: Path) -> None:
    async with running_gate(tmp_path, build_event(), settings=settings()) as gate:
        await gate.settle()
        gate.clock.advance(300.0)
        (reminder,) = await gate.wait_for_events("approval.reminder")
        assert reminder.data["missing"] == 2


@pytest.mark.parametrize(
    ("what", "is_reminded", "status"),
    [
        ("nobody has voted", True, build_status(None, settings=settings())),
        ("it is granted", False, build_status(settings=settings(), grants=[build_grant()])),
        ("refused", False, build_status(settings=settings(), grants=[build_grant("refused")])),
        ("a failure", True, build_status(settings=settings(), grants=[build_grant("failed")])),
        ("it has started", False, build_status(STARTED, settings=settings())),
        ("it has ended", False, build_status(settings=settings(), live=False)),
        ("all have voted", False, build_status(None, *VOTES, settings=settings())),
        ("a vote is missing", True, build_status(None, *VOTES[:1], settings=settings())),
        ("it is held", False, build_status(None, build_decision("hold"), settings=settings())),
        ("approvals are off", False, build_status(settings=settings(), mode="off")),
        ("closed", False, build_status(settings=settings(close_before="5m"), now=601.0)),
        ("NotBefore has passed", False, build_status(settings=settings(), now=900.0)),
    ],
)
def test_people_are_reminded_only_where_a_vote_would_help(
    what: str, is_reminded: bool, status: ApprovalStatus
) -> None:
    assert (remind_at(status) is not None) is is_reminded, what
