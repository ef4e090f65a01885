"""A rule whose voters cannot come is an error before the start: the configuration knows who can."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from relay.config import Config

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
    """A relay with these clients and one rule."""
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
