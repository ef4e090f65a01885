"""Which principals rules, groups and people may name, and how a chat platform adds its own."""

from __future__ import annotations

import pytest

from relay.approvals.principals import (
    PrincipalForm,
    declare_chat_principals,
    is_chat_principal,
    is_principal,
    principal_forms,
)
from relay.errors import ConfigError


@pytest.mark.parametrize(
    "principal",
    [
        "client:alice",
        "local:root",
        "entra:11111111-2222/3333",
        "mtls:alice@example.com",
        "slack:T024/U7",
        "mattermost:team/user",
        "slack:anything-without-spaces",
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
        "Slack:T/U",
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
    forms = principal_forms()
    with pytest.raises(ConfigError):
        declare_chat_principals(PrincipalForm(prefix, "<anything>"))
    assert principal_forms() == forms
    assert not is_chat_principal("client:alice")
