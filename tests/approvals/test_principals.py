"""Which principals rules, groups and people may name, and how a chat platform adds its own."""

from __future__ import annotations

import pytest

from relay.approvals.principals import (
    PrincipalForm,
    declare_chat_principal_form,
    expected_form,
    is_chat_principal,
    is_principal,
)
from relay.errors import ConfigError


@pytest.mark.parametrize(
    "principal",
    [
        "client:alice",
        "local:root",
        "entra:8f5f0d3c-59ac-4a4b-9d7b-0f0c7d2c1a11/0b1c2d3e-1111-2222-3333-444455556666",
        "mtls:alice@example.com",
        "slack:T024/U7",
        "slack:E024BE7LH/W012A3CDE",
        f"mattermost:{'t' * 26}/{'u' * 26}",
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
        "mattermost:team/user",
        "entra:11111111-2222/3333",
        "",
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
