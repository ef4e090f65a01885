"""One message per event, kept up to date: posts, edits and replies on any platform."""

from __future__ import annotations

import sqlite3
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from relay.errors import Deferred
from relay.events.build import relay_event
from relay.outbox import Mode
from relay.outbox.chat_messages import ConfirmationLink, token_digest
from relay.outbox.transaction import Transaction
from tests.approvals.builders import ORIGIN, build_event
from tests.approvals.manual_clock import NOON, ManualClock
from tests.chat.wall_platform import Room, Wall, flat, room
from tests.journey.relay_process import eventually

STARTED = build_event(event_status="Started", due=None)


async def settled(here: Room) -> None:
    """Everything that was said has been delivered."""
    await eventually(here.idle)


async def passed(clock: ManualClock, seconds: float) -> None:
    """So much time passes for whoever waits for it."""
    await eventually(lambda: bool(clock.remaining_sleeps))
    clock.advance(seconds)


async def test_an_event_is_one_message_from_its_first_notice_to_its_end(tmp_path: Path) -> None:
    async with room(tmp_path, Wall()) as here:
        await here.see(build_event())
        await settled(here)
        assert here.wall.did == ["post"]
        await here.submit("approve", "alice")
        await here.submit("hold", "bob")
        await here.submit("release", "bob")
        await settled(here)
        await here.see(STARTED)
        await here.see()
        await settled(here)
        assert list(here.wall.cards) == ["m1"]
        assert here.wall.cards["m1"].tone == "over"
        assert here.wall.cards["m1"].buttons == ()
        assert here.wall.did.count("post") == 1
        assert [line.partition(": ")[2] for line in here.wall.threads["m1"]] == [
            "client:alice voted to approve, 1 of 2.",
            "client:bob put it on hold.",
            "client:bob released the hold.",
            "Azure began.",
            "The votes count no more: the event has changed.",
            "It is over: Azure has completed it.",
        ]


async def test_the_same_eventid_that_comes_again_is_a_message_of_its_own(tmp_path: Path) -> None:
    clock = ManualClock()
    async with room(tmp_path, Wall(), clock=clock) as here:
        for _ in range(2):
            clock.advance(1)
            await here.see(build_event())
            clock.advance(1)
            await here.see()
        await settled(here)
        assert [card.tone for card in here.wall.cards.values()] == ["over", "over"]


async def test_a_burst_is_one_message_and_its_edits_come_together(tmp_path: Path) -> None:
    """Fifty events of one document are one grouped message, not fifty."""
    events = [build_event(f"E-{number}", resources=(f"db-{number}",)) for number in range(50)]
    async with room(tmp_path, Wall()) as here:
        await here.see(*events)
        await settled(here)
        assert here.wall.did == ["post"]
        assert here.wall.cards["m1"].title == "50 maintenance events at once"
        await here.see()
        await settled(here)
        assert here.wall.cards["m1"].tone == "over"
        assert here.wall.did.count("edit") <= 2
        assert here.wall.threads["m1"][0].startswith("… 30 more happened before")


async def test_a_few_events_of_one_document_get_a_message_each(tmp_path: Path) -> None:
    async with room(tmp_path, Wall()) as here:
        await here.see(build_event("E-1"), build_event("E-2"), build_event("E-3"))
        await settled(here)
        assert [card.footer for card in here.wall.cards.values()] == [
            "E-1 · prod",
            "E-2 · prod",
            "E-3 · prod",
        ]


async def test_a_grouped_message_holds_only_what_the_sink_wants(tmp_path: Path) -> None:
    events = [
        build_event(f"E-{number}", resources=(f"{'db' if number < 3 else 'web'}-{number}",))
        for number in range(20)
    ]
    async with relay_with_wall(tmp_path, Wall(), match={"resources": ["db-*"]}) as relay:
        await relay.see(*events)
        await relay.settle()
        assert sorted(card.footer for card in relay.wall.cards.values()) == [
            "E-0 · prod",
            "E-1 · prod",
            "E-2 · prod",
        ]


