"""Hours, each_resource, people with several principals, and rules that cannot be met."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.approvals import ApprovalsSettings
from relay.approvals.admission import find_decision_refusal
from relay.approvals.request import Caller, Rights
from relay.approvals.rules import Hours, Quorum, Rule, clients_of_same_person, eligible_voters
from relay.config import Config
from relay.events.build import common_event_data
from tests.approvals.builders import (
    ApprovalFile,
    build_caller,
    build_decision,
    build_event,
    build_request,
    build_status,
    one_rule,
)
from tests.clocks import NOON

BOTH = build_event(resources=("db-1", "web-1"))


# --- hours


def hours(**fields: Any) -> Hours:
    return Hours.model_validate(fields)


WORK = {
    "days": ["mon", "tue", "wed", "thu", "fri"],
    "from": "08:00",
    "to": "18:00",
    "zone": "Europe/Oslo",
}
DAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
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
        (True, NIGHT, "2026-03-28T05:59:59"),  # the night of Friday
        (False, NIGHT, "2026-03-28T06:00:00"),
        (False, NIGHT, "2026-03-27T05:59:59"),  # the night of Thursday
        (False, NIGHT, "2026-03-28T22:00:00"),
        (True, {"days": ["sat"]}, "2026-03-28T01:00:00"),
        (False, {"days": ["sat"]}, "2026-03-29T01:00:00"),
        (True, {"from": "22:00"}, "2026-03-29T23:30:00"),
    ],
)
def test_hours_apply_in_their_time_zone(expected: bool, fields: dict[str, Any], local: str) -> None:
    zone = ZoneInfo(fields.get("zone", "UTC"))
    moment = datetime.fromisoformat(local).replace(tzinfo=zone).astimezone(UTC)
    assert hours(**fields).are_active(moment) is expected


def test_hours_follow_summer_time() -> None:
    work = hours(**WORK)
    last_friday_of_winter = datetime(2026, 3, 27, 7, 0, tzinfo=UTC)  # UTC+1
    first_monday_of_summer = datetime(2026, 3, 30, 6, 0, tzinfo=UTC)  # UTC+2
    assert work.are_active(last_friday_of_winter)
    assert work.are_active(first_monday_of_summer)
    assert not work.are_active(first_monday_of_summer - timedelta(minutes=1))


def change_found_minute_by_minute(rule_hours: Hours, now: datetime) -> datetime | None:
    """Return the first minute of 15 days at which the hours are not as they are now."""
    minutes = (
        now.replace(second=0, microsecond=0) + timedelta(minutes=number)
        for number in range(1, 15 * 24 * 60 + 1)
    )
    is_active = rule_hours.are_active(now)
    return next((each for each in minutes if rule_hours.are_active(each) != is_active), None)


MINUTES = st.integers(0, 24 * 60 - 1).map(lambda minute: f"{minute // 60:02}:{minute % 60:02}")


@given(
    st.sampled_from(["UTC", "Europe/Oslo", "America/St_Johns", "Asia/Kathmandu"]),
    st.timedeltas(timedelta(), timedelta(days=16)),
    st.lists(st.sampled_from(DAYS), min_size=1, unique=True),
    st.lists(MINUTES, min_size=2, max_size=2, unique=True),
    st.booleans(),
)
def test_the_next_change_of_hours_is_the_first_minute_at_which_they_differ(
    zone: str, after: timedelta, days: list[str], limits: list[str], until_midnight: bool
) -> None:
    to = "24:00" if until_midnight else limits[1]
    rule_hours = hours(**{"days": days, "from": limits[0], "to": to, "zone": zone})
    now = datetime(2026, 1, 10, tzinfo=UTC) + after
    assert rule_hours.next_change(now) == change_found_minute_by_minute(rule_hours, now)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("differ", {"from": "08:00", "to": "08:00"}),
        ('such as "08:00"', {"from": "8:00"}),
        ('such as "08:00"', {"to": "24:01"}),
        ('such as "08:00"', {"from": "24:00"}),
        ("time zone", {"zone": "Mars/Olympus"}),
        ("time zone", {"zone": "../../etc/passwd"}),
        ("time zone", {"zone": "Europe"}),
        ("mon", {"days": ["monday"]}),
        ("at least 1", {"days": []}),
    ],
)
def test_impossible_hours_are_an_error(words: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=words):
        hours(**fields)


# --- conditions

_CONDITIONS = {
    "event_type": ["Reboot"],
    "event_source": ["Platform"],
    "duration": {"max": "8s"},
    "resources": ["db-*"],
    "scope": ["pro?"],
    "time": {"from": "12:00", "to": "13:00"},
}


@pytest.mark.parametrize(
    ("unmet", "changes", "scope", "minutes"),
    [
        ([], {}, "prod", 0),
        (["event_type"], {"event_type": "Freeze"}, "prod", 0),
        (["event_source"], {"event_source": "User"}, "prod", 0),
        (["duration"], {"duration": 9}, "prod", 0),
        (["resources"], {"resources": ("db-1", "web-1")}, "prod", 0),
        (["scope"], {}, "test", 0),
        (["time"], {}, "prod", 60),
        (["event_type", "scope", "time"], {"event_type": "Freeze"}, "test", 60),
    ],
)
def test_a_rule_applies_if_no_condition_is_unmet(
    unmet: list[str], changes: dict[str, Any], scope: str, minutes: int
) -> None:
    rule = Rule.model_validate({"name": "r", "match": _CONDITIONS, "approve": "automatic"})
    data = common_event_data(build_event(**{"duration": 8} | changes), 1)
    now = NOON + timedelta(minutes=minutes)
    assert sorted(rule.unmet_conditions(data, scope, now)) == unmet
    assert rule.applies_to(data, scope, now) == (not unmet)


# --- each_resource

EACH = one_rule(
    {
        "each_resource": True,
        "from": ["client:db", "client:web", "client:alice", "client:gone", "local:root"],
    }
)


def each(*voters: str, resources: tuple[str, ...] = ("db-1", "web-1")) -> Any:
    about = build_event(resources=resources)
    return build_status(
        about, *(build_decision(by=voter, of=about) for voter in voters), settings=EACH
    )


@pytest.mark.parametrize(
    ("voters", "uncovered"),
    [
        ((), ("db-1", "web-1")),
        (("db",), ("web-1",)),
        (("web",), ("db-1",)),
        (("db", "web"), ()),
        (("alice",), ()),
        (("gone",), ("db-1", "web-1")),
    ],
)
def test_every_resource_needs_a_vote_that_covers_it(
    voters: tuple[str, ...], uncovered: tuple[str, ...]
) -> None:
    """The rights of alice have no limit. The client gone was removed, and covers nothing."""
    status = each(*voters)
    assert status.uncovered_resources == uncovered
    assert status.is_rule_satisfied == (uncovered == ())
    assert status.votes_missing == (1 if uncovered else 0)


def test_a_local_user_covers_every_resource() -> None:
    assert build_status(
        BOTH, build_decision(of=BOTH, principal="local:root"), settings=EACH
    ).is_rule_satisfied


def test_nobody_covers_an_event_without_resources() -> None:
    assert not each("db", "web", "alice", resources=()).is_rule_satisfied


# --- people

PEOPLE = {"people": {"ann": ["client:alice", "mtls:alice", "slack:T1/U1"]}}
TWO = one_rule({"votes": 2, "from": ["person:ann", "client:bob"]}, **PEOPLE)


def test_a_person_with_several_principals_is_one_vote() -> None:
    of_ann = [
        build_decision(by=principal, principal=principal, approval_id=principal)
        for principal in ("client:alice", "mtls:alice", "slack:T1/U1")
    ]
    alone = build_status(None, *of_ann, settings=TWO)
    assert (alone.vote_count, alone.is_rule_satisfied) == (1, False)
    both = build_status(None, *of_ann, build_decision(by="bob"), settings=TWO)
    assert both.is_rule_satisfied


def test_a_group_may_name_people() -> None:
    settings = one_rule(
        {"votes": 2, "from": ["group:all"]}, groups={"all": ["person:ann", "client:bob"]}, **PEOPLE
    )
    votes = build_decision(principal="slack:T1/U1"), build_decision(by="bob")
    assert build_status(None, *votes, settings=settings).is_rule_satisfied


@pytest.mark.parametrize(
    ("client_resources", "count"),
    [
        ({"client:alice": None, "mtls:alice": None}, 1),
        ({"client:alice": ("db-*",), "mtls:alice": ("*-1",)}, 1),
        ({"client:alice": None, "mtls:alice": ("web-*",)}, 0),
        ({"client:alice": None}, 0),  # the other may not approve any more
    ],
)
def test_a_vote_in_a_chat_counts_while_every_client_of_the_person_could_give_it(
    client_resources: dict[str, tuple[str, ...] | None], count: int
) -> None:
    vote = build_decision(principal="slack:T1/U1")
    status = build_status(build_event(), vote, settings=TWO)
    assert replace(status, resources_by_client=client_resources).vote_count == count


@pytest.mark.parametrize(
    ("resources", "limits", "is_refused"),
    [
        (("db-*",), (), False),  # others can cover web-1
        (("db-*",), (("*-1",),), False),
        (("db-*",), (("db-*",),), True),  # a limit of the chat is for the whole event
        (None, (("db-*",), ("*-1",)), True),
        (None, (("nothing",),), True),
    ],
)
def test_a_limit_of_a_chat_must_cover_every_resource_also_where_others_cover_the_rest(
    resources: tuple[str, ...] | None, limits: tuple[tuple[str, ...], ...], is_refused: bool
) -> None:
    settings = one_rule({"each_resource": True, "from": ["slack:T1/U1"]})
    caller = Caller("slack:T1/U1", "slack", Rights(frozenset({"approve"}), resources, limits))
    status = build_status(BOTH, settings=settings)
    refusal = find_decision_refusal(build_request(by=caller, of=BOTH), status)
    assert (refusal is not None and refusal.status == 403) == is_refused


def test_the_clients_of_a_person_in_a_chat_are_theirs_alone() -> None:
    people = {
        "ann": ("slack:T1/U1", "client:alice", "mtls:alice", "local:ann"),
        "ben": ("slack:T1/U2", "client:bob"),
    }
    assert clients_of_same_person("slack:T1/U1", people) == ("client:alice", "mtls:alice")
    assert clients_of_same_person("slack:T1/U3", people) == ()


def test_a_person_releases_a_hold_of_their_other_principal(tmp_path: Path) -> None:
    approvals = ApprovalFile(tmp_path / "relay.db", TWO)
    approvals.record_document(build_event())
    assert approvals.submit("hold", by="alice").status == 202
    assert approvals.submit("release", by="bob").status == 403
    other_principal = replace(build_caller(), principal="mtls:alice")
    assert approvals.submit("release", by=other_principal).body["state"] == "released"
    approvals.close()


# --- the section


def _rule(**approve: Any) -> dict[str, Any]:
    return {"name": "r", "approve": {"votes": 1, "from": ["client:a"], **approve}}


_AT_ONCE = {"name": "a", "approve": "automatic"}


def test_the_defaults_approve_nothing() -> None:
    section = ApprovalsSettings()
    assert (section.enabled, section.dry_run) == (True, False)
    assert (section.tell_first, section.hold_expires) == (5.0, 86400.0)
    assert (section.amqp, section.rules, dict(section.groups)) == (None, (), {})


def test_voters_are_the_named_principals_and_the_members_of_groups() -> None:
    approve = Quorum.model_validate({"votes": 2, "from": ["group:g", "client:a", "slack:T1/U1"]})
    voters = eligible_voters(approve, {"g": ("client:a", "client:b")}, people={})
    assert voters == {"client:a", "client:b", "slack:T1/U1"}


@pytest.mark.parametrize(
    ("words", "section"),
    [
        ("duplicate name: r", {"rules": [_rule(), _rule()]}),
        ("group of approvals.groups", {"rules": [_rule(**{"from": ["group:none"]})]}),
        ("greater than or equal to 1", {"rules": [_rule(votes=0)]}),
        ("at least 1 item", {"rules": [_rule(**{"from": []})]}),
        ("Field required", {"rules": [{"name": "r", "approve": {"votes": 1}}]}),
        ("expected group:<name>", {"rules": [_rule(**{"from": ["alice"]})]}),
        ("expected person:<name>, client:<name>", {"groups": {"g": ["group:h"]}}),
        ("more than 0s", {"rules": [_rule(expires="0s")]}),
        ("more than 0s", {"hold_expires": "0s"}),
        ("at most 3650d", {"rules": [_rule(expires="99999999999d")]}),
        ("at most 3650d", {"rules": [_rule(close_before="3651d")]}),
        ("at most 3650d", {"hold_expires": "3651d"}),
        ("expected a duration", {"tell_first": 5}),
        ("expected a name such as", {"rules": [{"name": "two words", "approve": "automatic"}]}),
        ("Extra inputs", {"rules": [_rule(each="x")]}),
        ("Extra inputs", {"quorum": 2}),
        ("for one person", {"people": {"a": ["client:x"], "b": ["client:x"]}}),
        ("person:x is none", {"groups": {"g": ["person:x"]}}),
        ("a person of approvals.people", {"rules": [_rule(**{"from": ["person:x"]})]}),
        ("expected client:<name>", {"people": {"a": ["person:b"]}}),
        ("votes, each_resource", {"rules": [{"name": "r", "approve": {"from": ["client:a"]}}]}),
        ("can never decide", {"rules": [_AT_ONCE, _AT_ONCE | {"name": "b"}]}),
    ],
)
def test_a_section_that_can_never_work_is_an_error(words: str, section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        ApprovalsSettings.model_validate(section)
    assert words in str(raised.value)


TLS = {"cert_file": "/server.pem", "key_file": "/server.pem", "client_ca_file": "/ca.pem"}
ENTRA = "entra:8f5f0d3c-59ac-4a4b-9d7b-0f0c7d2c1a11/0b1c2d3e-1111-2222-3333-444455556666"
ALICE = {"name": "alice", "key": "bearer-test-key-of-alice", "can": ["read", "approve"]}
DRAIN = {
    "name": "drain",
    "key": "bearer-test-key-of-drain",
    "can": ["approve"],
    "san": "drain.internal",
}
READER = {"name": "reader", "key": "bearer-test-key-of-reader"}


def configured(votes: int, *voters: str, people: dict[str, list[str]] | None = None) -> Config:
    rules = [{"name": "all", "approve": {"votes": votes, "from": list(voters)}}]
    api = {"clients": [ALICE, DRAIN, READER], "tls": TLS}
    return Config.model_validate(
        {"approvals": {"rules": rules, "people": people or {}}, "api": api}
    )


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("there are only: client:alice", (2, "client:alice", "client:reader")),
        ("there are only: none", (1, "client:reader")),
        ("there are only: none", (1, ENTRA)),
        ("one client with two votes", (2, "client:drain", "mtls:drain.internal", "client:alice")),
    ],
)
def test_too_few_configured_voters_are_an_error(words: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError, match=words):
        configured(*arguments)


def test_enough_configured_voters_are_accepted() -> None:
    """Of people in chat and on the local socket the configuration does not know."""
    configured(2, "client:alice", "mtls:drain.internal")
    configured(2, "slack:T1/U1", "local:root")
    configured(
        2, "person:drain", "client:alice", people={"drain": ["client:drain", "mtls:drain.internal"]}
    )
