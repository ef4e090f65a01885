"""Slack's Socket Mode: clicks without an open port, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from relay.chat import CallbackReply
from relay.chat.platforms.slack.payloads import Call
from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.socket_mode import SocketMode
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
    SlackServer,
    error,
    hangs,
    limited,
    says,
    slack,
)
from tests.journey.relay_process import eventually
from tests.sinks.http_receiver import Names

VOTERS = {"rules": [rule(2, f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")]}
BY_SOCKET: dict[str, Any] = {
    "signing_secret": None,
    "app_token": APP_TOKEN,
    "approve_in_chat": True,
}


class Hasty(SystemClock):
    """A clock whose pauses are a thousandth as long, and remembered."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    @override
    async def sleep(self, seconds: float) -> None:
        """Wait a thousandth of it."""
        self.pauses.append(seconds)
        await asyncio.sleep(seconds / 1000)


@asynccontextmanager
async def listening(directory: Path) -> AsyncIterator[tuple[SlackServer, Stage, Event]]:
    async with (
        slack() as here,
        stage(directory, [here.settings(**BY_SOCKET)], approvals=VOTERS, public_url=None) as relay,
    ):
        event = relay.reboot("vm-0")
        await eventually(lambda: len(here.sockets) == 1 and len(here.tops()) == 1)
        store = relay.running.relay.store

        async def settled() -> bool:
            return not await store.read(lambda tx: tx.deliveries.waiting())

        await eventually(settled)
        yield here, relay, event


async def test_a_click_is_on_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    async with listening(tmp_path) as (here, relay, event):
        heard = await here.sends(here.click(here.tops()[0], "Approve"))
        assert heard.took < 3 + 7  # for a machine that stands still
        assert [one["principal"] for one in (await relay.event(event))["votes"]] == [
            f"slack:{TEAM}/{ALICE}"
        ]


async def test_a_command_is_answered_in_its_acknowledgement(tmp_path: Path) -> None:
    async with listening(tmp_path) as (here, _, event):
        heard = await here.sends(here.typed("list"), "slash_commands")
        assert heard.body is not None
        assert heard.body["text"].startswith(f"{event.event_id[:8]}  Reboot of vm-0")


async def test_what_is_not_for_us_or_cannot_be_read_is_acknowledged_and_does_nothing(
    tmp_path: Path,
) -> None:
    """What is not acknowledged comes again for ever."""
    async with listening(tmp_path) as (here, relay, event):
        good = here.click(here.tops()[0], "Approve")
        await here.sends({"type": "event_callback"}, "events_api")
        for payload in ({}, {**good, "actions": []}, {**good, "user": None}):
            await here.sends(payload)
        await here.sockets[-1].send_json({"type": "brand_new"})
        await here.sockets[-1].send_json({"type": "brand_new", "envelope_id": 7})
        await here.sockets[-1].send_json({"type": "brand_new", "envelope_id": "e-new"})
        await eventually(lambda: "e-new" in here.acks)
        assert set(map(type, here.acks)) == {str}
        assert (await relay.event(event))["votes"] == []
        await here.sends(good)
        assert len((await relay.event(event))["votes"]) == 1


async def test_an_envelope_that_comes_again_counts_once(tmp_path: Path) -> None:
    async with listening(tmp_path) as (here, relay, event):
        click = here.click(here.tops()[0], "Hold")
        for _ in range(3):
            await here.sends(click)
        assert len((await relay.event(event))["votes"]) == 1


@pytest.mark.parametrize("how", ["cut", "garbage", "bytes"])
async def test_it_connects_again_whatever_ends_the_connection(tmp_path: Path, how: str) -> None:
    async with listening(tmp_path) as (here, relay, event):
        if how == "cut":
            await here.cuts()
        elif how == "garbage":
            await here.sockets[-1].send_str("{")
        else:
            await here.sockets[-1].send_bytes(b"\x00")
        await eventually(lambda: here.opened == 2 and len(here.sockets) == 1)
        await here.sends(here.click(here.tops()[0], "Approve"))
        assert len((await relay.event(event))["votes"]) == 1