async def test_a_platform_that_was_down_gets_the_latest_state_and_no_flood(tmp_path: Path) -> None:
    """Nothing is lost: what happened meanwhile is told in one reply."""
    clock = ManualClock()
    async with room(tmp_path, Wall(trouble=Deferred("down")), clock=clock) as here:
        await here.see(build_event())
        for _ in range(3):
            await here.submit("hold", "bob")
            await here.submit("release", "bob")
        await here.submit("approve", "alice")
        await eventually(lambda: here.dispatcher.status()[0].tries[("deferred", None)] > 0)
        here.wall.trouble = None
        await clock.advance_until(lambda: "tell" in here.wall.did)
        await settled(here)
        assert here.wall.did == ["post", "tell"]
        assert len(here.wall.threads["m1"]) == 7
        assert ("Votes", "1 of 2: client:alice") in [
            (label, plain_text(text).partition(";")[0])
            for label, text in relay.wall.cards["m1"].facts
        ]


async def test_a_restart_edits_the_message_that_was_posted_before(tmp_path: Path) -> None:
    wall = Wall()
    async with room(tmp_path, wall) as here:
        await here.see(build_event())
        await settled(here)
    async with room(tmp_path, wall) as here:
        await here.submit("approve", "alice")
        await settled(here)
    assert list(wall.cards) == ["m1"]
    assert wall.calls == ["post", "edit", "reply"]


async def test_a_message_that_somebody_deleted_is_posted_anew(tmp_path: Path) -> None:
    async with room(tmp_path, Wall()) as here:
        await here.see(build_event())
        await settled(here)
        here.wall.cards["gone"] = here.wall.cards.pop("m1")
        await here.submit("approve", "alice")
        await settled(here)
        assert list(here.wall.cards) == ["gone", "m2"]
        assert here.wall.threads == {"m2": ["12:00: client:alice voted to approve, 1 of 2."]}


async def test_a_platform_that_cannot_edit_gets_short_follow_ups(tmp_path: Path) -> None:
    async with room(tmp_path, Wall(edits=False)) as here:
        await here.see(build_event())
        await here.submit("approve", "alice")
        await settled(here)
        assert here.wall.did == ["post", "tell"]
        assert here.wall.threads == {
            None: ["Reboot of db-1 (E-1)", "12:00: client:alice voted to approve, 1 of 2."]
        }


async def test_a_platform_that_cannot_edit_gets_new_buttons_when_the_old_ones_are_void(
    tmp_path: Path,
) -> None:
    """An approval is bound to the revision that its message showed."""
    changed = build_event(due=1800)
    async with room(tmp_path, Wall(edits=False)) as here:
        await here.see(build_event())
        await settled(here)
        await here.see(changed)
        await settled(here)
        assert here.wall.did == ["post", "post"]
        assert here.wall.cards["m2"].buttons[0].revision == changed.revision


async def test_a_platform_that_cannot_edit_tells_a_new_time_though_nobody_can_answer_there(
    tmp_path: Path,
) -> None:
    async with room(tmp_path, Wall(edits=False), public_url=None) as here:
        await here.see(build_event())
        await settled(here)
        await here.see(build_event(due=1800))
        await settled(here)
        assert here.wall.did == ["post", "post"]
        assert [part for part in here.wall.cards["m2"].summary if isinstance(part, datetime)] == [
            NOON + timedelta(seconds=1800)
        ]


async def test_buttons_go_when_their_time_is_over_though_nothing_happened(tmp_path: Path) -> None:
    clock = ManualClock()
    async with room(tmp_path, Wall(), clock=clock) as here:
        await here.see(build_event())
        await settled(here)
        assert [one.decision for one in here.wall.cards["m1"].buttons] == ["approve", "hold"]
        await passed(clock, 840)
        await eventually(
            lambda: [one.decision for one in here.wall.cards["m1"].buttons] == ["hold"]
        )
        await passed(clock, 60)
        await eventually(lambda: here.wall.cards["m1"].buttons == ())
        assert here.wall.did == ["post", "edit", "edit"]


