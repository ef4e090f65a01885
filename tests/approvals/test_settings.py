"""The section `approvals`: rules that can be met, and what is said of those that cannot."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from relay.approvals import ApprovalsSettings
from relay.approvals.rules import Quorum, eligible_voters
from relay.config import Config


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


def test_as_many_votes_as_there_are_principals_can_be_met() -> None:
    section = {
        "rules": [_rule(votes=2, **{"from": ["group:g"]})],
        "groups": {"g": ["client:a", "client:b"]},
    }
    assert ApprovalsSettings.model_validate(section).rules[0].name == "r"


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
