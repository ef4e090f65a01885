"""Socket Mode: clicks arrive without an open port, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from relay.chat import CallbackReply
from relay.chat.platforms.slack.requests import Call, SlashCommand
from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.socket_mode import HandleCall, SocketConnector, SocketMode
from relay.chat.platforms.slack.web import WebApi
from relay.clock import SystemClock
from relay.net.http import open_session
from relay.simulator import Event
from tests.chat.running_relay import Stage, rule, stage
from tests.chat.slack_server import (
    ALICE,
    APP_TOKEN,
    BOB,
    TEAM,
    FailureHandler,
    SlackServer,
    api_error,
    never_answers,
    rate_limited,
    responds,
    running_slack,
)
from tests.eventually import eventually
from tests.sinks.http_receiver import Names

VOTERS = {"rules": [rule(2, f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")]}
BY_SOCKET: dict[str, Any] = {
    "signing_secret": None,
    "app_token": APP_TOKEN,
    "approve_in_chat": True,
}


class FastClock(SystemClock):
    """A clock that sleeps a thousandth of the time, and records every sleep."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []

    @override
    async def sleep(self, seconds: float) -> None:
        """Sleep a thousandth of the time."""
        self.sleeps.append(seconds)
        await asyncio.sleep(seconds / 1000)


@asynccontextmanager
async def relay_with_socket(directory: Path) -> AsyncIterator[tuple[SlackServer, Stage, Event]]:
    async with (
        running_slack() as slack,
        stage(directory, [slack.settings(**BY_SOCKET)], approvals=VOTERS, public_url=None) as relay,
    ):
        event = relay.reboot("vm-0")
        await eventually(lambda: len(slack.sockets) == 1 and len(slack.channel_messages()) == 1)
        await relay.settle()
        yield slack, relay, event


async def test_a_click_is_on_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    async with relay_with_socket(tmp_path) as (slack, relay, event):
        response = await slack.send_envelope(
            slack.click_payload(slack.channel_messages()[0], "Approve")
        )
        assert response.elapsed < 3 + 7  # for a machine that stands still
        assert [vote["principal"] for vote in (await relay.event(event))["votes"]] == [
            f"slack:{TEAM}/{ALICE}"
        ]


async def test_a_command_is_answered_in_its_acknowledgement(tmp_path: Path) -> None:
    async with relay_with_socket(tmp_path) as (slack, _, event):
        response = await slack.send_envelope(slack.command_payload("list"), "slash_commands")
        assert response.body is not None
        assert response.body["text"].startswith(f"{event.event_id[:8]}  Reboot of vm-0")


async def test_an_unknown_or_malformed_envelope_is_acknowledged_and_has_no_effect(
    tmp_path: Path,
) -> None:
    """Slack repeats an envelope that is not acknowledged."""
    async with relay_with_socket(tmp_path) as (slack, relay, event):
        good = slack.click_payload(slack.channel_messages()[0], "Approve")
        await slack.send_envelope({"type": "event_callback"}, "events_api")
        for payload in ({}, {**good, "actions": []}, {**good, "user": None}):
            await slack.send_envelope(payload)
        await slack.sockets[-1].send_json({"type": "brand_new"})
        await slack.sockets[-1].send_json({"type": "brand_new", "envelope_id": 7})
        await slack.sockets[-1].send_json({"type": "brand_new", "envelope_id": "e-new"})
        await eventually(lambda: "e-new" in slack.acknowledgements)
        assert set(map(type, slack.acknowledgements)) == {str}
        assert (await relay.event(event))["votes"] == []
        await slack.send_envelope(good)
        assert len((await relay.event(event))["votes"]) == 1


async def test_a_repeated_envelope_counts_once(tmp_path: Path) -> None:
    async with relay_with_socket(tmp_path) as (slack, relay, event):
        click = slack.click_payload(slack.channel_messages()[0], "Hold")
        for _ in range(3):
            await slack.send_envelope(click)
        assert len((await relay.event(event))["votes"]) == 1


@pytest.mark.parametrize("failure", ["closed", "malformed JSON", "bytes"])
async def test_the_relay_connects_again_after_any_failure(tmp_path: Path, failure: str) -> None:
    async with relay_with_socket(tmp_path) as (slack, relay, event):
        if failure == "closed":
            await slack.close_sockets()
        elif failure == "malformed JSON":
            await slack.sockets[-1].send_str("{")
        else:
            await slack.sockets[-1].send_bytes(b"\x00")
        await eventually(lambda: slack.opened_sockets == 2 and len(slack.sockets) == 1)
        await slack.send_envelope(slack.click_payload(slack.channel_messages()[0], "Approve"))
        assert len((await relay.event(event))["votes"]) == 1


