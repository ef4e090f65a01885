"""Slack: what is posted, what answers mean, the app's manifest, doctor, and how cards look."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.chat import MessageGone
from relay.chat.cards.card import Button, Card, EventLine
from relay.chat.platforms import slack as slack_platform
from relay.chat.platforms.slack import SCOPES, manifest
from relay.chat.platforms.slack.api import REMEDIES, Settings, WebApi
from relay.chat.platforms.slack.messages import (
    MAX_BLOCKS_BYTES,
    Channel,
    card_message,
    text_message,
)
from relay.clock import SystemClock
from relay.errors import Deferred, Rejected
from relay.net.http import open_session
from relay.sentences import PrincipalRef, Text
from tests.chat.slack_block_kit import is_valid_block_kit, rich_text_elements, text_of_blocks
from tests.chat.slack_server import (
    ALICE,
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
from tests.depth import depth

CARD = Card(
    title="Reboot of vm-0", tone="waiting", summary=("Azure begins soon.",), footer="E-1 · prod"
)


# --- single calls


@asynccontextmanager
async def connected_channel(**changes: Any) -> AsyncIterator[tuple[SlackServer, Channel]]:
    """Run a Slack server, and yield it with a channel in it."""
    async with running_slack() as slack, open_session() as session:
        section = slack.settings(**{"timeout": "30s", **changes})
        settings = Settings.model_validate(section)
        api = WebApi(session, settings, SystemClock())
        yield slack, Channel(api, settings)


async def test_a_message_is_posted_once_without_unfurling_links() -> None:
    async with connected_channel() as (slack, channel):
        await channel.post(CARD)
        (_, (method, posted)) = slack.calls
        assert (slack.calls[0][0], method) == ("auth.test", "chat.postMessage")
        assert posted["channel"] == CHANNEL
        assert posted["unfurl_links"] is posted["unfurl_media"] is False
        assert posted["text"] == "🟡 Reboot of vm-0. Azure begins soon."


async def test_what_is_called_json_is_a_json_object_also_without_arguments() -> None:
    bodies: list[bytes] = []

    async def keep(request: web.Request) -> web.StreamResponse:
        assert request.content_type == "application/json"
        bodies.append(await request.read())
        return web.json_response({"ok": False, "error": "internal_error"})

    async with connected_channel() as (slack, channel):
        slack.failures["auth.test"] = keep
        with pytest.raises(Deferred):
            await channel.post(CARD)
    assert bodies == [b"{}"]


async def test_a_message_whose_answer_is_long_is_posted_once() -> None:
    """Slack repeats the message, with escapes for all that is not ASCII."""
    lines = tuple(EventLine(("😀" * 1500,)) for _ in range(10))
    async with connected_channel() as (slack, channel):
        await channel.post(replace(CARD, lines=lines))
        assert len(slack.channel_messages()) == 1


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


# --- cards


NOON = datetime(2026, 4, 11, 12, 0, 30, 500000, tzinfo=UTC)

words = st.text(max_size=60) | st.sampled_from(
    ["<!channel>", "<@U1>", "*bold*", "a\nb", "&amp;", "😀" * 900, "x" * 5000, "\x00", "\u202e"]
)
people = st.sampled_from(
    ["slack:T0OTHER/U1", "client:alice", *(f"slack:{TEAM}/{who}" for who in (ALICE, "<!here>", ""))]
).map(PrincipalRef)
moments = st.datetimes(timezones=st.just(UTC))
texts: st.SearchStrategy[Text] = st.lists(words | moments | people, max_size=6).map(tuple)
buttons = st.builds(
    Button,
    decision=st.sampled_from(["approve", "hold", "release"]),
    label=st.text(min_size=1, max_size=100).filter(str.strip),
    event_id=st.text(min_size=1, max_size=300),
    revision=st.just("3f" * 16),
    question=texts.map(lambda text: ("Really? ", *text)),
    url=st.none() | st.just("https://relay.example.com/#/event/s/E-1/approve/r"),
)
cards = st.builds(
    Card,
    title=st.text(min_size=1, max_size=400),
    tone=st.sampled_from(["waiting", "held", "approved", "running", "over"]),
    summary=st.tuples(st.just("It is so: "), words),
    facts=st.lists(st.tuples(st.sampled_from(["Machines", "Azure says"]), texts), max_size=8).map(
        tuple
    ),
    notes=st.lists(texts.filter(bool), max_size=4).map(tuple),
    lines=st.lists(
        st.builds(EventLine, text=texts, buttons=st.lists(buttons, max_size=3).map(tuple)),
        max_size=10,
    ).map(tuple),
    buttons=st.lists(buttons, max_size=3).map(tuple),
    footer=st.text(max_size=400),
)


@settings(max_examples=depth(200, 15))
@given(cards, st.booleans())
def test_a_card_is_within_limits_and_mentions_only_principals(card: Card, has_clicks: bool) -> None:
    message = card_message(card, TEAM, has_clicks=has_clicks)
    assert is_valid_block_kit(message["blocks"])
    assert 0 < len(message["text"]) <= 10_000
    assert len(orjson.dumps(message["blocks"])) <= MAX_BLOCKS_BYTES
    assert len(text_of_blocks(message["blocks"]).splitlines()) <= len(message["blocks"]) + 12
    if has_clicks:
        shown = sum(block["type"] == "actions" for block in message["blocks"])
        assert shown == sum(map(bool, (card.buttons, *(line.buttons for line in card.lines))))
    text_types = {
        element.get("type")
        for block in message["blocks"]
        for element in (block.get("text") or {}, *block.get("elements", ()))
    }
    assert "mrkdwn" not in text_types
    elements = rich_text_elements(message["blocks"])
    assert {element["type"] for element in elements} <= {"text", "date", "user", "link"}
    mentioned = {element["user_id"] for element in elements if element["type"] == "user"}
    assert mentioned <= {ALICE}
    linked = {element["url"] for element in elements if element["type"] == "link"}
    assert linked <= {"https://relay.example.com/#/event/s/E-1/approve/r"}
    markup = message["text"].split("<")[1:]
    assert all(piece.startswith((f"@{ALICE}>", "!date^")) for piece in markup)


@settings(max_examples=depth(200, 15))
@given(st.lists(texts, min_size=1, max_size=21))
def test_every_text_message_is_within_the_limits(lines: list[Text]) -> None:
    if any(lines):
        message = text_message([("so: ", *line) for line in lines], TEAM)
        assert is_valid_block_kit(message["blocks"])
        assert 0 < len(message["text"]) <= 10_000


def test_times_are_in_the_readers_time_zone_and_members_are_mentioned() -> None:
    summary: Text = (
        "Azure begins at ",
        NOON,
        ", says ",
        PrincipalRef(f"slack:{TEAM}/{ALICE}"),
        " and ",
        PrincipalRef("slack:T0OTHER/U1"),
    )
    card = Card(title="Reboot", tone="waiting", summary=summary)
    message = card_message(card, TEAM, has_clicks=True)
    timestamp = int(NOON.timestamp())
    date_format = "{time_secs} on {date_short}"
    assert message["text"] == (
        f"🟡 Reboot. Azure begins at <!date^{timestamp}^{date_format}|2026-04-11 12:00:30 UTC>, "
        f"says <@{ALICE}> and slack:T0OTHER/U1"
    )
    elements = rich_text_elements(message["blocks"])
    assert [element for element in elements if element["type"] != "text"] == [
        {
            "type": "date",
            "timestamp": timestamp,
            "format": date_format,
            "fallback": "2026-04-11 12:00:30 UTC",
            "style": {"bold": True},
        },
        {"type": "user", "user_id": ALICE},
    ]


def test_a_button_asks_for_confirmation_and_returns_its_decision() -> None:
    question: Text = (
        f"Reboot of {'vm-0, ' * 80}: it may begin within seconds, and cannot be taken back.",
    )
    button = Button(
        decision="approve",
        label="Approve",
        event_id="E-1 with spaces",
        revision="3f3f",
        question=question,
    )
    card = Card(title="Reboot", tone="waiting", summary=("So.",), buttons=(button,))
    message = card_message(card, TEAM, has_clicks=True)
    (element,) = message["blocks"][-1]["elements"]
    assert (element["value"], element["style"], element["action_id"]) == (
        "approve 3f3f E-1 with spaces",
        "primary",
        "approve-1",
    )
    assert element["confirm"]["title"]["text"] == "Approve?"
    confirm_text = element["confirm"]["text"]["text"]
    assert confirm_text.startswith("Reboot of vm-0, ")
    assert confirm_text.endswith("it may begin within seconds, and cannot be taken back.")
    assert len(confirm_text) == 300


def test_long_texts_are_cut_until_slack_takes_the_message_and_keep_their_ends() -> None:
    lines = tuple(EventLine((f"{'😀' * 1500} end",)) for _ in range(10))
    card = Card(title="100 events", tone="waiting", summary=("So.",), lines=lines, notes=(("N",),))
    message = card_message(card, TEAM, has_clicks=True)
    assert len(orjson.dumps(message["blocks"])) <= MAX_BLOCKS_BYTES
    text = text_of_blocks(message["blocks"])
    assert text.count(" end\n") == 10
    assert text.endswith("\nN")
