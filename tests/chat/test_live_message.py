"""One message per event, kept up to date: posts, edits and replies on any platform."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from aiohttp import web
from typing_extensions import override  # in typing from Python 3.12

from relay.chat import context
from relay.chat.cards.card import Card
from relay.chat.context import MessagePlanner
from relay.errors import Deferred
from relay.store import Mode
from relay.store.transaction import Transaction
from tests.approvals.builders import ORIGIN, build_event
from tests.chat.mattermost_server import SECRET, MattermostServer
from tests.chat.running_relay import rule, stage
from tests.chat.slack_server import CHANNEL, running_slack
from tests.chat.wall_platform import Wall, WallRelay, plain_text, relay_with_wall
from tests.cli.command import serve_handler
from tests.clocks import NOON, ManualClock
from tests.eventually import eventually


@pytest.mark.parametrize(
    ("can_edit", "edits"), [(True, [240, 420, 480, 540, 600, 660]), (False, [])]
)
async def test_time_alone_edits_a_message_about_many_events_at_most_once_a_minute(
    tmp_path: Path, *, can_edit: bool, edits: list[int]
) -> None:
    """Their NotBefore differ by a second each, and so do the ends of their voting."""
    events = [build_event(f"E-{number}", due=600.0 + number) for number in range(50)]
    async with relay_with_wall(tmp_path, Wall(can_edit=can_edit)) as relay:
        await relay.deliver_document(*events)
        assert relay.wall.calls == ["post"]
        assert await relay.calls_by_time(700, step=20) == edits


@pytest.mark.parametrize("can_edit", [True, False])
async def test_of_a_long_history_the_newest_is_told_and_no_change_is_missed(
    tmp_path: Path, can_edit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change of Azure is older than what is read of the history."""
    monkeypatch.setattr(context, "MAX_UNPOSTED_EVENTS", 30)
    clock = ManualClock()
    async with relay_with_wall(tmp_path, Wall(can_edit=can_edit), clock=clock) as relay:
        await relay.deliver_document(build_event())
        relay.wall.error = Deferred("down")
        await relay.record_document(build_event(due=1000))
        for _ in range(15):
            await relay.submit("hold", "bob")
            await relay.submit("release", "bob")
            clock.advance(4)  # more at once would be refused
        await eventually(lambda: relay.dispatcher.workers[0].tries[("deferred", None)] > 0)
        relay.wall.calls.clear()
        relay.wall.error = None
        await clock.advance_until(lambda: bool(relay.wall.calls))
        await relay.settle()
        if can_edit:
            assert relay.wall.calls == ["edit", "reply"]
            assert relay.wall.threads["m1"][0].startswith("… more than 10 happened before")
        else:
            assert relay.wall.calls == ["post"]


async def test_a_grouped_message_holds_only_what_the_sink_wants(tmp_path: Path) -> None:
    events = [
        build_event(f"E-{number}", resources=(f"{'db' if number < 3 else 'web'}-{number}",))
        for number in range(20)
    ]
    async with relay_with_wall(tmp_path, Wall(), match={"resources": ["db-*"]}) as relay:
        await relay.deliver_document(*events)
        footers = sorted(card.footer for card in relay.wall.cards.values())
        assert footers == ["E-0 · prod", "E-1 · prod", "E-2 · prod"]


async def test_a_message_that_somebody_deleted_is_posted_anew(relay: WallRelay) -> None:
    await relay.deliver_document(build_event())
    relay.wall.cards["gone"] = relay.wall.cards.pop("m1")
    await relay.decide("approve", "alice")
    assert list(relay.wall.cards) == ["gone", "m2"]
    assert relay.wall.threads == {"m2": ["12:00: client:alice voted to approve, 1 of 2."]}


async def test_a_platform_that_cannot_edit_gets_new_buttons_for_void_ones(tmp_path: Path) -> None:
    """An approval is bound to the revision that its message showed."""
    changed = build_event(due=1800)
    async with relay_with_wall(tmp_path, Wall(can_edit=False)) as relay:
        await relay.deliver_document(build_event())
        await relay.deliver_document(changed)
        assert relay.wall.calls == ["post", "post"]
        assert relay.wall.cards["m2"].buttons[0].revision == changed.revision


async def test_buttons_go_when_their_time_is_over_though_nothing_happened(relay: WallRelay) -> None:
    await relay.deliver_document(build_event())
    assert relay.wall.decisions("m1") == ["approve", "hold"]
    await relay.pass_time(840)
    await eventually(lambda: relay.wall.decisions("m1") == ["hold"])
    await relay.settle()  # what is shown is remembered
    await relay.pass_time(60)
    await eventually(lambda: relay.wall.cards["m1"].buttons == ())
    assert relay.wall.calls == ["post", "edit", "edit"]


def card_text(relay: WallRelay) -> str:
    """Return what the message says about votes and its notes."""
    card = relay.wall.cards["m1"]
    return "\n".join(map(plain_text, (dict(card.facts)["Votes"], *card.notes)))