async def test_what_comes_over_a_connection_that_is_replaced_counts(tmp_path: Path) -> None:
    """Slack replaces a connection every few hours, and says so before it closes it."""
    async with listening(tmp_path) as (here, relay, event):
        await here.disconnects()
        await eventually(lambda: len(here.sockets) == 2)
        old = here.sockets[0]
        here.sockets.append(here.sockets.pop(0))
        await here.sends(here.click(here.tops()[0], "Approve"))
        assert here.sockets[-1] is old
        await old.close()
        await eventually(lambda: len(here.sockets) == 1)
        await here.sends(here.click(here.tops()[0], "Approve", BOB))
        await eventually(lambda: relay.starts(event) == 1)
        assert here.opened == 2


async def test_a_connection_that_was_replaced_is_left_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where Slack never closes it."""
    monkeypatch.setattr("relay.chat.platforms.slack.socket_mode._LINGERS", 0.2)
    async with slack() as here, running(here):
        await eventually(lambda: len(here.sockets) == 1)
        old = here.sockets[0]
        await here.disconnects()
        await eventually(lambda: old.closed and here.opened == 2 and len(here.sockets) == 1)


@pytest.mark.parametrize("deaf", [False, True])
async def test_it_ends_within_a_second(*, deaf: bool) -> None:
    """Also where Slack does not take the farewell."""
    async with slack() as here, connection(here) as (mode, _):
        here.deaf = deaf
        task = asyncio.create_task(mode.run())
        await eventually(lambda: len(here.sockets) == 1)
        began = time.monotonic()
        task.cancel()
        await asyncio.wait([task])
        assert time.monotonic() - began < 1 + 7  # for a machine that stands still


async def take_nothing(_: Call) -> CallbackReply:
    return CallbackReply()


@asynccontextmanager
async def connection(
    here: SlackServer, take: Any = take_nothing, resolver: Names | None = None
) -> AsyncIterator[tuple[SocketMode, Hasty]]:
    settings, clock = Settings.model_validate(here.settings(**BY_SOCKET)), Hasty()
    async with open_session(resolver=resolver) as session:
        api = WebApi(session, settings.base(), settings.bot_token, 5.0)
        yield (
            SocketMode(
                api,
                settings.socket_token,
                session,
                clock,
                take,
                name="ops",
                allow_http=True,
                chance=lambda: 0.0,
            ),
            clock,
        )


@asynccontextmanager
async def running(
    here: SlackServer, take: Any = take_nothing, resolver: Names | None = None
) -> AsyncIterator[Hasty]:
    async with connection(here, take, resolver) as (mode, clock):
        task = asyncio.create_task(mode.run())
        try:
            yield clock
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.mark.parametrize(
    ("trouble", "words", "pauses"),
    [
        (error("invalid_auth"), "Slack answered invalid_auth", [60.0, 60.0]),
        (error("not_allowed_token_type"), "app_token with xapp-", [60.0, 60.0]),
        (limited(7), "asks for a rest", [7.0, 7.0, 7.0, 7.0, 8.0]),
        (
            says(503, body="<html>"),
            "trouble of its own",
            [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0],
        ),
        (says(200, {"ok": True, "url": "https://evil.example/"}), "starts with wss://", [60.0]),
        (
            says(200, {"ok": True, "url": "ws://169.254.169.254/link"}),
            "metadata or host address",
            [60.0],
        ),
        (
            says(200, {"ok": True, "url": "ws://127.0.0.1:1/link?ticket=secret-ticket"}),
            "expected a connection, it failed",
            [0.5, 1.0],
        ),
    ],
)
async def test_it_tries_for_ever_with_growing_pauses_and_says_once_why(
    trouble: Any, words: str, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async with slack() as here:
        here.trouble["apps.connections.open"] = trouble
        caplog.set_level("INFO", "relay")
        async with running(here) as clock:
            await eventually(lambda: len(clock.pauses) > len(pauses))
            assert clock.pauses[: len(pauses)] == pauses
            said = [
                one.getMessage()
                for one in caplog.records
                if "clicks and commands do not arrive" in one.getMessage()
            ]
            assert len(said) == 1
            assert words in said[0]
            here.trouble.clear()
            await eventually(
                lambda: (
                    "Socket Mode is connected"
                    in {one.getMessage().partition(": ")[2] for one in caplog.records}
                )
            )
        assert "secret-ticket" not in caplog.text
        assert APP_TOKEN not in caplog.text


async def test_a_name_that_stands_for_a_metadata_address_is_not_dialled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with slack() as here:
        here.wss = "ws://wss.slack.example/link"
        async with running(
            here, resolver=Names({"wss.slack.example": ["169.254.169.254"]})
        ) as clock:
            await eventually(lambda: len(clock.pauses) > 0)
        assert (
            "expected a connection, it failed: a metadata or host address, which no sink may reach"
            in caplog.text
        )


async def test_a_handshake_is_not_redirected() -> None:
    async with slack() as here, slack() as elsewhere:
        here.wss = f"ws://127.0.0.1:{here.port}/api/link.redirect"
        here.trouble["link.redirect"] = says(
            302, headers={"Location": f"http://127.0.0.1:{elsewhere.port}/link/"}
        )
        async with running(here) as clock:
            await eventually(lambda: len(clock.pauses) > 1)
        assert elsewhere.sockets == []
        assert here.count("link.redirect") > 0


async def test_an_app_whose_socket_mode_was_switched_off_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with slack() as here, running(here) as clock:
        await eventually(lambda: len(here.sockets) == 1)
        await here.disconnects("link_disabled")
        await eventually(lambda: clock.pauses == [60.0])
        assert "Socket Mode is switched off in the app's settings" in caplog.text


async def test_an_error_in_our_own_code_ends_neither_the_socket_nor_the_relay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told with its traceback, and the click is not acknowledged: Slack shows the person that it failed."""
    calls = []

    async def fails(call: Call) -> CallbackReply:
        calls.append(call)
        if len(calls) == 1:
            raise ZeroDivisionError
        return CallbackReply()

    async with slack() as here, running(here, fails):
        await eventually(lambda: len(here.sockets) == 1)
        await here.sockets[-1].send_json(
            {"type": "slash_commands", "envelope_id": "e-1", "payload": here.typed("list")}
        )
        await eventually(lambda: len(calls) == 1)
        await here.sends(here.typed("list"), "slash_commands")
        assert "e-1" not in here.acks
        assert "ZeroDivisionError" in caplog.text


