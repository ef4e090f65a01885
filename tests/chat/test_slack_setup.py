"""The set-up of Slack: the section, the app's manifest, what `doctor` reports, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.chat.platforms import slack as slack_platform
from relay.chat.platforms.slack.api import Settings
from relay.chat.platforms.slack.manifest import SCOPES, manifest
from relay.clock import SystemClock
from tests.chat.slack_server import (
    APP_TOKEN,
    CHANNEL,
    TEAM,
    TOKEN,
    FailureHandler,
    api_error,
    never_answers,
    responds,
    running_slack,
)
from tests.documented import blocks

PAGE = Path(__file__).parent.parent.parent / "docs" / "chat" / "slack.md"
USER_TOKEN = "xoxp-1234567890-abc"
WRONG_BOT_TOKEN = "token: expected a bot token, which starts with xoxb-"
SECTION: dict[str, Any] = {"kind": "slack", "name": "ops", "token": TOKEN, "channel": CHANNEL}


def test_a_token_and_a_channel_are_enough() -> None:
    settings = Settings.model_validate(SECTION)
    assert settings.approve_in_chat is settings.uses_socket_mode is False


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token": None}, "expected token or token_file, got neither"),
        ({"token": USER_TOKEN}, WRONG_BOT_TOKEN),
        ({"token": "xoxb-1234567890 "}, WRONG_BOT_TOKEN),
        ({"channel": "#ops"}, "channel"),
        ({"channel": "D024BE91L"}, "channel"),
        ({"approve_in_chat": True}, "approve_in_chat: expected app_token or app_token_file"),
        ({"app_token": TOKEN}, "app_token: expected an app-level token, which starts with xapp-"),
        ({"signing_secret": "8f742231b10e8888abcd99yyyzzz85a5"}, "signing_secret"),
        ({"api_url": "http://slack.com/api/"}, "api_url: expected https, got http"),
        ({"api_url": "https://slack.com/api/?a=b"}, "api_url: expected a URL without a query"),
        ({"api_url": "http://169.254.169.254/api/", "allow_http": True}, "metadata or host"),
    ],
    ids=str,
)
def test_an_invalid_section_is_refused_without_showing_secrets(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError, match=expected) as caught:
        Settings.model_validate(
            {name: value for name, value in (SECTION | changes).items() if value is not None}
        )
    assert not any(secret in str(caught.value) for secret in (TOKEN, APP_TOKEN, USER_TOKEN))


def test_every_secret_can_be_in_a_file(tmp_path: Path) -> None:
    section = {"kind": "slack", "name": "ops", "channel": CHANNEL, "approve_in_chat": True}
    for name, text in {"token": TOKEN, "app_token": APP_TOKEN}.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
        section[f"{name}_file"] = str(tmp_path / name)
    settings = Settings.model_validate(section)
    assert (settings.bot_token(), settings.app_level_token()) == (TOKEN, APP_TOKEN)
    (tmp_path / "token").write_text("nonsense", encoding="utf-8")
    with pytest.raises(ValidationError, match="token_file: expected a bot token"):
        Settings.model_validate(section)


def test_the_app_requests_only_the_scopes_that_it_uses() -> None:
    """chat:write posts and edits, commands brings the command, users:read allows users.info."""
    assert set(SCOPES) == {"chat:write", "commands", "users:read"}
    assert manifest("socket")["oauth_config"]["scopes"] == {"bot": list(SCOPES)}
    assert manifest("none")["oauth_config"]["scopes"] == {"bot": ["chat:write"]}


def test_an_app_without_answers_has_no_command_and_no_interactivity() -> None:
    app = manifest("none")
    assert "slash_commands" not in app["features"]
    assert "interactivity" not in app["settings"]


@pytest.mark.parametrize("answers", ["none", "socket"])
def test_a_manifest_is_within_slacks_limits(answers: str) -> None:
    """https://docs.slack.dev/reference/app-manifest."""
    app = manifest(answers)
    assert app["settings"]["socket_mode_enabled"] is (answers == "socket")
    assert len(app["display_information"]["name"]) <= 35
    assert len(app["display_information"]["description"]) <= 140
    assert re.fullmatch(r"#[0-9a-f]{6}", app["display_information"]["background_color"])
    assert app["settings"]["token_rotation_enabled"] is False
    for command in app["features"].get("slash_commands", []):
        assert re.fullmatch(r"/[a-z]{1,31}", command["command"])
        assert "url" not in command
        assert len(command["description"]) <= 2000
        assert len(command["usage_hint"]) <= 1000


@pytest.mark.parametrize(
    ("method", "failure_handler", "message"),
    [
        ("", responds(200), f"Slack accepts the tokens, for the workspace {TEAM}"),
        ("auth.test", api_error("invalid_auth"), "Slack answered invalid_auth: token does not"),
        ("auth.test", responds(200, body="<html>"), "is api_url correct?"),
        ("auth.test", never_answers, "expected an answer within 0.5 s"),
        ("auth.test", responds(200, {"ok": True}), "expected team_id in Slack's answer"),
        (
            "bots.info",
            api_error("missing_scope", needed="users:read"),
            "lacks the scope users:read",
        ),
        ("apps.connections.open", api_error("not_allowed_token_type"), "app_token with xapp-"),
    ],
)
async def test_doctor_reports_whether_slack_accepts_the_tokens(
    method: str, failure_handler: FailureHandler, message: str
) -> None:
    async with running_slack() as slack:
        slack.failures[method] = failure_handler
        timeout = "500ms" if failure_handler is never_answers else "30s"
        settings = Settings.model_validate(slack.settings(timeout=timeout))
        (finding,) = await slack_platform.diagnose(settings, SystemClock(), "prod")
        state = "failed" if method else "ok"
        assert (finding.subject, finding.state) == ("sink ops", state)
        assert message in finding.message
        assert TOKEN not in finding.message
        assert slack.channel_messages() == []


def test_the_manifest_on_the_page_is_the_one_that_the_command_prints() -> None:
    (printed,) = map(json.loads, blocks("docs/chat/slack.md", "json"))
    assert printed == manifest("socket")