async def test_a_click_over_a_replaced_connection_counts(tmp_path: Path) -> None:
    """Slack replaces a connection every few hours, and announces it first."""
    async with relay_with_socket(tmp_path) as (slack, relay, event):
        await slack.send_disconnect()
        await eventually(lambda: len(slack.sockets) == 2)
        old = slack.sockets[0]
        slack.sockets.append(slack.sockets.pop(0))
        await slack.send_envelope(slack.click_payload(slack.channel_messages()[0], "Approve"))
        assert slack.sockets[-1] is old
        await old.close()
        await eventually(lambda: len(slack.sockets) == 1)
        await slack.send_envelope(slack.click_payload(slack.channel_messages()[0], "Approve", BOB))
        await eventually(lambda: relay.starts(event) == 1)
        assert slack.opened_sockets == 2


async def test_a_replaced_connection_is_closed_after_the_drain_timeout() -> None:
    async with running_slack() as slack, running_socket_mode(slack, drain_timeout=0.2):
        await eventually(lambda: len(slack.sockets) == 1)
        old = slack.sockets[0]
        await slack.send_disconnect()
        await eventually(
            lambda: old.closed and slack.opened_sockets == 2 and len(slack.sockets) == 1
        )


@pytest.mark.parametrize("ignores_close", [False, True])
async def test_socket_mode_ends_within_a_second(*, ignores_close: bool) -> None:
    """It does not wait for Slack's closing handshake."""
    async with (
        running_slack() as slack,
        socket_mode_for(slack.settings(**BY_SOCKET)) as (
            socket_mode,
            _,
        ),
    ):
        slack.ignores_close = ignores_close
        task = asyncio.create_task(socket_mode.run())
        await eventually(lambda: len(slack.sockets) == 1)
        began = time.monotonic()
        task.cancel()
        await asyncio.wait([task])
        assert time.monotonic() - began < 1 + 7  # for a machine that stands still


async def ignore_call(_: Call) -> CallbackReply:
    return CallbackReply()


@asynccontextmanager
async def socket_mode_for(
    section: Mapping[str, Any],
    *,
    handle: HandleCall = ignore_call,
    resolver: Names | None = None,
    drain_timeout: float = 30.0,
) -> AsyncIterator[tuple[SocketMode, FastClock]]:
    """Yield Socket Mode for a sink's section, not running, and its clock."""
    settings, clock = Settings.model_validate(section), FastClock()
    async with open_session(resolver=resolver) as session:
        api = WebApi(session, settings, clock)
        connector = SocketConnector(api, session, settings)
        socket_mode = SocketMode(
            connector,
            clock,
            handle,
            sink_name="ops",
            drain_timeout=drain_timeout,
            random_fraction=lambda: 0.0,
        )
        yield socket_mode, clock


@asynccontextmanager
async def running_socket_mode(slack: SlackServer, **arguments: Any) -> AsyncIterator[FastClock]:
    """Run Socket Mode, and yield its clock."""
    section = slack.settings(**BY_SOCKET)
    async with socket_mode_for(section, **arguments) as (socket_mode, clock), running(socket_mode):
        yield clock


