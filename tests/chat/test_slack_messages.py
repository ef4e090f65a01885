"""Slack: what is posted, what every answer means, the app's manifest, and what doctor reports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relay.chat import MessageGone
from relay.chat.cards.card import Card
from relay.chat.platforms import slack as slack_platform
from relay.chat.platforms.slack import SCOPES, manifest
from relay.chat.platforms.slack.api import REMEDIES, Settings, WebApi
from relay.chat.platforms.slack.messages import Channel
from relay.clock import SystemClock
from relay.errors import Deferred, Rejected
from relay.net.http import open_session
from tests.chat.running_relay import rule, stage
from tests.chat.slack_server import (
    CHANNEL,
    TEAM,
    TOKEN,
    FailureHandler,
    SlackServer,
    api_error,
    never_answers,
    rate_limited,
    responds,
    running_slack,
)
from tests.eventually import eventually

APPROVALS = {"rules": [rule(1, "client:alice")]}
CARD = Card(
    title="Reboot of vm-0", tone="waiting", summary=("Azure begins soon.",), footer="E-1 · prod"
)


async def test_a_message_is_posted_once_without_unfurling_links(tmp_path: Path) -> None:
    async with (
        running_slack() as slack,
        stage(tmp_path, [slack.settings(app_token=None)], approvals=APPROVALS) as relay,
    ):
        relay.reboot("vm-0")
        await eventually(lambda: len(slack.channel_messages()) == 1)
        await relay.settle()
        (posted,) = (arguments for method, arguments in slack.calls if method == "chat.postMessage")
        assert posted["channel"] == CHANNEL
        assert posted["unfurl_links"] is posted["unfurl_media"] is False
        assert posted["text"].startswith("🟡 Reboot of vm-0. Azure begins at <!date^")
        assert [method for method, _ in slack.calls] == ["auth.test", "chat.postMessage"]


# --- single calls


@asynccontextmanager
async def connected_channel(**changes: Any) -> AsyncIterator[tuple[SlackServer, Channel]]:
    """Run a Slack server, and yield it with a channel in it."""
    async with running_slack() as slack, open_session() as session:
        section = slack.settings(**{"timeout": "30s", **changes})
        settings = Settings.model_validate(section)
        api = WebApi(session, settings, SystemClock())
        yield slack, Channel(api, settings)


async def test_an_error_with_a_remedy_names_it_and_is_retried_slowly() -> None:
    async with connected_channel() as (slack, channel):
        for code in sorted(set(REMEDIES) - {"org_login_required"}):
            slack.failures["chat.postMessage"] = api_error(code)
            with pytest.raises(Deferred) as caught:
                await channel.post(CARD)
            assert caught.value.failure == "slow"
            assert caught.value.reason == f"Slack answered {code}: {REMEDIES[code]}"
        slack.failures["chat.postMessage"] = api_error("missing_scope", needed="chat:write")
        with pytest.raises(Deferred, match="the app lacks the scope chat:write: add the scopes"):
            await channel.post(CARD)


ELSEWHERE = {"Location": "http://127.0.0.1:1/"}
UNREADABLE = "got something else with status 200"


@pytest.mark.parametrize(
    ("handler", "failure", "retry_after", "reason"),
    [
        (rate_limited(7), "transient", 7.0, "limits the rate"),
        (responds(500), "transient", None, "got 500 Internal"),
        (api_error("internal_error"), "transient", None, "internal_error"),
        (api_error("org_login_required"), "transient", None, "wait until that is done"),
        (responds(200, body="<html>"), "transient", None, UNREADABLE),
        (responds(200, {"ok": False, "error": "x" * 200}), "transient", None, UNREADABLE),
        (responds(200, {"ok": True}), "transient", None, "expected channel and ts of the posted"),
        (responds(404, body="not here"), "slow", None, "got 404 Not Found"),
        (responds(302, headers=ELSEWHERE), "slow", None, "redirects are not followed"),
        (api_error("brand_new_error"), "slow", None, "Slack answered brand_new_error"),
        (never_answers, "transient", None, "expected an answer within 0.5 s"),
    ],
)
async def test_a_failure_of_slack_is_explained(
    handler: FailureHandler, failure: str, retry_after: float | None, reason: str
) -> None:
    timeout = "500ms" if handler is never_answers else "30s"
    async with connected_channel(timeout=timeout) as (slack, channel):
        slack.failures["chat.postMessage"] = handler
        with pytest.raises(Deferred) as caught:
            await channel.post(CARD)
        assert (caught.value.failure, caught.value.after) == (failure, retry_after)
        assert reason in caught.value.reason
        assert TOKEN not in caught.value.reason
        assert slack.call_count("chat.postMessage") == 1


async def test_a_message_that_is_invalid_is_given_up_and_one_that_is_gone_is_known() -> None:
    async with connected_channel() as (slack, channel):
        for code, error in (
            ("msg_too_long", Rejected),
            ("invalid_blocks", Rejected),
            ("message_not_found", MessageGone),
            ("edit_window_closed", MessageGone),
            ("thread_not_found", MessageGone),
        ):
            slack.failures["chat.postMessage"] = slack.failures["chat.update"] = api_error(code)
            with pytest.raises(error, match=code):
                await channel.edit(f"{CHANNEL}/1.1", CARD)
            with pytest.raises(error, match=code):
                await channel.reply_in_thread(f"{CHANNEL}/1.1", [("x",)])


def test_the_app_requests_only_what_it_uses() -> None:
    """chat:write posts and edits, commands brings the command, users:read allows users.info."""
    assert set(SCOPES) == {"chat:write", "commands", "users:read"}
    app = manifest("socket")
    assert app["oauth_config"]["scopes"] == {"bot": list(SCOPES)}
    assert app["settings"]["socket_mode_enabled"] is True
    assert app["settings"]["interactivity"] == {"is_enabled": True}
    (command,) = app["features"]["slash_commands"]
    assert (command["command"], "url" in command) == ("/azmaint", False)
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
        assert (finding.about, finding.state) == ("sink ops", state)
        assert message in finding.said
        assert TOKEN not in finding.said
        assert slack.channel_messages() == []
