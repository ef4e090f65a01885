"""Slack's section of the configuration: what is asked for, and what makes no sense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.chat.platforms.slack.settings import Settings
from tests.chat.slack_server import APP_TOKEN, CHANNEL, SECRET, TOKEN

GIVEN: dict[str, Any] = {"kind": "slack", "name": "ops", "token": TOKEN, "channel": CHANNEL}


def test_a_token_and_a_channel_are_enough_to_tell() -> None:
    settings = Settings.model_validate(GIVEN)
    assert (str(settings.base()), settings.stale, settings.approve_in_chat) == (
        "https://slack.com/api/",
        "drop",
        False,
    )
    assert not settings.accepts_callbacks
    assert not settings.has_socket


def test_the_api_url_gets_its_slash() -> None:
    assert (
        str(Settings.model_validate(GIVEN | {"api_url": "https://slack-gov.com/api"}).base())
        == "https://slack-gov.com/api/"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token": None}, "expected token or token_file, got neither"),
        ({"token": "xoxp-1234567890-abc"}, "token: expected a bot token, which starts with xoxb-"),
        ({"token": APP_TOKEN}, "token: expected a bot token, which starts with xoxb-"),
        ({"token": "xoxb-1234567890 "}, "token: expected a bot token"),
        ({"channel": "#ops"}, "channel"),
        ({"channel": "ops"}, "channel"),
        ({"channel": "D024BE91L"}, "channel"),
        (
            {"approve_in_chat": True},
            "approve_in_chat: expected signing_secret or app_token beside it",
        ),
        (
            {"signing_secret": SECRET, "app_token": APP_TOKEN},
            "expected one of signing_secret .* and app_token .*, got both",
        ),
        ({"signing_secret": "short"}, "signing_secret: expected the app's signing secret"),
        ({"app_token": TOKEN}, "app_token: expected an app-level token, which starts with xapp-"),
        ({"api_url": "http://slack.com/api/"}, "api_url: expected https, got http"),
        ({"api_url": "https://slack.com/api/?a=b"}, "api_url: expected a URL without a query"),
        (
            {"api_url": "https://user:pass@slack.com/api/"},
            "api_url: expected a URL without user and password",
        ),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_what_makes_no_sense_is_an_error_that_holds_no_secret(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError, match=expected) as caught:
        Settings.model_validate(
            {name: value for name, value in (GIVEN | changes).items() if value is not None}
        )
    assert not any(
        secret in str(caught.value) for secret in (TOKEN, APP_TOKEN, SECRET, "xoxp-1234567890-abc")
    )


def test_every_secret_can_be_in_a_file(tmp_path: Path) -> None:
    for name, text in {"token": TOKEN, "signing_secret": SECRET, "app_token": APP_TOKEN}.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    given = {
        "kind": "slack",
        "name": "ops",
        "channel": CHANNEL,
        "token_file": str(tmp_path / "token"),
        "approve_in_chat": True,
    }
    called = Settings.model_validate(
        given | {"signing_secret_file": str(tmp_path / "signing_secret")}
    )
    assert (called.bot_token(), called.secret(), called.accepts_callbacks) == (
        TOKEN,
        SECRET.encode(),
        True,
    )
    listening = Settings.model_validate(given | {"app_token_file": str(tmp_path / "app_token")})
    assert (listening.socket_token(), listening.has_socket) == (APP_TOKEN, True)
    (tmp_path / "token").write_text("nonsense", encoding="utf-8")
    with pytest.raises(ValidationError, match="token_file: expected a bot token"):
        Settings.model_validate(given | {"app_token_file": str(tmp_path / "app_token")})


def test_without_the_sdk_the_relay_runs_and_says_what_is_missing() -> None:
    """It comes with imds-relay[slack], and nobody else needs it."""
    program = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.startswith("slack_sdk") else found(name, package)
sys.modules["slack_sdk"] = None
from relay.config import Config
Config.model_validate({})
try:
    Config.model_validate({"sinks": [{"kind": "slack", "name": "ops", "channel": "C024BE91L", "token": "xoxb-1234567890"}]})
except ValueError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "expected the package imds-relay[slack]" in run.stdout


def test_a_relay_without_slack_does_not_load_the_sdk() -> None:
    """It takes 3.5 MB."""
    code = "import sys, relay.app; from relay.config import Config; Config(); sys.exit('slack_sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