async def test_one_slow_answer_delays_no_other() -> None:
    came, first = asyncio.Event(), asyncio.Event()

    async def slow(call: Call) -> CallbackReply:
        if "first" in getattr(call, "words", ()):
            came.set()
            await first.wait()
        return CallbackReply()

    async with slack() as here, running(here, slow):
        await eventually(lambda: len(here.sockets) == 1)
        waiting = asyncio.create_task(here.sends(here.typed("first"), "slash_commands"))
        await came.wait()
        await here.sends(here.typed("second"), "slash_commands")
        assert not waiting.done()
        first.set()
        await waiting


async def test_a_socket_that_does_not_greet_is_left() -> None:
    async with slack() as here:
        here.greets = False
        async with running(here) as clock:
            await eventually(lambda: len(here.sockets) == 1)
            first = here.sockets[0]
            await first.send_json({"type": "interactive"})
            await eventually(lambda: len(clock.pauses) > 0 and first.closed)


async def test_a_socket_that_says_nothing_is_closed_when_the_relay_ends() -> None:
    async with slack() as here:
        here.greets = False
        async with running(here):
            await eventually(lambda: len(here.sockets) == 1)
        await eventually(lambda: not here.sockets)


async def test_a_slack_that_hangs_ends_nothing(tmp_path: Path) -> None:
    """Messages go out all the same, and the relay stops when it is asked to."""
    async with slack() as here:
        here.trouble["apps.connections.open"] = hangs
        async with stage(tmp_path, [here.settings(**BY_SOCKET)], approvals=VOTERS) as relay:
            relay.reboot("vm-0")
            await eventually(lambda: len(here.tops()) == 1)


async def test_a_token_file_that_went_bad_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with slack() as here, open_session() as session:
        file = tmp_path / "app"
        file.write_text(APP_TOKEN, encoding="utf-8")
        settings = Settings.model_validate(
            here.settings(signing_secret=None, app_token_file=str(file))
        )
        file.write_text("nonsense", encoding="utf-8")
        api = WebApi(session, settings.base(), settings.bot_token, 5.0)
        clock = Hasty()
        mode = SocketMode(
            api, settings.socket_token, session, clock, take_nothing, name="ops", allow_http=True
        )
        task = asyncio.create_task(mode.run())
        await eventually(lambda: len(clock.pauses) > 0)
        task.cancel()
        await asyncio.wait([task])
        assert "expected an app-level token" in caplog.text
        assert "nonsense" not in caplog.text
