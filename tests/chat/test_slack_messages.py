"""Slack, outward: messages that are posted, edited and told in its channel, come what may."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relay.chat import MessageGone
from relay.chat.cards.card import Card
from relay.chat.platforms.slack.channel import Channel
from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.web import REMEDIES, WebApi
from relay.errors import Deferred, Rejected
from relay.net.http import open_session
from relay.simulator import VM, Plan, Setup, Simulator
from tests.chat.running_relay import Stage, rule, stage
from tests.chat.slack_server import (
    CHANNEL,
    TEAM,
    TOKEN,
    SlackServer,
    Trouble,
    error,
    hangs,
    limited,
    says,
    slack,
)
from tests.journey.relay_process import eventually

APPROVALS = {"rules": [rule(1, "client:alice")]}
CARD = Card(
    title="Reboot of vm-0", tone="waiting", summary=("Azure begins soon.",), footer="E-1 · prod"
)


async def settled(relay: Stage) -> None:
    """Everything that was said has been delivered."""

    async def idle() -> bool:
        return not await relay.running.relay.store.read(lambda tx: tx.deliveries.waiting())

    await eventually(idle)


async def test_an_event_is_one_message_that_is_edited_to_its_end(tmp_path: Path) -> None:
    async with (
        slack() as here,
        stage(tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS) as relay,
    ):
        event = relay.reboot("vm-0")
        await eventually(lambda: len(here.tops()) == 1)
        (message,) = here.tops()
        assert {label: url.partition("#")[0] for label, url in message.links().items()} == {
            "Approve": "https://relay.example.com/approve",
            "Hold": "https://relay.example.com/approve",
        }
        assert message.buttons() == {}  # Slack warns of a click that nobody acknowledges
        assert re.search(r"The page asks for this code: \d{6}$", message.words(), re.MULTILINE)
        assert await relay.approve(event) == 202
        await eventually(lambda: "Azure has begun" in message.words())
        await eventually(lambda: any("Azure began" in line for line in here.thread(message)))
        assert len(here.tops()) == 1
        assert message.links() == {}


async def test_nothing_in_a_message_is_unfurled_or_tried_twice(tmp_path: Path) -> None:
    async with (
        slack() as here,
        stage(tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS) as relay,
    ):
        relay.reboot("vm-0")
        await eventually(lambda: len(here.tops()) == 1)
        await settled(relay)
        (posted,) = (arguments for method, arguments in here.calls if method == "chat.postMessage")
        assert (posted["unfurl_links"], posted["unfurl_media"], posted["channel"]) == (
            False,
            False,
            CHANNEL,
        )
        assert posted["text"].startswith("🟡 Reboot of vm-0. Azure begins at <!date^")
        assert [method for method, _ in here.calls] == ["auth.test", "chat.postMessage"]


async def test_fifty_events_of_one_document_are_one_message(tmp_path: Path) -> None:
    async with slack() as here, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        here.per_second = 1
        for number in range(50):
            azure.schedule(Plan(type="Reboot", resources=(f"db-{number}",), lasts=None))
        async with stage(
            tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS, azure=azure
        ) as relay:
            await eventually(lambda: len(here.tops()) == 1)
            await settled(relay)
            assert here.count("chat.postMessage") == 1
            (message,) = here.tops()
            assert message.words().startswith(
                "🟡 50 maintenance events at once\n50 × Reboot. 50 waiting for votes. "
            )
            assert message.words().count("Approve  ·  Hold") == 10


async def test_a_slack_that_was_down_gets_the_latest_state_and_no_flood(tmp_path: Path) -> None:
    async with (
        slack() as here,
        stage(tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS) as relay,
    ):
        here.trouble["*"] = says(503, body="<html>down</html>")
        event = relay.reboot("vm-0")
        await eventually(lambda: here.count("auth.test") > 0)
        for decision in ("hold", "release", "hold"):
            assert await relay.approve(event, decision) == 202
        here.calls.clear()
        here.trouble.clear()
        await eventually(lambda: len(here.tops()) == 1)
        await settled(relay)
        (message,) = here.tops()
        assert "Held by: client:alice" in message.words()
        assert [line.partition(": ")[2] for line in here.thread(message)] == [
            "client:alice put it on hold.",
            "client:alice released the hold.",
            "client:alice put it on hold.",
        ]
        assert here.count("chat.postMessage") == 2
        assert here.count("chat.update") <= 1


async def test_a_rate_limit_is_kept_and_nothing_is_lost(tmp_path: Path) -> None:
    async with (
        slack() as here,
        stage(tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS) as relay,
    ):
        here.per_second = 1
        for number in range(4):
            relay.reboot(f"db-{number}")
        await eventually(lambda: len(here.tops()) == 4)
        await settled(relay)
        assert len(here.tops()) == 4


async def test_a_restart_edits_the_message_that_was_posted_before(tmp_path: Path) -> None:
    async with slack() as here, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        sink = here.settings(signing_secret=None)
        async with stage(tmp_path, [sink], approvals=APPROVALS, azure=azure) as relay:
            event = relay.reboot("vm-0")
            await eventually(lambda: len(here.tops()) == 1)
            await settled(relay)
        async with stage(tmp_path, [sink], approvals=APPROVALS, azure=azure) as relay:
            assert await relay.approve(event, "hold") == 202
            await eventually(lambda: "Held by" in here.tops()[0].words())
            await settled(relay)
        assert len(here.tops()) == 1


async def test_a_message_that_somebody_deleted_is_posted_anew(tmp_path: Path) -> None:
    async with (
        slack() as here,
        stage(tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS) as relay,
    ):
        event = relay.reboot("vm-0")
        await eventually(lambda: len(here.tops()) == 1)
        await settled(relay)
        here.messages.clear()
        assert await relay.approve(event, "hold") == 202
        await eventually(lambda: len(here.tops()) == 1 and "Held by" in here.tops()[0].words())


async def test_ping_posts_a_test_message(tmp_path: Path) -> None:
    async with (
        slack() as here,
        stage(tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS) as relay,
    ):
        headers = {"Authorization": "Bearer key-of-alice"}
        async with relay.web.post(f"{relay.url}/v1/sinks/ops/ping", headers=headers) as answer:
            assert answer.status < 300
        await eventually(lambda: len(here.tops()) == 1)
        assert "asked for by client:alice" in here.tops()[0].words()


# --- one call


@asynccontextmanager
async def channel(**settings: Any) -> AsyncIterator[tuple[SlackServer, Channel]]:
    async with slack() as here, open_session() as session:
        given = Settings.model_validate(here.settings(**{"timeout": "30s", **settings}))

        async def team() -> str:
            return TEAM

        yield (
            here,
            Channel(
                WebApi(session, given.base(), given.bot_token, given.timeout),
                given.channel,
                team,
                heard=True,
            ),
        )


@pytest.mark.parametrize("word", sorted(set(REMEDIES) - {"org_login_required"}))
async def test_what_somebody_must_mend_is_said_with_its_remedy_and_tried_slowly(word: str) -> None:
    async with channel() as (here, there):
        here.trouble["chat.postMessage"] = error(word)
        with pytest.raises(Deferred) as caught:
            await there.post(CARD)
        assert caught.value.failure == "slow"
        assert caught.value.reason == f"Slack answered {word}: {REMEDIES[word]}"


async def test_a_missing_scope_is_named() -> None:
    async with channel() as (here, there):
        here.trouble["chat.postMessage"] = error(
            "missing_scope", needed="chat:write", provided="commands"
        )
        with pytest.raises(Deferred, match="the app lacks the scope chat:write: add the scopes"):
            await there.post(CARD)


@pytest.mark.parametrize(
    ("trouble", "failure", "after", "words"),
    [
        (limited(7), "transient", 7.0, "asks for a rest"),
        (error("ratelimited"), "transient", None, "asks for a rest"),
        (
            says(429, {"ok": False}, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
            "transient",
            None,
            "asks for a rest",
        ),
        (limited(10**8), "transient", 3600.0, "asks for a rest"),
        (says(500), "transient", None, "trouble of its own"),
        (says(503, body="<html>"), "transient", None, "trouble of its own"),
        (error("internal_error"), "transient", None, "internal_error"),
        (error("fatal_error"), "transient", None, "fatal_error"),
        (error("org_login_required"), "transient", None, "passes by itself"),
        (says(200, body="<html>"), "transient", None, "got something else with status 200"),
        (says(200, [1]), "transient", None, "got something else with status 200"),
        (
            says(200, {"ok": False, "error": "x" * 200}),
            "transient",
            None,
            "got something else with status 200",
        ),
        (says(200, {"ok": True}), "transient", None, "expected Slack to name the message"),
        (
            says(404, body="not here"),
            "slow",
            None,
            "got something else with status 404: does api_url name it?",
        ),
        (
            says(302, headers={"Location": "http://127.0.0.1:1/"}),
            "slow",
            None,
            "redirects are not followed",
        ),
        (error("brand_new_error"), "slow", None, "Slack answered brand_new_error"),
        (hangs, "transient", None, "expected an answer within 0.5 s"),
    ],
)
async def test_every_other_answer_says_what_it_means(
    trouble: Trouble, failure: str, after: float | None, words: str
) -> None:
    async with channel(timeout="500ms" if trouble is hangs else "30s") as (here, there):
        here.trouble["chat.postMessage"] = trouble
        with pytest.raises(Deferred) as caught:
            await there.post(CARD)
        assert (caught.value.failure, caught.value.after) == (failure, after)
        assert words in caught.value.reason
        assert TOKEN not in caught.value.reason
        assert here.count("chat.postMessage") == 1


@pytest.mark.parametrize("word", ["msg_too_long", "invalid_blocks", "no_text"])
async def test_what_slack_never_takes_is_a_dead_letter(word: str) -> None:
    async with channel() as (here, there):
        here.trouble["chat.postMessage"] = error(word)
        with pytest.raises(Rejected, match=word):
            await there.post(CARD)


@pytest.mark.parametrize(
    "word", ["message_not_found", "cant_update_message", "edit_window_closed", "thread_not_found"]
)
async def test_a_message_that_cannot_be_changed_is_gone(word: str) -> None:
    async with channel() as (here, there):
        here.trouble["*"] = error(word)
        with pytest.raises(MessageGone):
            await there.edit(f"{CHANNEL}/1.1", CARD)
        with pytest.raises(MessageGone):
            await there.reply_in_thread(f"{CHANNEL}/1.1", [("x",)])


async def test_no_proxy_of_the_environment_is_used_or_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://user:passw0rd@127.0.0.1:1")
    async with channel() as (_, there):
        assert (await there.post(CARD)).startswith(f"{CHANNEL}/")
    assert "passw0rd" not in caplog.text


async def test_no_token_is_in_any_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with channel() as (here, there):
        await there.post(CARD)
        here.trouble["*"] = error("invalid_auth")
        with pytest.raises(Deferred):
            await there.post(CARD)
    assert TOKEN not in caplog.text
    assert "Reboot of vm-0" not in caplog.text


async def test_a_token_in_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("xoxb-of-yesterday", encoding="utf-8")
    async with channel(token=None, token_file=str(file)) as (_, there):
        with pytest.raises(Deferred, match="invalid_auth"):
            await there.post(CARD)
        file.write_text(TOKEN, encoding="utf-8")
        await there.post(CARD)
        file.write_text("nonsense", encoding="utf-8")
        with pytest.raises(
            Deferred, match="the token of this sink cannot be used any more"
        ) as caught:
            await there.post(CARD)
        assert caught.value.failure == "slow"


@pytest.mark.parametrize("url", ["http://169.254.169.254/api/", "http://168.63.129.16/api/"])
async def test_no_metadata_or_host_address_can_be_the_api(url: str) -> None:
    with pytest.raises(ValueError, match="metadata or host address"):
        Settings.model_validate(SlackServer().settings(api_url=url))
