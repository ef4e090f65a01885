"""Socket Mode: clicks arrive without an open port, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typing_extensions import override

from relay.chat.platforms.slack import SocketMode
from relay.chat.platforms.slack.api import Settings, WebApi
from relay.chat.platforms.slack.clicks import Answers, Reply
from relay.clock import SystemClock
from relay.net.http import open_session
from tests.chat.running_relay import VOTERS, AnnouncedReboot, announced_reboot, stage
from tests.chat.slack_server import (
    ALICE,
    APP_TOKEN,
    BOB,
    FailureHandler,
    SlackServer,
    api_error,
    member,
    never_answers,
    rate_limited,
    responds,
)
from tests.eventually import eventually


class FastClock(SystemClock):
    """A clock that sleeps a thousandth of the time, and records every sleep."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []

    @override
    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        await asyncio.sleep(seconds / 1000)


@pytest.fixture(autouse=True)
def _no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.0)


async def test_an_unknown_or_malformed_envelope_has_no_effect(reboot: AnnouncedReboot) -> None:
    """Slack repeats an envelope that is not acknowledged."""
    slack = reboot.slack
    good = slack.click_payload(reboot.message, "Approve")
    await slack.send_envelope({"type": "event_callback"}, "events_api")
    for payload in ({}, {**good, "actions": []}, {**good, "user": None}):
        await slack.send_envelope(payload)
    await slack.sockets[-1].send_json({"type": "brand_new"})
    await slack.sockets[-1].send_json({"type": "brand_new", "envelope_id": 7})
    await slack.sockets[-1].send_json({"type": "brand_new", "envelope_id": "e-new"})
    await eventually(lambda: "e-new" in slack.acknowledgements)
    assert set(map(type, slack.acknowledgements)) == {str}
    assert await reboot.voters() == []
    await slack.send_envelope(good)
    assert await reboot.voters() == [ALICE]


async def test_the_relay_connects_again_whenever_a_connection_ends(reboot: AnnouncedReboot) -> None:
    """Slack replaces a connection every few hours."""
    slack = reboot.slack
    for end in (
        slack.close_sockets,
        lambda: slack.sockets[-1].send_str("{"),
        lambda: slack.sockets[-1].send_bytes(b"\x00"),
        slack.send_disconnect,
    ):
        opened = slack.opened_sockets
        await end()
        await eventually(lambda: slack.opened_sockets == opened + 1 and len(slack.sockets) == 1)  # noqa: B023  # awaited here
    await reboot.click("Approve")
    assert await reboot.voters() == [ALICE]


async def test_an_old_connection_still_gets_its_answers(reboot: AnnouncedReboot) -> None:
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer_later(_: web.Request) -> web.StreamResponse:
        is_asked.set()
        await may_answer.wait()
        return web.json_response({"ok": True, "user": member(ALICE)})

    reboot.slack.failures["users.info"] = answer_later
    click = asyncio.create_task(reboot.click("Approve"))
    await is_asked.wait()
    await reboot.slack.send_disconnect()
    may_answer.set()
    await click
    assert await reboot.voters() == [ALICE]


async def test_a_click_not_yet_identified_delays_no_other(reboot: AnnouncedReboot) -> None:
    is_asked = asyncio.Event()

    async def know_bob_only(request: web.Request) -> web.StreamResponse:
        if request.query["user"] == ALICE:
            is_asked.set()
            await never_answers(request)
        return web.json_response({"ok": True, "user": member(BOB)})

    reboot.slack.failures["users.info"] = know_bob_only
    waiting = asyncio.create_task(reboot.click("Approve"))
    await is_asked.wait()
    await reboot.click("Approve", BOB)
    assert await reboot.voters() == [BOB]
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("ignores_close", [False, True])
async def test_socket_mode_ends_within_a_second(slack: SlackServer, *, ignores_close: bool) -> None:
    """It does not wait for Slack's closing handshake."""
    slack.ignores_close = ignores_close
    async with running_socket_mode(slack.settings()):
        await eventually(lambda: len(slack.sockets) == 1)
        began = time.monotonic()
    assert time.monotonic() - began < 1 + 7  # for a machine that stands still