async def test_buttons_go_when_approvals_are_turned_off_and_come_back(tmp_path: Path) -> None:
    clock = ManualClock()
    async with room(tmp_path, Wall(), clock=clock) as here:
        await here.see(build_event())
        await settled(here)
        for mode, shown in (("off", []), ("on", ["approve", "hold"])):
            await here.store.transact(
                lambda tx, mode=mode: tx.set_mode(mode, "local:root", clock.now())
            )  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            await passed(clock, 60)
            await eventually(
                lambda shown=shown: [one.decision for one in here.wall.cards["m1"].buttons] == shown
            )
            await settled(here)  # what is shown is remembered
        assert here.wall.did == ["post", "edit", "edit"]


async def test_links_hold_tokens_of_which_the_file_has_digests_alone(tmp_path: Path) -> None:
    async with room(tmp_path, Wall()) as here:
        await here.see(build_event())
        await settled(here)
        buttons = here.wall.cards["m1"].buttons
        tokens = [
            str(one.url).removeprefix("https://relay.example.com/approve#") for one in buttons
        ]
        for button, token in zip(buttons, tokens, strict=True):
            found = await here.store.read(lambda tx, token=token: tx.messages.invitation(token))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            assert found is not None
            assert (found.decision, found.revision, found.code) == (
                button.decision,
                build_event().revision,
                here.wall.cards["m1"].code,
            )
    data = b"".join(file.read_bytes() for file in tmp_path.iterdir())  # noqa: ASYNC240  # a few kilobytes
    assert not any(token.encode() in data for token in tokens)
    assert all(token_digest(token).encode() in data for token in tokens)


async def test_links_to_an_event_that_has_ended_are_forgotten(tmp_path: Path) -> None:
    async with room(tmp_path, Wall()) as here:
        await here.see(build_event())
        await settled(here)
        await here.see()
        await settled(here)
        await here.store.transact(lambda tx: tx.messages.prune())
    with sqlite3.connect(tmp_path / "relay.db") as file:
        assert file.execute("SELECT count(*) FROM invitation").fetchone() == (0,)
        assert file.execute("SELECT count(*) FROM message").fetchone() == (1,)
    file.close()


async def test_buttons_of_the_chat_itself_lead_nowhere_else(tmp_path: Path) -> None:
    async with room(tmp_path, Wall(), in_chat=True, public_url=None) as here:
        await here.see(build_event())
        await settled(here)
        assert [one.url for one in here.wall.cards["m1"].buttons] == [None, None]
        assert here.wall.cards["m1"].code is None


@pytest.mark.parametrize("in_chat", [True, False])
async def test_what_shows_nothing_new_is_not_sent_again(tmp_path: Path, *, in_chat: bool) -> None:
    async with room(tmp_path, Wall(), in_chat=in_chat) as here:
        await here.see(build_event())
        await settled(here)
        position = await here.store.read(lambda tx: tx.journal.last_change_position("e-1"))
        assert position is not None

        await relay.store.transact(lambda tx: tx.redeliver(position, "wall", NOON))
        await relay.settle()
        assert relay.wall.calls == ["post"]


async def test_what_the_relay_says_of_itself_is_a_message_of_its_own(tmp_path: Path) -> None:
    async with relay_with_wall(tmp_path, Wall()) as relay:
        source_lost = relay_event(
            "relay.source-lost",
            ORIGIN,
            NOON,
            sink=None,
            reason="no answer for 90 s",
            count=1,
            head="0:0",
        )
        await relay.store.transact(lambda tx: tx.record(source_lost, NOON + timedelta(seconds=1)))
        await relay.settle()
        assert relay.wall.threads == {
            None: [
                "12:00: Azure's metadata service does not answer this relay: no answer for 90 s."
            ]
        }
