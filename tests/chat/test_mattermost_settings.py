"""The section of a Mattermost sink: unusable settings are refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.chat.platforms.mattermost.api import Settings
from relay.config import Config
from tests.chat.mattermost_server import SECRET, TOKEN

SECTION: dict[str, Any] = {
    "kind": "mattermost",
    "name": "ops",
    "api_url": "https://chat.example.com",
    "channel": "4xp9fdt77pncbef59f4k1qe83o",
    "token": TOKEN,
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"api_url": "http://chat.example.com"}, "api_url: expected https, got http: set allow"),
        ({"api_url": "chat.example.com"}, "api_url: expected a URL that starts with https://"),
        ({"api_url": "https://u:p@chat.example.com"}, "without user and password"),
        ({"api_url": "https://169.254.169.254"}, "got a metadata or host address"),
        ({"channel": "../users/me"}, "channel"),
        ({"token": None}, "token: expected the bot account's access token"),
        ({"token": "two words"}, "token: expected the bot account's access token"),
        ({"approve_in_chat": True}, "secret: expected a secret or secret_file for approve_in"),
        ({"approve_in_chat": True, "secret": "short"}, "secret: expected whsec_"),
    ],
    ids=str,
)
def test_unusable_settings_are_refused_without_repeating_secrets(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(problem)) as caught:
        Settings.model_validate({**SECTION, **changes})
    assert TOKEN not in str(caught.value)
    assert "two words" not in str(caught.value)


def test_token_and_secret_can_be_in_files(tmp_path: Path) -> None:
    token_file, secret_file = tmp_path / "token", tmp_path / "secret"
    token_file.write_text(f"{TOKEN}\n")
    secret_file.write_text(f"{SECRET}\n")
    section = {
        **SECTION,
        "token": None,
        "token_file": str(token_file),
        "approve_in_chat": True,
        "secret_file": str(secret_file),
    }
    settings = Settings.model_validate(section)
    assert settings.bot_token() == TOKEN
    assert len(settings.signing_key()) == 32


def test_approve_in_chat_needs_the_url_that_mattermost_calls() -> None:
    section = {**SECTION, "approve_in_chat": True, "secret": SECRET}
    problem = (
        r"api\.public_url: expected the URL at which the platform of sink ops reaches this relay"
    )
    with pytest.raises(ValidationError, match=problem):
        Config.model_validate({"sinks": [section]})
    Config.model_validate({"sinks": [section], "api": {"public_url": "https://relay.example.com"}})
