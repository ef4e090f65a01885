"""The set-up of Slack: the app's manifest, what `doctor` reports, and the documentation page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from relay.chat.platforms import slack as slack_platform
from relay.chat.platforms.slack.manifest import COMMAND, SCOPES, manifest
from relay.chat.platforms.slack.settings import Settings
from relay.clock import SystemClock
from relay.doctor_findings import State
from tests.chat.slack_server import (
    APP_TOKEN,
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
URL = "https://relay.example.com/v1/chat/ops"


def test_the_app_requests_only_the_scopes_that_it_uses() -> None:
    """chat:write posts and edits, commands brings the command, users:read allows users.info."""
    assert set(SCOPES) == {"chat:write", "commands", "users:read"}
    assert manifest("socket")["oauth_config"]["scopes"] == {"bot": list(SCOPES)}
    assert manifest("none")["oauth_config"]["scopes"] == {"bot": ["chat:write"]}


def test_an_app_in_socket_mode_has_no_request_url() -> None:
    app = manifest("socket")
    assert app["settings"]["socket_mode_enabled"] is True
    assert app["settings"]["interactivity"] == {"is_enabled": True}
    assert "url" not in app["features"]["slash_commands"][0]


def test_an_app_without_socket_mode_has_the_relays_url_twice() -> None:
    app = manifest(URL)
    assert app["settings"]["socket_mode_enabled"] is False
    assert app["settings"]["interactivity"] == {"is_enabled": True, "request_url": URL}
    assert (
        app["features"]["slash_commands"][0]["command"],
        app["features"]["slash_commands"][0]["url"],
    ) == (COMMAND, URL)


def test_an_app_without_answers_has_no_command_and_no_interactivity() -> None:
    app = manifest("none")
    assert "slash_commands" not in app["features"]
    assert "interactivity" not in app["settings"]


@pytest.mark.parametrize("answers", ["none", "socket", URL])
def test_a_manifest_is_within_slacks_limits(answers: str) -> None:
    """https://docs.slack.dev/reference/app-manifest."""
    app = manifest(answers)
    assert len(app["display_information"]["name"]) <= 35
    assert len(app["display_information"]["description"]) <= 140
    assert re.fullmatch(r"#[0-9a-f]{6}", app["display_information"]["background_color"])
    assert app["settings"]["token_rotation_enabled"] is False
    for command in app["features"].get("slash_commands", []):
        assert re.fullmatch(r"/[a-z]{1,31}", command["command"])
        assert len(command["description"]) <= 2000
        assert len(command["usage_hint"]) <= 1000


@pytest.mark.parametrize(
    ("method", "failure_handler", "state", "message"),
    [
        pytest.param(
            None,
            None,
            "ok",
            f"Slack accepts the tokens, for the workspace {TEAM}",
            id="accepted",
        ),
        pytest.param(
            "auth.test",
            api_error("invalid_auth"),
            "failed",
            "Slack answered invalid_auth: token does not belong",
            id="invalid token",
        ),
        pytest.param(
            "auth.test",
            responds(200, body="<html>"),
            "failed",
            "is api_url correct?",
            id="not the Web API",
        ),
        pytest.param(
            "auth.test",
            never_answers,
            "failed",
            "expected an answer within 0.5 s",
            id="no answer",
        ),
        pytest.param(
            "auth.test",
            responds(200, {"ok": True}),
            "failed",
            "expected team_id in Slack's answer",
            id="no team id",
        ),
        pytest.param(
            "bots.info",
            api_error("missing_scope", needed="users:read"),
            "failed",
            "the app lacks the scope users:read",
            id="missing scope",
        ),
        pytest.param(
            "apps.connections.open",
            api_error("not_allowed_token_type"),
            "failed",
            "app_token with xapp-",
            id="wrong app token",
        ),
    ],
)
async def test_doctor_reports_whether_slack_accepts_the_tokens(
    method: str | None, failure_handler: FailureHandler | None, state: State, message: str
) -> None:
    async with running_slack() as slack:
        if method is not None and failure_handler is not None:
            slack.failures[method] = failure_handler
        timeout = "500ms" if failure_handler is never_answers else "30s"
        settings = Settings.model_validate(
            slack.settings(signing_secret=None, app_token=APP_TOKEN, timeout=timeout)
        )
        (finding,) = await slack_platform.diagnose(settings, SystemClock(), "prod")
        assert (finding.subject, finding.state) == ("sink ops", state)
        assert message in finding.message
        assert TOKEN not in finding.message
        assert slack.channel_messages() == []


def test_the_sections_on_the_page_are_valid() -> None:
    documents = [YAML(typ="safe").load(text) for text in blocks("docs/chat/slack.md", "yaml")]
    section: dict[str, Any] = {**documents[0]["sinks"][0], **documents[1]["sinks"][0]}
    for key, secret in {"token": TOKEN, "app_token": APP_TOKEN}.items():
        del section[f"{key}_file"]
        section[key] = secret
    assert Settings.model_validate(section).approve_in_chat is True
    assert all(
        re.fullmatch(r"slack:T[A-Z0-9]+/U[A-Z0-9]+", principal)
        for principal in documents[1]["approvals"]["groups"]["oncall"]
    )


def test_the_manifests_on_the_page_are_those_that_the_command_prints() -> None:
    by_socket, by_url = map(json.loads, blocks("docs/chat/slack.md", "json"))
    assert by_socket == manifest("socket")
    assert by_url == manifest("https://relay.example.com/v1/chat/slack-ops")


def test_the_pictures_on_the_page_exist_and_are_small() -> None:
    names = re.findall(r"\((slack-[a-z]+\.png)\)", PAGE.read_text(encoding="utf-8"))
    assert len(names) == 4
    assert all((PAGE.parent / name).stat().st_size < 60_000 for name in names)
