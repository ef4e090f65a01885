"""Slack's section of the configuration: its defaults, and the sections that are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.chat.platforms.slack.settings import Settings
from tests.chat.slack_server import APP_TOKEN, CHANNEL, SECRET, TOKEN

USER_TOKEN = "xoxp-1234567890-abc"
WRONG_BOT_TOKEN = "token: expected a bot token, which starts with xoxb-"
SECTION: dict[str, Any] = {"kind": "slack", "name": "ops", "token": TOKEN, "channel": CHANNEL}


def test_a_token_and_a_channel_are_enough() -> None:
    settings = Settings.model_validate(SECTION)
    assert (str(settings.web_api_base_url()), settings.stale, settings.approve_in_chat) == (
        "https://slack.com/api/",
        "drop",
        False,
    )
    assert not settings.uses_http_callbacks
    assert not settings.uses_socket_mode


def test_api_url_gets_a_slash_at_its_end() -> None:
    assert (
        str(
            Settings.model_validate(
                SECTION | {"api_url": "https://slack-gov.com/api"}
            ).web_api_base_url()
        )
        == "https://slack-gov.com/api/"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"token": None}, "expected token or token_file, got neither", id="no token"),
        pytest.param({"token": USER_TOKEN}, WRONG_BOT_TOKEN, id="user token"),
        pytest.param({"token": APP_TOKEN}, WRONG_BOT_TOKEN, id="app token as token"),
        pytest.param({"token": "xoxb-1234567890 "}, WRONG_BOT_TOKEN, id="token with a blank"),
        pytest.param({"channel": "#ops"}, "channel", id="channel with a hash sign"),
        pytest.param({"channel": "ops"}, "channel", id="name of a channel"),
        pytest.param({"channel": "D024BE91L"}, "channel", id="direct message"),
        pytest.param(
            {"approve_in_chat": True},
            "approve_in_chat: expected signing_secret or app_token beside it",
            id="approve_in_chat without a proof of who clicked",
        ),
        pytest.param(
            {"signing_secret": SECRET, "app_token": APP_TOKEN},
            "expected one of signing_secret .* and app_token .*, got both",
            id="both kinds of callbacks",
        ),
        pytest.param(
            {"signing_secret": "short"},
            "signing_secret: expected the app's signing secret",
            id="short signing secret",
        ),
        pytest.param(
            {"app_token": TOKEN},
            "app_token: expected an app-level token, which starts with xapp-",
            id="bot token as app_token",
        ),
        pytest.param(
            {"api_url": "http://slack.com/api/"}, "api_url: expected https, got http", id="http"
        ),
        pytest.param(
            {"api_url": "https://slack.com/api/?a=b"},
            "api_url: expected a URL without a query",
            id="URL with a query",
        ),
        pytest.param(
            {"api_url": "https://user:pass@slack.com/api/"},
            "api_url: expected a URL without user and password",
            id="URL with a password",
        ),
        pytest.param({"colour": "blue"}, "colour", id="unknown key"),
    ],
)
def test_an_invalid_section_is_refused_without_showing_secrets(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError, match=expected) as caught:
        Settings.model_validate(
            {name: value for name, value in (SECTION | changes).items() if value is not None}
        )
    assert not any(secret in str(caught.value) for secret in (TOKEN, APP_TOKEN, SECRET, USER_TOKEN))


def test_every_secret_can_be_in_a_file(tmp_path: Path) -> None:
    for name, text in {"token": TOKEN, "signing_secret": SECRET, "app_token": APP_TOKEN}.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    section = {
        "kind": "slack",
        "name": "ops",
        "channel": CHANNEL,
        "token_file": str(tmp_path / "token"),
        "approve_in_chat": True,
    }
    with_callbacks = Settings.model_validate(
        section | {"signing_secret_file": str(tmp_path / "signing_secret")}
    )
    assert (
        with_callbacks.bot_token(),
        with_callbacks.current_signing_secret(),
        with_callbacks.uses_http_callbacks,
    ) == (
        TOKEN,
        SECRET.encode(),
        True,
    )
    with_socket = Settings.model_validate(section | {"app_token_file": str(tmp_path / "app_token")})
    assert (with_socket.app_level_token(), with_socket.uses_socket_mode) == (APP_TOKEN, True)
    (tmp_path / "token").write_text("nonsense", encoding="utf-8")
    with pytest.raises(ValidationError, match="token_file: expected a bot token"):
        Settings.model_validate(section | {"app_token_file": str(tmp_path / "app_token")})


def test_without_the_sdk_a_slack_sink_is_refused_with_the_package_to_install() -> None:
    program = """
import importlib.util, sys
find_spec = importlib.util.find_spec
def find_other_spec(name, package=None):
    return None if name.startswith("slack_sdk") else find_spec(name, package)
importlib.util.find_spec = find_other_spec
sys.modules["slack_sdk"] = None
from relay.config import Config
Config.model_validate({})
try:
    sink = {"kind": "slack", "name": "ops", "channel": "C024BE91L", "token": "xoxb-1234567890"}
    Config.model_validate({"sinks": [sink]})
except ValueError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "expected the package slack-sdk" in run.stdout


def test_a_relay_without_slack_does_not_load_the_sdk() -> None:
    """It would need 3.5 MB."""
    program = """
import sys, relay.app, relay.roles.plain
from relay.config import Config
Config()
sys.exit("slack_sdk" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
