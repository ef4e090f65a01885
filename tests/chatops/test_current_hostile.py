"""Messages stay current whatever the clock, the disk and the platform do: what broke, or nearly did."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web

from relay.events.moment import parse_moment
from relay.simulator import VM, Setup, Simulator
from tests.approvals.hand_clock import NOON, HandClock
from tests.approvals.made import event
from tests.chatops.slack_server import CHANNEL, slack
from tests.chatops.stage import rule, stage
from tests.chatops.wall import Room, Wall, room
from tests.journey.process import eventually

APPROVALS = {"rules": [rule(1, "client:alice")]}


async def settled(here: Room) -> None:
    """Everything that was said has been delivered."""
    await eventually(here.idle)


async def test_a_clock_that_is_set_back_keeps_no_message_from_being_current(tmp_path: Path) -> None:
    clock = HandClock()
    async with room(tmp_path, Wall(), clock=clock) as here:
        await here.see(event())
        await settled(here)
        clock.set(NOON - timedelta(seconds=30))
        await here.submit("approve", "alice")
        await here.see()
        await settled(here)
        assert here.wall.cards["m1"].tone == "over"
        assert any("alice voted" in line for line in here.wall.threads["m1"])


async def test_what_time_has_changed_while_the_relay_was_down_is_shown_after_its_start(tmp_path: Path) -> None:
    closes_soon = {"rules": [rule(1, "client:alice", close_before="898s")]}  # Azure announces it for 900 s ahead
    async with Simulator(Setup(vms=(VM("vm-0"),))) as azure, slack() as here:
        sinks = [here.settings(signing_secret=None, name=f"ops-{number}") for number in range(3)]
        async with stage(tmp_path, sinks, approvals=closes_soon, azure=azure) as relay:
            event = relay.reboot("vm-0")
            await eventually(lambda: len(here.tops()) == 3)
            closes = parse_moment((await relay.event(event))["approval"]["closes"])
            assert closes is not None
        await eventually(lambda: datetime.now(UTC) > closes)
        async with stage(tmp_path, sinks, approvals=closes_soon, azure=azure) as relay:
            await eventually(lambda: not any("Approve" in one.links() for one in here.tops()))


async def test_an_answer_whose_body_is_slow_posts_no_message_twice(tmp_path: Path) -> None:
    """What Slack calls the message is in the body: whoever does not wait for it posts again and again."""
    async with slack() as here, stage(tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS) as relay:

        async def slowly(request: web.Request) -> web.StreamResponse:
            body = json.dumps({"ok": True, "channel": CHANNEL, "ts": "1700000000.000001"}).encode()
            response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
            await response.prepare(request)
            await asyncio.sleep(1.3)
            with suppress(ConnectionError):
                await response.write(body)
            return response

        here.trouble["chat.postMessage"] = slowly
        relay.reboot("vm-0")
        await eventually(lambda: here.count("chat.postMessage") > 0)
        await eventually(lambda: relay.running.relay.dispatcher.worker("ops").waiting == 0)
        assert here.count("chat.postMessage") == 1
