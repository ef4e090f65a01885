"""Which principals rules, groups and people may name, and the machines of a fleet as voters."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.approvals.principals import (
    PrincipalForm,
    can_mean_machine_in_scope,
    declare_chat_principal_form,
    expected_form,
    is_chat_principal,
    is_principal,
    machine_principal,
    matches_principal,
    most_votes,
    own_resources,
)
from relay.errors import ConfigError
from tests.approvals.builders import build_decision, build_status, one_rule

ENTRA = "entra:8f5f0d3c-59ac-4a4b-9d7b-0f0c7d2c1a11/0b1c2d3e-1111-2222-3333-444455556666"
MATTERMOST = f"mattermost:{'t' * 26}/{'u' * 26}"


@pytest.mark.parametrize(
    "principal",
    [
        "client:alice",
        "local:root",
        ENTRA,
        "mtls:alice@example.com",
        "slack:T024/U7",
        "slack:E024BE7LH/W012A3CDE",
        MATTERMOST,
    ],
)
def test_the_relay_and_its_chats_have_these_forms_of_principals(principal: str) -> None:
    assert is_principal(principal)


@pytest.mark.parametrize(
    "text",
    [
        "alice",
        "client:",
        "client:a b",
        "group:oncall",
        "person:alice",
        "rule:one",
        "teams:T/U",
        "Slack:T024/U7",
        "slack:T/U",
        "slack:t024/u7",
        "slack:T024/U7/U8",
        "slack:U7/T024",
        "slack:T024",
        "mattermost:team/user",
        f"mattermost:{MATTERMOST[11:].upper()}",
        "entra:11111111-2222/3333",
        f"entra:{ENTRA[6:].upper()}",
        "entra:example.com/bob",
        "",
        # A machine is a scope and a relay word, and only machines have patterns.
        "vm:a*/*/*",
        "vm:a",
        "vm:/b",
        "vm:a/",
        "vm:A/b",
        "vm:a/[bc]",
        "vm:a_b/c",
        "vm:a/b.c",
        "vm:a/b\n",
        "local:*",
        "local:ops?",
        "entra:*/*",
        "slack:T024/*",
    ],
)
def test_any_other_text_is_no_principal(text: str) -> None:
    assert not is_principal(text)


def test_a_chat_vouches_for_the_principals_of_chats_alone() -> None:
    assert is_chat_principal("slack:T024/U7")
    assert not is_chat_principal("client:alice")
    assert not is_chat_principal("local:root")


@pytest.mark.parametrize("prefix", ["client", "slack", "group", "person", "rule", "", "a b", "A"])
def test_a_chat_cannot_declare_a_prefix_that_is_taken_reserved_or_malformed(prefix: str) -> None:
    forms = expected_form("")
    with pytest.raises(ConfigError):
        declare_chat_principal_form(PrincipalForm(prefix, "<anything>"))
    assert expected_form("") == forms
    assert not is_chat_principal("client:alice")


# --- machines


_scopes = st.from_regex(r"[ab0-]{1,4}", fullmatch=True)
_relays = st.from_regex(r"[ab_-]{1,4}", fullmatch=True)
_scope_patterns = st.from_regex(r"[ab0*?-]{1,4}", fullmatch=True)
_relay_patterns = st.from_regex(r"[ab_*?-]{1,4}", fullmatch=True)
OTHERS = st.sampled_from(["client", "entra", "local", "mtls", "slack", "mattermost", "person"])


@given(_scope_patterns, _relay_patterns, _scopes, _relays)
@example("*", "b", "a", "a/b")
@example("a*", "*", "a/a", "b")
@example("?", "?", "a", "/")
def test_a_pattern_matches_scope_and_relay_separately(
    scope_pattern: str, relay_pattern: str, scope: str, relay: str
) -> None:
    entry = f"vm:{scope_pattern}/{relay_pattern}"
    assert is_principal(entry)
    assert matches_principal(entry, f"vm:{scope}/{relay}") == (
        "/" not in scope + relay
        and fnmatchcase(scope, scope_pattern)
        and fnmatchcase(relay, relay_pattern)
    )


@given(_scope_patterns, _relay_patterns, OTHERS, st.text(max_size=8))
@example("*", "*", "client", "a/b")
@example("*", "*", "client", "vm:a/b")
@example("*", "*", "slack", "T/U")
def test_a_pattern_matches_only_machines(scope: str, relay: str, prefix: str, name: str) -> None:
    assert not matches_principal(f"vm:{scope}/{relay}", f"{prefix}:{name}")


@pytest.mark.parametrize("parts", [("a/b", "c"), ("a", "b/c"), ("a", "*"), ("*", "a"), ("", "a")])
def test_no_pattern_and_no_slash_become_the_principal_of_a_machine(parts: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="expected a scope and a relay word"):
        machine_principal(*parts)


@pytest.mark.parametrize(
    ("what", "entry", "scope", "can_be"),
    [
        ("the same", "vm:prod/vm-0", "prod", True),
        ("a pattern", "vm:prod-*/vm-0", "prod-1", True),
        ("only the relay has the name", "vm:prod/prod-1", "prod-1", False),
        ("any scope", "vm:*/test", "prod", True),
    ],
)
def test_the_scope_is_before_the_slash(what: str, entry: str, scope: str, can_be: bool) -> None:
    assert can_mean_machine_in_scope(entry, scope) is can_be, what


@pytest.mark.parametrize(
    ("voters", "whole", "each"),
    [
        ({"client:a", "local:b"}, 2, 2),
        ({"vm:a/x", "vm:a/y"}, 1, 2),
        ({"vm:a/*"}, 1, float("inf")),
        ({"client:a", "vm:a/*", "vm:b/*"}, 2, float("inf")),
        ({"person:fleet"}, 1, 1),
        (set[str](), 0, 0),
    ],
)
def test_one_machine_can_vote_for_a_whole_event_and_each_for_itself(
    voters: set[str], whole: int, each: float
) -> None:
    assert most_votes(voters, each_resource=False) == whole
    assert most_votes(voters, each_resource=True) == each


# --- resources


@pytest.mark.parametrize(
    ("relay", "resources", "own"),
    [
        ("db-1", ("db-0", "DB-1"), {"DB-1"}),
        ("db-1", ("_db-1",), {"_db-1"}),
        ("vmss_18", ("vmss_1", "VMSS_18"), {"VMSS_18"}),
        ("vmss_18", ("vmss00000i", "vmss00000j"), {"vmss00000i"}),
        ("vmss_18", ("_vmss00000i",), {"_vmss00000i"}),
        ("vmss00000i", ("vmss_17", "vmss_18"), {"vmss_18"}),
        ("db_prod", ("db.prod",), {"db.prod"}),
        ("db", ("db-1", "d", "adb", "dbb"), set()),
        ("db-1", (), set()),
        # In an availability set the other notation can be the name of another machine.
        ("db_18", ("db_18", "db00000i"), {"db_18"}),
        ("db00000i", ("db_18", "db00000i"), {"db00000i"}),
        # Two names that give one word: nobody knows which of them the machine is.
        ("db_1", ("db_1", "db.1"), set()),
        ("db-1", ("db-1", "DB-1"), {"db-1", "DB-1"}),
    ],
)
def test_a_machine_speaks_for_the_resource_that_names_it(
    relay: str, resources: tuple[str, ...], own: set[str]
) -> None:
    machine = machine_principal("prod", relay)
    assert own_resources(machine, "prod", resources) == own
    assert own_resources(machine, "test", resources) == frozenset()


@pytest.mark.parametrize("principal", ["client:db-1", "vm:prod/*", "vm:*/db-1", "db-1", "vm:db-1"])
def test_nobody_else_has_resources_of_a_machine(principal: str) -> None:
    assert own_resources(principal, "prod", ("db-1",)) == frozenset()


@pytest.mark.parametrize(
    ("approve", "counted"),
    [
        ({"each_resource": True, "from": ["vm:*/*"]}, ["vm:prod/db-1"]),
        ({"votes": 1, "from": ["vm:*/*"]}, ["vm:prod/db-1"]),
        ({"each_resource": True, "from": ["client:alice", "vm:test/*"]}, []),
        ("automatic", ["vm:prod/db-1"]),
    ],
)
def test_a_vote_counts_only_of_the_machine_of_the_event(approve: Any, counted: list[str]) -> None:
    """Whatever the state file says: the votes are checked again whenever they are counted."""
    voters = ("vm:prod/db-1", "vm:prod/db-2", "vm:test/db-1", "vm:prod/*", "vm:prod/db-1/x")
    votes = [build_decision(principal=voter, approval_id=voter) for voter in voters]
    status = build_status(None, *votes, settings=one_rule(approve))
    assert status.occurrence.scope == "prod"
    assert [vote.principal for vote in status.counted_votes] == counted
