"""The section of a Mattermost sink: what makes no sense is refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.approvals.service import ApprovalService
from relay.chat.context import make_chat_context
from relay.chat.platforms.mattermost import connect
from relay.chat.platforms.mattermost.settings import Settings
from relay.clock import SystemClock
from relay.config import Config
from relay.errors import ConfigError
from tests.approvals.builders import ORIGIN, SETTINGS
from tests.chat.mattermost_server import SECRET, TOKEN

CHANNEL = "4xp9fdt77pncbef59f4k1qe83o"
GIVEN: dict[str, Any] = {
    "kind": "mattermost",
    "name": "ops",
    "api_url": "https://chat.example.com",
    "channel": CHANNEL,
    "token": TOKEN,
}


def test_server_channel_and_token_are_all_that_is_needed() -> None:
    found = Settings.model_validate(GIVEN)
    assert (found.approve_in_chat, found.stale, found.timeout) == (False, "drop", 10.0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"api_url": "http://chat.example.com"},
            "api_url: expected https, got http: set allow_http",
        ),
        ({"api_url": "chat.example.com"}, "api_url: expected a URL that starts with https://"),
        (
            {"api_url": "https://u:p@chat.example.com"},
            "api_url: expected a URL without user and password",
        ),
        (
            {"api_url": "https://169.254.169.254"},
            "api_url: expected a receiver's address, got a metadata or host address",
        ),
        ({"channel": "ops"}, "channel"),
        ({"channel": "../users/me"}, "channel"),
        ({"token": None}, "token: expected the bot account's access token"),
        ({"token": "two words"}, "token: expected the bot account's access token"),
        (
            {"approve_in_chat": True},
            "secret: expected a secret or secret_file for approve_in_chat, got neither",
        ),
        ({"approve_in_chat": True, "secret": "short"}, "secret: expected whsec_"),
        ({"team": "x"}, "team"),
    ],
)
def test_what_makes_no_sense_is_refused_and_no_secret_repeated(
    change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(problem)) as caught:
        Settings.model_validate({**GIVEN, **change})
    assert TOKEN not in str(caught.value)
    assert "two words" not in str(caught.value)


def test_token_and_secret_may_live_in_files(tmp_path: Path) -> None:
    files = {"token_file": tmp_path / "token", "secret_file": tmp_path / "secret"}
    files["token_file"].write_text(f"{TOKEN}\n")
    files["secret_file"].write_text(f"{SECRET}\n")
    given = {key: value for key, value in GIVEN.items() if key != "token"}
    found = Settings.model_validate(
        {**given, "approve_in_chat": True, **{name: str(file) for name, file in files.items()}}
    )
    assert found.bearer() == TOKEN
    assert len(found.key()) == 32


def test_approving_in_the_chat_needs_the_url_that_mattermost_calls() -> None:
    sink = {**GIVEN, "approve_in_chat": True, "secret": SECRET}
    with pytest.raises(
        ValidationError,
        match=r"api\.public_url: expected the URL at which the platform of sink ops reaches this relay",
    ):
        Config.model_validate({"sinks": [sink]})
    Config.model_validate({"sinks": [sink], "api": {"public_url": "https://relay.example.com"}})


async def test_whoever_embeds_the_sink_without_that_url_is_told() -> None:
    settings = Settings.model_validate({**GIVEN, "approve_in_chat": True, "secret": SECRET})
    chat = make_chat_context(None, ApprovalService(SETTINGS, ORIGIN), SystemClock(), None)  # type: ignore[arg-type]  # no store is looked at
    with pytest.raises(ConfigError, match=r"approve_in_chat needs api\.public_url"):
        async with connect(settings, SystemClock(), chat):
            pass
