"""How long the relay waits for a chat platform in tests: long, unless a test is about that."""

from __future__ import annotations

import pytest

LOOKUP_TIMEOUTS = (
    "relay.chat.platforms.slack.members.LOOKUP_TIMEOUT",
    "relay.chat.platforms.mattermost.api.LOOKUP_TIMEOUT",
)
"""In seconds. A platform waits only a few seconds for the relay, so the relay asks it briefly."""


@pytest.fixture(autouse=True)
def _long_lookup_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test machine that stops for a second is not a platform that hangs."""
    for timeout in LOOKUP_TIMEOUTS:
        monkeypatch.setattr(timeout, 30.0)


@pytest.fixture
def impatient(_long_lookup_timeouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay soon gives up a platform that hangs, as in production."""
    for timeout in LOOKUP_TIMEOUTS:
        monkeypatch.setattr(timeout, 1.5)
