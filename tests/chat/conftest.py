"""How long the relay waits for a chat in tests: long, but where a test is about that."""

from __future__ import annotations

import pytest

LIMITS = (
    "relay.chat.platforms.slack.identity.PATIENCE",
    "relay.chat.platforms.slack.interactions.PATIENCE",
    "relay.chat.platforms.mattermost.sink.LOOKUP_TIMEOUT",
)
"""Seconds in which a chat says who somebody is. In life they are few: it waits for our answer."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a while is no chat that hangs."""
    for limit in LIMITS:
        monkeypatch.setattr(limit, 30.0)


@pytest.fixture
def impatient(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat that hangs is soon given up, as in life."""
    for limit in LIMITS:
        monkeypatch.setattr(limit, 1.5)