@asynccontextmanager
async def running(socket_mode: SocketMode) -> AsyncIterator[None]:
    """Run Socket Mode, which must not end by itself."""
    task = asyncio.create_task(socket_mode.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


TICKET_URL = "ws://127.0.0.1:1/link?ticket=secret-ticket"


@pytest.mark.parametrize(
    ("failure_handler", "reason", "delays"),
    [
        pytest.param(
            api_error("invalid_auth"),
            "Slack answered invalid_auth",
            [60.0, 60.0],
            id="invalid token",
        ),
        pytest.param(
            api_error("not_allowed_token_type"),
            "app_token with xapp-",
            [60.0, 60.0],
            id="token of another kind",
        ),
        pytest.param(
            rate_limited(7), "limits the rate", [7.0, 7.0, 7.0, 7.0, 8.0], id="rate limit"
        ),
        pytest.param(
            responds(503, body="<html>"),
            "Slack has a problem",
            [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0],
            id="server error",
        ),
        pytest.param(
            responds(200, {"ok": True, "url": "https://evil.example/"}),
            "starts with wss://",
            [60.0],
            id="URL not of a socket",
        ),
        pytest.param(
            responds(200, {"ok": True, "url": "ws://169.254.169.254/link"}),
            "metadata or host address",
            [60.0],
            id="URL of a metadata service",
        ),
        pytest.param(
            responds(200, {"ok": True, "url": TICKET_URL}),
            "expected a connection, it failed",
            [0.5, 1.0],
            id="refused connection",
        ),
    ],
)
async def test_the_relay_keeps_connecting_with_growing_delays_and_logs_the_reason_once(
    failure_handler: FailureHandler,
    reason: str,
    delays: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def logged(text: str) -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if text in message]

    async with running_slack() as slack:
        slack.failures["apps.connections.open"] = failure_handler
        caplog.set_level("INFO", "relay")
        async with running_socket_mode(slack) as clock:
            await eventually(lambda: len(clock.sleeps) > len(delays))
            assert clock.sleeps[: len(delays)] == delays
            (warning,) = logged("clicks and commands do not arrive")
            assert reason in warning
            slack.failures.clear()
            await eventually(lambda: bool(logged("Socket Mode is connected")))
        assert "secret-ticket" not in caplog.text
        assert APP_TOKEN not in caplog.text


async def test_a_host_name_of_a_metadata_address_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_slack() as slack:
        slack.socket_url = "ws://wss.slack.example/link"
        async with running_socket_mode(
            slack, resolver=Names({"wss.slack.example": ["169.254.169.254"]})
        ) as clock:
            await eventually(lambda: len(clock.sleeps) > 0)
        assert (
            "expected a connection, it failed: a metadata or host address, which no sink may reach"
            in caplog.text
        )


async def test_a_redirect_of_the_handshake_is_not_followed() -> None:
    async with running_slack() as slack, running_slack() as other_slack:
        slack.socket_url = f"ws://127.0.0.1:{slack.port}/api/link.redirect"
        slack.failures["link.redirect"] = responds(
            302, headers={"Location": f"http://127.0.0.1:{other_slack.port}/link/"}
        )
        async with running_socket_mode(slack) as clock:
            await eventually(lambda: len(clock.sleeps) > 1)
        assert other_slack.sockets == []
        assert slack.call_count("link.redirect") > 0


async def test_switching_socket_mode_off_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_slack() as slack, running_socket_mode(slack) as clock:
        await eventually(lambda: len(slack.sockets) == 1)
        await slack.send_disconnect("link_disabled")
        await eventually(lambda: clock.sleeps == [60.0])
        assert "Socket Mode is switched off in the app's settings" in caplog.text


async def test_an_internal_error_ends_neither_the_socket_nor_the_relay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The click is not acknowledged, so Slack tells the person that it failed."""
    calls = []

    async def fail_once(call: Call) -> CallbackReply:
        calls.append(call)
        if len(calls) == 1:
            raise ZeroDivisionError
        return CallbackReply()

    async with running_slack() as slack, running_socket_mode(slack, handle=fail_once):
        await eventually(lambda: len(slack.sockets) == 1)
        await slack.sockets[-1].send_json(
            {
                "type": "slash_commands",
                "envelope_id": "e-1",
                "payload": slack.command_payload("list"),
            }
        )
        await eventually(lambda: len(calls) == 1)
        await slack.send_envelope(slack.command_payload("list"), "slash_commands")
        assert "e-1" not in slack.acknowledgements
        assert "ZeroDivisionError" in caplog.text


async def test_a_slow_call_delays_no_other() -> None:
    first_call_started, first_call_may_end = asyncio.Event(), asyncio.Event()

    async def wait_in_first_call(call: Call) -> CallbackReply:
        if isinstance(call, SlashCommand) and call.text == "first":
            first_call_started.set()
            await first_call_may_end.wait()
        return CallbackReply()

    async with running_slack() as slack, running_socket_mode(slack, handle=wait_in_first_call):
        await eventually(lambda: len(slack.sockets) == 1)
        waiting = asyncio.create_task(
            slack.send_envelope(slack.command_payload("first"), "slash_commands")
        )
        await first_call_started.wait()
        await slack.send_envelope(slack.command_payload("second"), "slash_commands")
        assert not waiting.done()
        first_call_may_end.set()
        await waiting


async def test_a_connection_without_hello_is_closed() -> None:
    async with running_slack() as slack:
        slack.sends_hello = False
        async with running_socket_mode(slack) as clock:
            await eventually(lambda: len(slack.sockets) == 1)
            first = slack.sockets[0]
            await first.send_json({"type": "interactive"})
            await eventually(lambda: len(clock.sleeps) > 0 and first.closed)


async def test_a_silent_connection_is_closed_when_the_relay_stops() -> None:
    async with running_slack() as slack:
        slack.sends_hello = False
        async with running_socket_mode(slack):
            await eventually(lambda: len(slack.sockets) == 1)
        await eventually(lambda: not slack.sockets)


async def test_messages_are_posted_while_socket_mode_cannot_connect(tmp_path: Path) -> None:
    """The relay also stops when it is asked to."""
    async with running_slack() as slack:
        slack.failures["apps.connections.open"] = never_answers
        async with stage(tmp_path, [slack.settings(**BY_SOCKET)], approvals=VOTERS) as relay:
            relay.reboot("vm-0")
            await eventually(lambda: len(slack.channel_messages()) == 1)


async def test_a_malformed_token_file_is_logged_without_its_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "app"
    file.write_text(APP_TOKEN, encoding="utf-8")
    async with running_slack() as slack:
        section = slack.settings(signing_secret=None, app_token_file=str(file))
        async with socket_mode_for(section) as (socket_mode, clock):
            file.write_text("nonsense", encoding="utf-8")
            async with running(socket_mode):
                await eventually(lambda: len(clock.sleeps) > 0)
        assert "expected an app-level token" in caplog.text
        assert "nonsense" not in caplog.text