async def test_a_vote_that_expires_vanishes_though_nothing_happened(tmp_path: Path) -> None:
    """Also from that of a sink that is not told of approvals."""
    async with relay_with_wall(tmp_path, Wall(), events=["event.*"]) as relay:
        await relay.record_document(build_event())
        await relay.submit("approve", "alice")
        await relay.deliver_document(build_event(description="new"))
        assert card_text(relay).startswith("1 of 2: client:alice; 1 missing")
        await relay.pass_time(300)
        await eventually(lambda: card_text(relay).startswith("0 of 2; 2 missing"))


async def test_a_platform_that_cannot_edit_is_told_once_that_voting_closed(tmp_path: Path) -> None:
    """Also after a restart, and whatever else time changes."""
    clock = ManualClock()
    wall = Wall(can_edit=False)
    async with relay_with_wall(tmp_path, wall, clock=clock) as relay:
        await relay.deliver_document(build_event())
        await relay.pass_time(700)
        await relay.decide("approve", "alice")
        wall.threads.clear()
    clock.advance(145)
    async with relay_with_wall(tmp_path, wall, clock=clock) as relay:
        await eventually(lambda: bool(wall.threads))
        await relay.decide("hold", "bob")
        await relay.pass_time(55)
        await relay.settle()
    assert wall.threads == {
        None: [
            "Reboot of db-1 (E-1)",
            "12:14: Voting closed, with 1 of 2 votes.",
            "Reboot of db-1 (E-1)",
            "12:14: client:bob put it on hold.",
        ]
    }
    assert wall.calls.count("post") == 1


async def test_a_platform_that_fails_when_voting_closes_is_told_later(tmp_path: Path) -> None:
    clock = ManualClock()
    async with relay_with_wall(tmp_path, Wall(can_edit=False), clock=clock) as relay:
        await relay.deliver_document(build_event())
        await relay.pass_time(700)
        await relay.decide("approve", "alice")
        relay.wall.threads.clear()
        relay.wall.error = Deferred("down")
        await relay.pass_time(140)
        await eventually(lambda: relay.dispatcher.workers[0].tries[("deferred", None)] > 0)
        relay.wall.error = None
        await clock.advance_until(lambda: bool(relay.wall.threads))
        assert relay.wall.threads[None] == [
            "Reboot of db-1 (E-1)",
            "12:14: Voting closed, with 1 of 2 votes.",
        ]


async def test_buttons_go_when_approvals_are_turned_off_and_come_back(relay: WallRelay) -> None:
    await relay.deliver_document(build_event())

    async def set_mode(mode: Mode, shown: list[str]) -> None:
        now = relay.clock.now()
        await relay.store.transact(lambda tx: tx.store_approval_mode(mode, "local:root", now))
        await relay.pass_time(60)
        await eventually(lambda: relay.wall.decisions("m1") == shown)
        await relay.settle()

    await set_mode("off", [])
    await set_mode("on", ["approve", "hold"])
    assert relay.wall.calls == ["post", "edit", "edit"]


class SlowWall(Wall):
    def __init__(self) -> None:
        super().__init__()
        self.is_called, self.may_go_on = asyncio.Event(), asyncio.Event()

    @override
    async def post(self, card: Card) -> str | None:
        await self._wait()
        return await super().post(card)

    @override
    async def edit(self, ref: str, card: Card) -> None:
        await self._wait()
        await super().edit(ref, card)

    async def _wait(self) -> None:
        self.is_called.set()
        await self.may_go_on.wait()


@pytest.mark.parametrize("call", ["post", "edit"])
async def test_what_changes_while_a_platform_is_called_is_shown_within_a_minute(
    tmp_path: Path, call: str
) -> None:
    wall = SlowWall()
    async with relay_with_wall(tmp_path, wall) as relay:
        if call == "edit":
            wall.may_go_on.set()
            await relay.deliver_document(build_event())
            wall.may_go_on.clear()
            wall.is_called.clear()
            await relay.submit("approve", "alice")
        else:
            await relay.record_document(build_event())
        await wall.is_called.wait()
        now = relay.clock.now()
        await relay.store.transact(lambda tx: tx.store_approval_mode("off", "local:root", now))
        wall.may_go_on.set()
        await relay.settle()
        await relay.pass_time(60)
        await eventually(lambda: wall.decisions("m1") == [])


async def test_a_button_leads_to_its_decision_about_what_is_shown(relay: WallRelay) -> None:
    event = build_event("a/b@1")
    await relay.deliver_document(event)
    for button in relay.wall.cards["m1"].buttons:
        where = f"{ORIGIN.scope}/a%2Fb%401/{button.decision}/{event.revision}"
        assert button.url == f"https://relay.example.com/#/event/{where}"


async def test_buttons_of_the_chat_itself_lead_nowhere_else(tmp_path: Path) -> None:
    async with relay_with_wall(tmp_path, Wall(), in_chat=True, public_url=None) as relay:
        await relay.deliver_document(build_event())
        assert [button.url for button in relay.wall.cards["m1"].buttons] == [None, None]


# --- whatever the clock, the disk and the platform do


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