@asynccontextmanager
async def running_socket_mode(section: Mapping[str, Any]) -> AsyncIterator[FastClock]:
    """Run Socket Mode, which gets no envelopes and must not end by itself; yield its clock."""
    settings, clock = Settings.model_validate(section), FastClock()
    answers: Any = None
    async with open_session() as session:
        api = WebApi(session, settings, clock)
        task = asyncio.create_task(SocketMode(session, api, answers, clock, "ops").run())
        try:
            yield clock
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])


METADATA_URL = "ws://169.254.169.254/link?ticket=secret-ticket"
TICKET_URL = "ws://127.0.0.1:1/link?ticket=secret-ticket"


@pytest.mark.parametrize(
    ("failure_handler", "reason", "delays"),
    [
        (api_error("invalid_auth"), "Slack answered invalid_auth", [60.0, 60.0]),
        (api_error("not_allowed_token_type"), "app_token with xapp-", [60.0, 60.0]),
        (rate_limited(7), "limits the rate", [7.0, 7.0, 7.0, 7.0, 8.0]),
        (responds(503), "got 503 Service", [0.5, 1, 2, 4, 8, 16, 32, 60, 60]),
        (responds(200, {"ok": True, "url": "https://x.example/"}), "starts with wss://", [60.0]),
        (responds(200, {"ok": True, "url": METADATA_URL}), "metadata or host address", [60.0]),
        (responds(200, {"ok": True, "url": TICKET_URL}), "expected a connection", [0.5, 1.0]),
    ],
)
async def test_the_relay_keeps_connecting_with_growing_delays_and_logs_the_reason_once(
    slack: SlackServer,
    failure_handler: FailureHandler,
    reason: str,
    delays: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def logged(text: str) -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if text in message]

    slack.failures["apps.connections.open"] = failure_handler
    caplog.set_level("INFO", "relay")
    async with running_socket_mode(slack.settings()) as clock:
        await eventually(lambda: len(clock.sleeps) > len(delays))
        assert clock.sleeps[: len(delays)] == delays
        (warning,) = logged("clicks and commands do not arrive")
        assert reason in warning
        slack.failures.clear()
        await eventually(lambda: bool(logged("Socket Mode is connected")))
    assert "secret-ticket" not in caplog.text
    assert APP_TOKEN not in caplog.text


async def test_switching_socket_mode_off_is_logged(
    slack: SlackServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_socket_mode(slack.settings()) as clock:
        await eventually(lambda: len(slack.sockets) == 1)
        await slack.send_disconnect("link_disabled")
        await eventually(lambda: clock.sleeps == [60.0])
    assert "Socket Mode is switched off in the app's settings" in caplog.text


async def test_an_internal_error_ends_neither_the_socket_nor_the_relay(
    slack: SlackServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The click is not acknowledged, so Slack tells the person that it failed."""
    answer = Answers.answer
    failed = asyncio.Event()

    async def fail_once(self: Answers, envelope: Mapping[str, Any]) -> Reply | None:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        return await answer(self, envelope)

    async with announced_reboot(slack, tmp_path) as reboot:
        monkeypatch.setattr(Answers, "answer", fail_once)
        envelope = {"type": "slash_commands", "envelope_id": "e-1", "payload": {}}
        await slack.sockets[-1].send_json(envelope)
        await failed.wait()
        await reboot.click("Approve")
        assert await reboot.voters() == [ALICE]
    assert "e-1" not in slack.acknowledgements
    assert "ZeroDivisionError" in caplog.text


async def test_a_connection_without_hello_is_closed(slack: SlackServer) -> None:
    """Also a silent one, when the relay stops."""
    slack.sends_hello = False
    async with running_socket_mode(slack.settings()) as clock:
        await eventually(lambda: len(slack.sockets) == 1)
        await slack.sockets[0].send_json({"type": "interactive"})
        await eventually(lambda: len(clock.sleeps) == 1 and len(slack.sockets) == 1)
    await eventually(lambda: not slack.sockets)


async def test_messages_are_posted_without_socket_mode(slack: SlackServer, tmp_path: Path) -> None:
    """The relay also stops when it is asked to."""
    slack.failures["apps.connections.open"] = never_answers
    async with stage(tmp_path, [slack.settings()], approvals=VOTERS) as relay:
        relay.reboot("vm-0")
        await eventually(lambda: len(slack.channel_messages()) == 1)
