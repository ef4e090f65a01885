"""Messages stay current whatever the clock, the disk and the platform do: what broke, or nearly did."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from relay.errors import Deferred
from relay.events.timestamps import parse_timestamp
from relay.outbox.chat_messages import MAX_LINKS
from relay.outbox.transaction import Transaction
from relay.simulator import VM, Setup, Simulator
from tests.approvals.builders import event
from tests.approvals.manual_clock import NOON, HandClock
from tests.chat.mattermost_server import SECRET, mattermost
from tests.chat.running_relay import rule, stage
from tests.chat.slack_server import CHANNEL, slack
from tests.chat.wall_platform import Room, Wall, room
from tests.journey.relay_process import eventually

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


async def test_what_time_has_changed_while_the_relay_was_down_is_shown_after_its_start(
    tmp_path: Path,
) -> None:
    closes_soon = {
        "rules": [rule(1, "client:alice", close_before="898s")]
    }  # Azure announces it for 900 s ahead
    async with Simulator(Setup(vms=(VM("vm-0"),))) as azure, slack() as here:
        sinks = [here.settings(signing_secret=None, name=f"ops-{number}") for number in range(3)]
        async with stage(tmp_path, sinks, approvals=closes_soon, azure=azure) as relay:
            event = relay.reboot("vm-0")
            await eventually(lambda: len(here.tops()) == 3)
            closes = parse_timestamp((await relay.event(event))["approval"]["closes"])
            assert closes is not None
        await eventually(lambda: datetime.now(UTC) > closes)
        async with stage(tmp_path, sinks, approvals=closes_soon, azure=azure) as relay:
            await eventually(lambda: not any("Approve" in one.links() for one in here.tops()))


async def test_an_answer_whose_body_is_slow_posts_no_message_twice(tmp_path: Path) -> None:
    """What Slack calls the message is in the body: whoever does not wait for it posts again and again."""
    async with (
        slack() as here,
        stage(tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS) as relay,
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

        here.trouble["chat.postMessage"] = slowly
        relay.reboot("vm-0")
        await eventually(lambda: here.count("chat.postMessage") > 0)
        await eventually(lambda: relay.running.relay.dispatcher.worker("ops").waiting == 0)
        assert here.count("chat.postMessage") == 1


async def test_links_do_not_pile_up_while_an_event_is_edited_for_days(tmp_path: Path) -> None:
    """The newest are good, and so are those that somebody may have opened a while ago."""
    clock = HandClock()
    async with room(tmp_path, Wall(), clock=clock) as here:
        urls = []
        for number in range(MAX_LINKS + 20):
            clock.turn(1)
            await here.see(event(description=str(number), due=86400))
            await settled(here)
            urls.append(str(here.wall.cards["m1"].buttons[0].url))
        await here.store.transact(lambda tx: tx.messages.prune())
        tokens = [one.partition("#")[2] for one in urls]
        found = await here.store.read(
            lambda tx: [tx.messages.find_link(one) is not None for one in tokens]
        )
        assert found == [False] * 20 + [True] * MAX_LINKS


async def test_messages_change_with_time_again_after_an_error_that_nobody_foresaw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = HandClock()
    async with room(tmp_path, Wall(), clock=clock) as here:
        await here.see(event())
        await settled(here)

        def spoil(tx: Transaction, change: str) -> None:
            triggers = tx._connection.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
            ).fetchall()  # noqa: SLF001  # no relay can
            for name, _ in triggers:
                tx._connection.execute(f"DROP TRIGGER {name}")  # noqa: SLF001
            tx._connection.execute(f"UPDATE journal SET body = {change}")  # noqa: S608, SLF001  # our own text
            for _, text in triggers:
                tx._connection.execute(text)  # noqa: SLF001

        await here.store.transact(lambda tx: spoil(tx, "CAST('x' || body AS BLOB)"))
        await eventually(lambda: bool(clock.asleep))
        clock.turn(900)
        await eventually(lambda: "an error in the relay's own code" in caplog.text)
        await here.store.transact(lambda tx: spoil(tx, "CAST(substr(body, 2) AS BLOB)"))
        await clock.turn_until(lambda: here.wall.cards["m1"].buttons == (), within=10**6)


@pytest.mark.parametrize("more", [{}, {"approve_in_chat": True, "secret": SECRET}])
async def test_an_answer_of_mattermost_that_comes_too_late_makes_no_second_post(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """Mattermost knows a post again that is the same to the letter, and the links that it shows are good."""
    async with mattermost() as here:
        here.swallows = 1
        async with stage(
            tmp_path, [here.sink(timeout="1500ms", **more)], approvals=APPROVALS
        ) as relay:
            relay.reboot("vm-0")
            await eventually(lambda: ("POST", "posts") in here.calls)
            await eventually(lambda: relay.running.relay.dispatcher.worker("ops").waiting == 0)
            assert here.calls.count(("POST", "posts")) == 2
            (post,) = here.roots
            links = re.findall(r"/approve#([A-Za-z0-9_-]+)", json.dumps(post))
            store = relay.running.relay.store
            assert len(links) == (0 if more else 2)
            assert all(
                [await store.read(lambda tx, one=one: tx.messages.find_link(one)) for one in links]  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            )


async def test_a_burst_changes_with_time_though_one_of_its_events_came_again(
    tmp_path: Path,
) -> None:
    clock = HandClock()
    events = [event(f"E-{number}", due=900) for number in range(7)]
    async with room(tmp_path, Wall(), clock=clock) as here:
        await here.see(*events)
        await settled(here)
        for seen in (events[1:], events):
            clock.turn(1)
            await here.see(*seen)
            await settled(here)
        assert [card.title for card in here.wall.cards.values()] == [
            "7 maintenance events at once",
            "Reboot of db-1",
        ]
        assert any(line.buttons for line in here.wall.cards["m1"].lines)
        await clock.turn_until(
            lambda: not any(line.buttons for line in here.wall.cards["m1"].lines),
            step=10,
            within=10**6,
        )


async def test_what_opens_something_gets_into_no_log_though_the_platform_repeats_the_message(
    tmp_path: Path,
) -> None:
    """Who may read deliveries may not confirm what a link stands for; and the file holds digests alone."""

    async def echo(request: web.Request) -> web.Response:
        sent = await request.read()  # what opens something, first: of an answer, a KiB is kept
        return web.Response(
            status=500, body=sent[max(sent.find(b"/approve#"), sent.find(b"proof"), 400) - 400 :]
        )

    app = web.Application(client_max_size=1 << 20)
    app.router.add_route("*", "/{path:.*}", echo)
    async with TestServer(app) as there:
        url = str(there.make_url(""))
        bot = {
            "kind": "mattermost",
            "api_url": url,
            "allow_http": True,
            "token": "a" * 26,
            "channel": "c" * 26,
        }
        sinks = [
            {"kind": "teams", "name": "workflow", "url": f"{url}/hook", "allow_http": True},
            {"name": "links", **bot},
            {"name": "buttons", **bot, "approve_in_chat": True, "secret": SECRET},
        ]
        async with stage(tmp_path, sinks, approvals=APPROVALS) as relay:
            relay.reboot("vm-0")
            store = relay.running.relay.store

            def logged(tx: Transaction) -> dict[str, str]:
                return {
                    one.sink: tried.response or ""
                    for one in tx.deliveries.page()
                    for tried in tx.deliveries.attempts(one.id)
                }

            async def tried() -> bool:
                return len(await store.read(logged)) == 3

            await eventually(tried)
            kept = await store.read(logged)
            assert all("…" in one for one in kept.values())
            assert not any(
                re.search(r'/approve#[\w-]|this code: \*\*\d|"proof":"[\w-]', one)
                for one in kept.values()
            )


async def test_links_that_people_see_stay_good_while_edits_fail_for_hours(tmp_path: Path) -> None:
    clock = HandClock()
    async with room(tmp_path, Wall(), clock=clock) as here:
        await here.see(event(due=30 * 86400))
        await settled(here)
        shown = [str(one.url).partition("#")[2] for one in here.wall.cards["m1"].buttons]
        here.wall.trouble = Deferred("down")
        await here.submit("hold", "bob")
        await clock.turn_until(
            lambda: here.dispatcher.status()[0].tries[("deferred", None)] > MAX_LINKS + 5,
            step=10,
            within=10**6,
        )
        await here.store.transact(lambda tx: tx.messages.prune())
        found = await here.store.read(
            lambda tx: [tx.messages.find_link(one) is not None for one in shown]
        )
        assert found == [True, True]
        here.wall.trouble = None
        await clock.turn_until(
            lambda: here.wall.did[-2:] == ["edit", "tell"], step=10, within=10**6
        )
        fresh = [str(one.url).partition("#")[2] for one in here.wall.cards["m1"].buttons]
        assert await here.store.read(
            lambda tx: [tx.messages.find_link(one) is not None for one in fresh]
        ) == [True, True]


async def test_a_message_ends_though_its_event_came_again_before_the_platform_heard_of_the_end(
    tmp_path: Path,
) -> None:
    """Azure's document can be empty for a moment: what is told of the second event takes the place of the first one's end."""
    clock = HandClock()
    async with room(tmp_path, Wall(), clock=clock) as here:
        await here.see(event(due=86400))
        await settled(here)
        here.wall.trouble = Deferred("down")
        for seen in ((), (event(due=86400),)):
            clock.turn(1)
            await here.see(*seen)
        here.wall.trouble = None
        await clock.turn_until(
            lambda: [card.tone for card in here.wall.cards.values()] == ["over", "waiting"],
            within=50000,
        )
        assert here.wall.cards["m1"].buttons == ()
        assert here.wall.cards["m2"].buttons != ()
        await settled(here)
