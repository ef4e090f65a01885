"""Setting Slack up: the app's manifest, what `doctor` says of a sink, and the page that says how."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from relay.chat.platforms import slack as member
from relay.chat.platforms.slack.manifest import COMMAND, SCOPES, manifest
from relay.chat.platforms.slack.settings import Settings
from relay.clock import SystemClock
from relay.diagnostics import State
from tests.chat.slack_server import APP_TOKEN, TEAM, TOKEN, Trouble, error, hangs, says, slack

PAGE = Path(__file__).parent.parent.parent / "docs" / "chat" / "slack.md"
URL = "https://relay.example.com/v1/chat/ops"


def test_the_app_asks_for_no_right_that_it_does_not_use() -> None:
    """chat:write posts and edits, commands hears the command, users:read asks users.info and bots.info."""
    assert set(SCOPES) == {"chat:write", "commands", "users:read"}
    assert manifest("socket")["oauth_config"]["scopes"] == {"bot": list(SCOPES)}
    assert manifest("none")["oauth_config"]["scopes"] == {"bot": ["chat:write"]}


def test_an_app_in_socket_mode_names_no_address() -> None:
    made = manifest("socket")
    assert made["settings"]["socket_mode_enabled"] is True
    assert made["settings"]["interactivity"] == {"is_enabled": True}
    assert "url" not in made["features"]["slash_commands"][0]


def test_an_app_that_is_called_names_the_relay_twice() -> None:
    made = manifest(URL)
    assert made["settings"]["socket_mode_enabled"] is False
    assert made["settings"]["interactivity"] == {"is_enabled": True, "request_url": URL}
    assert (
        made["features"]["slash_commands"][0]["command"],
        made["features"]["slash_commands"][0]["url"],
    ) == (COMMAND, URL)


def test_an_app_that_only_tells_hears_nothing() -> None:
    made = manifest("none")
    assert "slash_commands" not in made["features"]
    assert "interactivity" not in made["settings"]


@pytest.mark.parametrize("answers", ["none", "socket", URL])
def test_a_manifest_is_within_slacks_limits(answers: str) -> None:
    """https://docs.slack.dev/reference/app-manifest."""
    made = manifest(answers)
    assert len(made["display_information"]["name"]) <= 35
    assert len(made["display_information"]["description"]) <= 140
    assert re.fullmatch(r"#[0-9a-f]{6}", made["display_information"]["background_color"])
    assert made["settings"]["token_rotation_enabled"] is False
    for command in made["features"].get("slash_commands", []):
        assert re.fullmatch(r"/[a-z]{1,31}", command["command"])
        assert len(command["description"]) <= 2000
        assert len(command["usage_hint"]) <= 1000


@pytest.mark.parametrize(
    ("method", "trouble", "state", "said"),
    [
        (None, None, "ok", f"Slack takes what it was given, for the workspace {TEAM}"),
        ("auth.test", error("invalid_auth"), "failed", "Slack answered invalid_auth: token is not"),
        ("auth.test", says(200, body="<html>"), "failed", "does api_url name it?"),
        ("auth.test", hangs, "failed", "expected an answer within 0.5 s"),
        ("auth.test", says(200, {"ok": True}), "failed", "expected team_id in Slack's answer"),
        (
            "bots.info",
            error("missing_scope", needed="users:read"),
            "failed",
            "the app lacks the scope users:read",
        ),
        (
            "apps.connections.open",
            error("not_allowed_token_type"),
            "failed",
            "app_token with xapp-",
        ),
    ],
)
async def test_doctor_says_whether_slack_takes_what_it_is_given(
    method: str | None, trouble: Trouble | None, state: State, said: str
) -> None:
    async with slack() as here:
        if method is not None and trouble is not None:
            here.trouble[method] = trouble
        timeout = "500ms" if trouble is hangs else "30s"
        settings = Settings.model_validate(
            here.settings(signing_secret=None, app_token=APP_TOKEN, timeout=timeout)
        )
        (found,) = await member.diagnose(settings, SystemClock(), "prod")
        assert (found.subject, found.state) == ("sink ops", state)
        assert said in found.message
        assert TOKEN not in found.message
        assert here.tops() == []


def test_the_sinks_of_the_page_are_right() -> None:
    """With secrets in the place of files."""
    blocks = [
        YAML(typ="safe").load(one)
        for one in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ]
    first, more = blocks[0]["sinks"][0], blocks[1]["sinks"][0]
    given: dict[str, Any] = {"token": TOKEN, "app_token": APP_TOKEN}
    section = {
        name.removesuffix("_file"): given.get(name.removesuffix("_file"), value)
        for name, value in {**first, **more}.items()
    }
    assert Settings.model_validate(section).approve_in_chat is True
    assert all(
        re.fullmatch(r"slack:T[A-Z0-9]+/U[A-Z0-9]+", one)
        for one in blocks[1]["approvals"]["groups"]["oncall"]
    )


def test_the_pictures_of_the_page_are_there_and_small() -> None:
    names = re.findall(r"\((slack-[a-z]+\.png)\)", PAGE.read_text(encoding="utf-8"))
    assert len(names) == 4
    assert all((PAGE.parent / name).stat().st_size < 60_000 for name in names)
