"""What differs between two configurations, and what of it needs a restart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from relay.config import Config, load
from relay.roles.reload import RESTART_KEYS, find_key_changes, key_needs_restart, place_of_key

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
ALICE = {"name": "alice", "key": "bearer-test-key-of-alice", "can": ["read", "approve"]}
BOB = {"name": "bob", "key": "bearer-test-key-of-bob-x", "can": ["read"]}


def hook(name: str, **more: Any) -> dict[str, Any]:
    fields = {"kind": "webhook", "name": name, "url": "https://example.com", "secrets": [SECRET]}
    return {**fields, **more}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    found = find_key_changes(Config.model_validate(before), Config.model_validate(after))
    return list(found.items())


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {}, []),
        ({}, {"source": {"interval": "2s"}}, [("source.interval", "changed")]),
        ({}, {"source": {"interval": "1s"}}, []),
        (
            {"sinks": [hook("a"), hook("b"), hook("c")]},
            {"sinks": [hook("a"), hook("c", timeout="9s"), hook("d")]},
            [("sinks.b", "removed"), ("sinks.c", "changed"), ("sinks.d", "added")],
        ),
        (
            {"sinks": [hook("a"), hook("b")]},
            {"sinks": [hook("b"), hook("a")]},
            [("sinks", "moved")],
        ),
        (
            {"api": {"clients": [ALICE]}, "approvals": {"groups": {"x": ["client:alice"]}}},
            {"api": {"clients": [ALICE, BOB]}, "approvals": {"people": {"y": ["client:alice"]}}},
            [
                ("approvals.groups.x", "removed"),
                ("approvals.people.y", "added"),
                ("api.clients.bob", "added"),
            ],
        ),
        (
            {"approvals": {"amqp": None}, "api": {"tls": None}},
            {"api": {"public_url": "https://example.com"}},
            [("api.public_url", "changed")],
        ),
        (
            {"api": {"clients": [ALICE]}},
            {"api": {"clients": []}},
            [("api.clients.alice", "removed")],
        ),
        (
            {"sinks": [hook("a")]},
            {"sinks": [{"kind": "rabbitmq", "name": "a", "url": "amqp://x"}]},
            [("sinks.a", "changed")],
        ),
    ],
)
def test_a_change_is_named_by_its_key(
    before: dict[str, Any], after: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert changes(before, after) == expected


def test_a_secret_that_moves_is_a_change_and_one_that_changes_is_none(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_text(SECRET)
    one = {"sinks": [hook("a", secrets=[], secrets_file=str(tmp_path / "one"))]}
    other = {"sinks": [hook("a", secrets=[], secrets_file=str(tmp_path / "other"))]}
    before = Config.model_validate(one)
    (tmp_path / "one").write_text(SECRET.replace("Mf", "Af"))
    os.utime(tmp_path / "one", (1, 1))
    assert find_key_changes(before, Config.model_validate(one)) == {}
    assert changes(one, other) == [("sinks.a", "changed")]


def test_only_what_says_who_the_relay_is_and_where_needs_a_restart() -> None:
    assert [key for key in RESTART_KEYS if not key_needs_restart(key)] == []
    assert key_needs_restart("fleet.hub_user")
    live = ("fleet.domains", "fleet.domains.vmss-a", "api.tls", "source.interval", "sinks.scope")
    assert [key for key in live if key_needs_restart(key)] == []


def test_a_key_is_named_with_its_place_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text("relay: vm-0\nsource:\n  interval: 1s\n  url: http://127.0.0.1:1\n")
    loaded = load(file, {})
    assert place_of_key("relay", loaded) == f"relay ({file}:1)"
    assert place_of_key("source.url", loaded) == f"source.url ({file}:4)"
    assert place_of_key("scope", loaded) == "scope"
    assert not loaded.is_empty
    file.write_text("# nothing yet\n")
    assert load(file, {}).is_empty
