"""Messages about reminders and standing holds, and the link to a runbook on each platform."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.request import HOLD_NOTICE
from relay.chat.cards import event_card, grouped_card
from relay.chat.cards.card import Buttons, Card
from relay.chat.platforms.apprise import card_text
from relay.chat.platforms.mattermost.posts import attachments
from relay.chat.platforms.slack.messages import card_message as slack_message
from relay.chat.platforms.teams import card_message as teams_message
from tests.approvals.builders import build_creation, build_end, build_event, build_status
from tests.chat.slack_block_kit import is_valid_block_kit, rich_text_elements
from tests.chat.slack_server import TEAM
from tests.chat.teams_server import schema_errors
from tests.chat.wall_platform import Wall, WallRelay, plain_text, relay_with_wall

RUNBOOK = "https://wiki.example.com/a_b*c/databases?x=1#maintenance"
URL = "https://relay.example.com"
QUORUM = {"votes": 1, "from": ["client:alice"], "remind": "10m"}
RULE = {"name": "data_bases", "approve": QUORUM, "runbook": RUNBOOK}
SETTINGS = ApprovalsSettings.model_validate({"rules": [RULE]})


def card() -> Card:
    """Return the card of an event whose rule has a runbook."""
    return event_card(build_status(settings=SETTINGS), Buttons(public_url=URL))


# --- a runbook


def test_a_card_names_the_runbook_of_its_rule_until_the_event_is_over() -> None:
    assert card().runbooks == (("data_bases", RUNBOOK),)
    statuses = [build_status(build_event(f"E-{number}"), settings=SETTINGS) for number in range(3)]
    assert grouped_card(statuses, Buttons()).runbooks == (("data_bases", RUNBOOK),)
    over = build_status(settings=SETTINGS, live=False)
    assert event_card(over, Buttons()).runbooks == ()


def test_every_platform_leads_to_the_runbook() -> None:
    blocks = list(slack_message(card(), TEAM, has_clicks=False)["blocks"])
    assert is_valid_block_kit(blocks)
    urls = {each["url"] for each in rich_text_elements(blocks) if each["type"] == "link"}
    assert urls == {RUNBOOK, *(button.url for button in card().buttons)}
    content = teams_message(card())["attachments"][0]["content"]
    assert list(schema_errors(content)) == []
    texts = [block["text"] for block in content["body"] if block["type"] == "TextBlock"]
    assert rf"Runbook of rule [data\_bases]({RUNBOOK})" in texts
    main, *_ = attachments(card(), {}, lambda _: {})
    assert f"Runbook of rule [data_bases]({RUNBOOK})" in main["text"]
    assert f"\n\nRunbook of rule data_bases: {RUNBOOK}\n\n" in card_text(card())


# --- reminders


async def test_a_reminder_is_a_line_in_the_thread_of_the_message(tmp_path: Path) -> None:
    async with relay_with_wall(tmp_path, Wall(), approvals_settings=SETTINGS) as relay:
        await relay.deliver_document(build_event())
        relay.clock.advance(301.0)
        await relay.deliver_document(build_event())
        (line,) = relay.wall.threads["m1"]
        assert line.partition(": ")[2] == (
            "Reminder: 0 of 1 votes, 1 missing, from client:alice; voting closes at 12:15. "
            "Azure proceeds at NotBefore regardless."
        )


@pytest.mark.parametrize("events", [["approval.reminder"], ["*"]])
async def test_a_pager_gets_one_message_for_a_reminder(tmp_path: Path, events: list[str]) -> None:
    wall = Wall(can_edit=False)
    async with relay_with_wall(tmp_path, wall, approvals_settings=SETTINGS, events=events) as relay:
        await relay.deliver_document(build_event())
        before = list(wall.calls)
        relay.clock.advance(301.0)
        for _ in range(2):
            await relay.deliver_document(build_event())
        if events == ["*"]:
            assert (before, wall.calls) == (["post"], ["post", "reply"])
        else:
            assert (before, wall.calls) == ([], ["post"])
            (posted,) = wall.cards.values()
            assert plain_text(posted.notes[0]).startswith("Reminder: 0 of 1 votes, 1 missing")


# --- standing holds


async def _hold(relay: WallRelay) -> str:
    match, reason = {"resources": ["db-*"]}, "@all <b>sale</b>"
    request = build_creation(match=match, at=relay.clock.now(), reason=reason)
    answer = await relay.store.transact(lambda tx: relay.approvals.decide(tx, request))
    return str(answer.body["holdId"])


async def test_messages_say_whose_standing_hold_it_is_from_start_to_end(relay: WallRelay) -> None:
    await relay.deliver_document(build_event(), build_event("E-2", resources=("web-1",)))
    hold_id = await _hold(relay)
    await relay.wait_for_tone("held")
    held = dict(relay.wall.cards["m1"].facts)["Held by"]
    assert plain_text(held) == ("client:eve until 12:10 by a standing hold (“@all <b>sale</b>”)")
    assert HOLD_NOTICE[1:] in plain_text(relay.wall.cards["m1"].notes[-1])
    assert relay.wall.decisions("m1") == ["approve", "hold"]
    assert relay.wall.cards["m2"].tone == "waiting"
    end = build_end(hold_id, at=relay.clock.now())
    await relay.store.transact(lambda tx: relay.approvals.decide(tx, end))
    await relay.wait_for_tone("waiting")
    await relay.settle()
    made, ended = (line.partition(": ")[2] for line in relay.wall.threads[None])
    assert made == (
        "client:eve holds resources db-* from 12:00 until 12:10 (“@all <b>sale</b>”). "
        f"A{HOLD_NOTICE[1:]}."
    )
    assert ended == "client:eve ended the standing hold of client:eve on resources db-*."


async def test_a_message_says_when_a_standing_hold_is_over_by_time(relay: WallRelay) -> None:
    await _hold(relay)
    await relay.deliver_document(build_event())
    assert "Held by" in dict(relay.wall.cards["m1"].facts)
    await relay.wait_for_tone("waiting", within=900)
