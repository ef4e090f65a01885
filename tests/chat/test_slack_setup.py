"""The set-up of Slack: the section, the app's manifest, what `doctor` reports, and the page."""

from __future__ import annotations

import json

import pytest

from relay.chat.platforms import slack as slack_platform
from relay.chat.platforms.slack.api import Settings
from relay.chat.platforms.slack.manifest import SCOPES, manifest
from relay.clock import SystemClock
from tests.chat.slack_server import (
    TEAM,
    TOKEN,
    FailureHandler,
    api_error,
    never_answers,
    responds,
    running_slack,
)
from tests.documented import blocks


def test_the_app_requests_only_what_it_uses() -> None:
    """chat:write posts and edits, commands brings the command, users:read allows users.info."""
    assert set(SCOPES) == {"chat:write", "commands", "users:read"}
    assert manifest("socket")["oauth_config"]["scopes"] == {"bot": list(SCOPES)}
    app = manifest("none")
    assert app["oauth_config"]["scopes"] == {"bot": ["chat:write"]}
    assert "slash_commands" not in app["features"]
    assert "interactivity" not in app["settings"]


@pytest.mark.parametrize(
    ("method", "failure_handler", "message"),
    [
        ("", responds(200), f"Slack accepts the tokens, for the workspace {TEAM}"),
        ("auth.test", api_error("invalid_auth"), "Slack answered invalid_auth: token does not"),
        ("auth.test", responds(200, body="<html>"), "is api_url correct?"),
        ("auth.test", never_answers, "expected an answer within 0.5 s"),
        ("auth.test", responds(200, {"ok": True}), "expected team_id in Slack's answer"),
        (
            "users.info",
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
