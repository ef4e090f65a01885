"""Messages stay up to date whatever the clock, the disk and the platform do."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from aiohttp import web

from relay.chat.context import MessagePlanner
from relay.errors import Deferred
from relay.store.transaction import Transaction
from tests.approvals.builders import build_event
from tests.chat.mattermost_server import SECRET, MattermostServer
from tests.chat.running_relay import rule, stage
from tests.chat.slack_server import CHANNEL, running_slack
from tests.chat.wall_platform import Wall, WallRelay, relay_with_wall
from tests.cli.command import serve_handler
from tests.clocks import NOON, ManualClock
from tests.eventually import eventually

SECRET_IN_MESSAGE = r'"proof":"[\w-]'
APPROVALS = {"rules": [rule(1, "client:alice")]}


async def test_a_clock_set_back_keeps_no_message_from_being_current(relay: WallRelay) -> None:
    await relay.deliver_document(build_event())
    relay.clock.set_wall_clock(NOON - timedelta(seconds=30))
    await relay.submit("approve", "alice")
    await relay.deliver_document()
    assert relay.wall.cards["m1"].tone == "over"
    assert any("alice voted" in line for line in relay.wall.threads["m1"])


async def test_an_answer_whose_body_is_slow_posts_no_message_twice(tmp_path: Path) -> None:
    """Slack names the message in the body: without it the relay would post again and again."""
    async with (
        running_slack() as workspace,
        stage(tmp_path, [workspace.settings(app_token=None)], approvals=APPROVALS) as relay,
    ):

        async def slowly(request: web.Request) -> web.StreamResponse:
            body = json.dumps({"ok": True, "channel": CHANNEL, "ts": "1700000000.000001"}).encode()
            response = web.StreamResponse(
                headers={"Content-Type": "application/json", "Content-Length": str(len(body))}
            )
            await response.prepare(request)
            await asyncio.sleep(1.3)
            with suppress(ConnectionError):
                await response.write(body)
            return response

        workspace.failures["chat.postMessage"] = slowly
        relay.reboot("vm-0")
        await eventually(lambda: workspace.call_count("chat.postMessage") > 0)
        await eventually(lambda: relay.running.relay.dispatcher.get_worker("ops").waiting == 0)
        assert workspace.call_count("chat.postMessage") == 1


async def test_messages_change_with_time_again_after_an_error_that_nobody_foresaw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, enqueue = ManualClock(), MessagePlanner.enqueue_due_refreshes
    failed = asyncio.Event()

    async def fail_once(self: MessagePlanner, sink: str) -> None:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        await enqueue(self, sink)

    async with relay_with_wall(tmp_path, Wall(), clock=clock) as relay:
        monkeypatch.setattr(MessagePlanner, "enqueue_due_refreshes", fail_once)
        await relay.deliver_document(build_event())
        await eventually(lambda: "internal error" in caplog.text)
        cards = relay.wall.cards
        await clock.advance_until(lambda: cards["m1"].buttons == (), step=30, within=10**6)


async def test_no_log_holds_a_proof_though_the_platform_repeats_it(tmp_path: Path) -> None:
    """A reader of deliveries must not be able to act as the button of a message."""

    async def echo(request: web.Request) -> web.Response:
        sent = await request.read()  # what opens something, first: of an answer, a KiB is kept
        return web.Response(status=500, body=sent[max(sent.find(b"proof"), 400) - 400 :])

    async with serve_handler(echo) as url:
        sink = MattermostServer().sink_section(api_url=url, approve_in_chat=True, secret=SECRET)
        async with stage(tmp_path, [sink], approvals=APPROVALS) as relay:
            relay.reboot("vm-0")
            store = relay.running.relay.store

            def first_answer(tx: Transaction) -> str:
                answers = [
                    attempt["answer"] or ""
                    for delivery in tx.deliveries.page()
                    for attempt in tx.deliveries.attempts_of(delivery["id"])
                ]
                return answers[0] if answers else ""

            answer = await eventually(lambda: store.read(first_answer))
            assert "…" in answer
            assert re.search(SECRET_IN_MESSAGE, answer) is None


async def test_a_message_ends_though_its_event_came_back_meanwhile(relay: WallRelay) -> None:
    """Azure's document can be empty for a moment: the second event does not supersede that end."""
    await relay.deliver_document(build_event(due=86400))
    relay.wall.error = Deferred("down")
    for seen in ((), (build_event(due=86400),)):
        relay.clock.advance(1)
        await relay.record_document(*seen)
    relay.wall.error = None
    await relay.clock.advance_until(
        lambda: [card.tone for card in relay.wall.cards.values()] == ["over", "waiting"],
        within=50000,
    )
    assert relay.wall.cards["m1"].buttons == ()
    assert relay.wall.cards["m2"].buttons != ()
    await relay.settle()
