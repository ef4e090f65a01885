"""Hours, machines that must be spoken for, people with several principals, and approvals that waited too long."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.approvals import ApprovalsSettings
from relay.approvals.authorize import authorize
from relay.approvals.rules import Hours
from relay.approvals.transitions import can_claim, next_change_at, next_transitions
from tests.approvals.builders import Book, approval, caller, decided, event, granted, standing
from tests.approvals.manual_clock import NOON

BOTH = event(resources=("db-1", "web-1"))


def of(approve: Any, **more: Any) -> ApprovalsSettings:
    """One rule that decides about everything."""
    return ApprovalsSettings.model_validate(
        {"rules": [{"name": "all", "approve": approve, **more.pop("rule", {})}], **more}
    )


# --- hours


def hours(**fields: Any) -> Hours:
    return Hours.model_validate(fields)


WORK = {
    "days": ["mon", "tue", "wed", "thu", "fri"],
    "from": "08:00",
    "to": "18:00",
    "zone": "Europe/Oslo",
}
NIGHT = {"days": ["fri"], "from": "22:00", "to": "06:00", "zone": "Europe/Oslo"}


@pytest.mark.parametrize(
    ("expected", "fields", "local"),
    [
        (True, WORK, "2026-03-27T08:00:00"),
        (True, WORK, "2026-03-27T17:59:59"),
        (False, WORK, "2026-03-27T07:59:59"),
        (False, WORK, "2026-03-27T18:00:00"),
        (False, WORK, "2026-03-28T12:00:00"),  # a Saturday
        (True, NIGHT, "2026-03-27T22:00:00"),
        (True, NIGHT, "2026-03-28T05:59:59"),  # the night that began on Friday
        (False, NIGHT, "2026-03-28T06:00:00"),
        (False, NIGHT, "2026-03-27T05:59:59"),  # and that one began on Thursday
        (False, NIGHT, "2026-03-28T22:00:00"),
        (True, {"days": ["sat"]}, "2026-03-28T01:00:00"),
        (False, {"days": ["sat"]}, "2026-03-29T01:00:00"),
        (True, {"from": "22:00"}, "2026-03-29T23:30:00"),
    ],
)
def test_hours_are_those_of_their_zone(expected: bool, fields: dict[str, Any], local: str) -> None:
    zone = ZoneInfo(fields.get("zone", "UTC"))
    assert (
        hours(**fields).are_active(
            datetime.fromisoformat(local).replace(tzinfo=zone).astimezone(UTC)
        )
        is expected
    )


def test_summer_time_moves_the_hours_with_the_clocks_on_the_wall() -> None:
    work = hours(**WORK)
    assert work.are_active(
        datetime(2026, 3, 27, 7, 0, tzinfo=UTC)
    )  # the last Friday of winter: one hour ahead
    assert not work.are_active(datetime(2026, 3, 30, 5, 59, tzinfo=UTC))
    assert work.are_active(
        datetime(2026, 3, 30, 6, 0, tzinfo=UTC)
    )  # the first Monday of summer: two


@given(
    st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31)),
    st.sampled_from([WORK, NIGHT, {}, {"days": ["sun"]}]),
)  # noqa: DTZ001  # hypothesis wants naive bounds
def test_nothing_turns_before_the_moment_that_is_named(
    naive: datetime, fields: dict[str, Any]
) -> None:
    now, found = naive.replace(tzinfo=UTC), hours(**fields)
    turns = found.next_change(now)
    assert (turns is None) == (not fields)
    if turns is not None:
        assert found.are_active(turns) != found.are_active(now)
        assert found.are_active(turns - timedelta(seconds=1)) == found.are_active(now)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("differ", {"from": "08:00", "to": "08:00"}),
        ("match", {"from": "8:00"}),
        ("match", {"to": "24:01"}),
        ("match", {"from": "24:00"}),
        ("time zone", {"zone": "Mars/Olympus"}),
        ("time zone", {"zone": "../../etc/passwd"}),
        ("time zone", {"zone": "Europe"}),
        ("mon", {"days": ["monday"]}),
        ("at least 1", {"days": []}),
    ],
)
def test_hours_that_cannot_be_are_an_error(words: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=words):
        hours(**fields)


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[Book]:
    """Automatic between 12:01 and 12:03 UTC; it is noon."""
    book = Book(
        tmp_path / "relay.db",
        of("automatic", rule={"match": {"time": {"from": "12:01", "to": "12:03"}}}),
    )
    yield book
    book.close()


def test_a_rule_decides_when_its_hours_begin_without_anything_else_happening(timed: Book) -> None:
    timed.see(event())
    assert timed.names() == []
    moment = timed.step()
    assert moment == NOON + timedelta(minutes=1)
    timed.clock.turn(60)
    timed.step()
    assert timed.names() == ["approval.granted"]


def test_what_was_granted_is_not_sent_after_the_hours(timed: Book) -> None:
    timed.clock.turn(60)
    timed.see(event())
    timed.clock.turn(120)
    assert (
        timed.do(lambda tx: timed.ledger.claim(tx, tx.decisions.open_grants(), timed.clock.now()))
        == []
    )
    timed.step()
    assert timed.names() == ["approval.granted", "startrequest.failed"]


# --- every machine is spoken for

EACH = of(
    {
        "each_resource": True,
        "from": ["client:db", "client:web", "client:alice", "client:gone", "local:root"],
    }
)


def each(*voters: str, resources: tuple[str, ...] = ("db-1", "web-1")) -> Any:
    about = event(resources=resources)
    return standing(about, *(decided(by=one, of=about) for one in voters), settings=EACH)


@pytest.mark.parametrize(
    ("voters", "unspoken"),
    [
        ((), ("db-1", "web-1")),
        (("db",), ("web-1",)),
        (("web",), ("db-1",)),
        (("db", "web"), ()),
        (("alice",), ()),
        (("gone",), ("db-1", "web-1")),
    ],
)
def test_every_machine_must_be_spoken_for(
    voters: tuple[str, ...], unspoken: tuple[str, ...]
) -> None:
    """Of alice the resources are not limited; gone is no client any more, and speaks for nothing."""
    how = each(*voters)
    assert how.uncovered_resources == unspoken
    assert how.is_satisfied == (unspoken == ())
    assert how.votes_missing == (1 if unspoken else 0)


def test_a_user_of_the_local_socket_speaks_for_every_machine() -> None:
    assert standing(BOTH, decided(of=BOTH, principal="local:root"), settings=EACH).is_satisfied


def test_an_event_that_names_no_machine_is_spoken_for_by_nobody() -> None:
    assert not each("db", "web", "alice", resources=()).is_satisfied


def test_who_speaks_for_a_part_may_vote_and_who_speaks_for_none_may_not() -> None:
    def status(resources: tuple[str, ...], settings: ApprovalsSettings) -> int:
        refusal = authorize(
            approval(by=caller("db", resources=resources), of=BOTH),
            standing(BOTH, settings=settings),
        )
        return refusal.status if refusal is not None else 202

    assert status(("db-*",), EACH) == 202
    assert status(("mail-*",), EACH) == 403
    assert status(("db-*",), of({"votes": 1, "from": ["client:db"]})) == 403


def test_both_may_be_asked_for(tmp_path: Path) -> None:
    book = Book(
        tmp_path / "relay.db",
        of(
            {"each_resource": True, "votes": 2, "from": ["client:db", "client:web", "client:alice"]}
        ),
    )
    book.see(BOTH)
    assert book.submit(by="alice", of=BOTH).body["state"] == "pending"
    assert book.submit(by=caller("db", resources=("db-*",)), of=BOTH).body["state"] == "granted"
    book.close()


# --- people

PEOPLE = {"people": {"ann": ["client:alice", "mtls:alice", "slack:T1/U1"]}}
TWO = of({"votes": 2, "from": ["person:ann", "client:bob"]}, **PEOPLE)


def test_a_person_with_several_principals_is_one_vote() -> None:
    of_ann = [
        decided(by=one, principal=one, approval_id=one)
        for one in ("client:alice", "mtls:alice", "slack:T1/U1")
    ]
    assert standing(event(), *of_ann, settings=TWO).vote_count == 1
    assert not standing(event(), *of_ann, settings=TWO).is_satisfied
    assert standing(event(), *of_ann, decided(by="bob"), settings=TWO).is_satisfied


def test_a_group_may_name_people() -> None:
    settings = of(
        {"votes": 2, "from": ["group:all"]}, groups={"all": ["person:ann", "client:bob"]}, **PEOPLE
    )
    assert standing(
        event(), decided(principal="slack:T1/U1"), decided(by="bob"), settings=settings
    ).is_satisfied


def test_a_person_releases_the_hold_that_another_principal_of_theirs_took(tmp_path: Path) -> None:
    book = Book(tmp_path / "relay.db", of("automatic", **PEOPLE))
    book.switch("off")
    book.see(event())
    book.switch("on")
    book.close()
    book = Book(tmp_path / "relay2.db", TWO)
    book.see(event())
    assert book.submit("hold", by="alice").status == 202
    assert book.submit("release", by="bob").status == 403
    other = caller("x")
    assert (
        book.submit("release", by=type(other)("mtls:alice", "http", other.rights)).body["state"]
        == "released"
    )
    book.close()


@pytest.mark.parametrize(
    ("words", "section"),
    [
        ("for one person", {"people": {"a": ["client:x"], "b": ["client:x"]}}),
        ("none", {"groups": {"g": ["person:x"]}}),
        (
            "a person of approvals.people",
            {"rules": [{"name": "r", "approve": {"votes": 1, "from": ["person:x"]}}]},
        ),
        (
            "each person counts once",
            {"rules": [{"name": "r", "approve": {"votes": 2, "from": ["person:ann"]}}], **PEOPLE},
        ),
        ("expected client:<name>", {"people": {"a": ["person:b"]}}),
        ("votes, each_resource", {"rules": [{"name": "r", "approve": {"from": ["client:a"]}}]}),
        (
            "can never decide",
            {
                "rules": [
                    {"name": "a", "approve": "automatic"},
                    {"name": "b", "approve": "automatic"},
                ]
            },
        ),
        (
            "at most 3650d",
            {
                "rules": [
                    {
                        "name": "r",
                        "approve": {"votes": 1, "from": ["client:a"], "execution_expires": "3651d"},
                    }
                ]
            },
        ),
    ],
)
def test_what_could_never_be_met_is_an_error(words: str, section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=words):
        ApprovalsSettings.model_validate(section)


# --- an approval that waited too long to be sent

SOON = of({"votes": 1, "from": ["client:alice"], "execution_expires": "60s"})


def test_what_waited_too_long_is_not_claimed_and_its_votes_are_void(tmp_path: Path) -> None:
    book = Book(tmp_path / "relay.db", SOON)
    book.see(event())
    assert book.submit(by="alice").body["state"] == "granted"
    book.clock.turn(59)
    assert book.step() == NOON + timedelta(seconds=60)
    assert can_claim(book.grants[0], book.stands())
    book.clock.turn(1)
    assert not can_claim(book.grants[0], book.stands())
    book.step()
    assert book.names() == [
        "approval.recorded",
        "approval.granted",
        "approval.voided",
        "startrequest.failed",
    ]
    assert [one.data["why"] for one in book.said("approval.voided")] == ["expired"]
    assert book.submit(by="alice").body["state"] == "granted"
    book.close()


def test_a_claimed_one_has_been_sent_in_time() -> None:
    how = standing(
        event(), decided(), grants=[granted("sent", rule="all")], settings=SOON, now=61.0
    )
    assert next_transitions(how) == []
    assert can_claim(how.grants[0], how)


def test_that_moment_is_looked_at() -> None:
    how = standing(
        event(due=None),
        decided(),
        grants=[granted("granted", of=event(due=None), rule="all")],
        settings=SOON,
    )
    assert next_change_at(how) == NOON + timedelta(seconds=60)
