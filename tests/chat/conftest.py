"""Relays with a chat, and how long they wait for a platform: long, unless a test is about that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chat.mattermost_server import MattermostServer, running_mattermost
from tests.chat.running_relay import AnnouncedReboot, announced_reboot
from tests.chat.slack_server import SlackServer, running_slack
from tests.chat.wall_platform import Wall, WallRelay, relay_with_wall

LOOKUP_TIMEOUTS = (
    "relay.chat.platforms.slack.clicks.LOOKUP_TIMEOUT",
    "relay.chat.platforms.mattermost.clicks.LOOKUP_TIMEOUT",
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


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[WallRelay]:
    async with relay_with_wall(tmp_path, Wall()) as relay:
        yield relay


@pytest.fixture
async def slack() -> AsyncIterator[SlackServer]:
    async with running_slack() as server:
        yield server


@pytest.fixture
async def server() -> AsyncIterator[MattermostServer]:
    async with running_mattermost() as server:
        yield server


@pytest.fixture
async def reboot(slack: SlackServer, tmp_path: Path) -> AsyncIterator[AnnouncedReboot]:
    async with announced_reboot(slack, tmp_path) as reboot:
        yield reboot
