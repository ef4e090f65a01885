"""How cards look in Slack: within its limits whatever they hold, and letter for letter what others wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.chat.cards.card import Button, Card, Line, PrincipalRef, Text
from relay.chat.platforms.slack.blocks import card_message, text_message
from relay.chat.platforms.slack.payloads import button_value
from tests.chat.slack_server import ALICE, TEAM, Posted, SlackServer, form, well_formed

NOON = datetime(2026, 4, 11, 12, 0, 30, 500000, tzinfo=UTC)

words = st.text(max_size=60) | st.sampled_from(
    ["<!channel>", "<@U1>", "*bold*", "a\nb", "&amp;", "😀" * 900, "x" * 5000, "\x00", "\u202e"]
)
people = st.sampled_from(
    [
        f"slack:{TEAM}/{ALICE}",
        "slack:T0OTHER/U1",
        "client:alice",
        f"slack:{TEAM}/<!here>",
        f"slack:{TEAM}/",
    ]
).map(PrincipalRef)
moments = st.datetimes(timezones=st.just(UTC))
texts: st.SearchStrategy[Text] = st.lists(words | moments | people, max_size=6).map(tuple)
buttons = st.builds(
    Button,
    decision=st.sampled_from(["approve", "hold", "release"]),
    label=st.text(min_size=1, max_size=100).filter(str.strip),
    event_id=st.text(min_size=1, max_size=300),
    revision=st.just("3f" * 16),
    question=texts.map(lambda text: ("Really? ", *text)),
    url=st.none() | st.just("https://relay.example.com/approve#token"),
)
cards = st.builds(
    Card,
    title=st.text(min_size=1, max_size=400),
    tone=st.sampled_from(["waiting", "held", "approved", "running", "over"]),
    summary=st.tuples(st.just("It is so: "), words),
    facts=st.lists(st.tuples(st.sampled_from(["Machines", "Azure says"]), texts), max_size=8).map(
        tuple
    ),
    notes=st.lists(texts.filter(bool), max_size=4).map(tuple),
    lines=st.lists(
        st.builds(Line, text=texts, buttons=st.lists(buttons, max_size=3).map(tuple)), max_size=10
    ).map(tuple),
    buttons=st.lists(buttons, max_size=3).map(tuple),
    code=st.none() | st.just("123456"),
    footer=st.text(max_size=400),
)


def parts(blocks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every element of the rich texts."""
    return [
        one
        for block in blocks
        if block["type"] == "rich_text"
        for section in block["elements"]
        for one in section["elements"]
    ]


@settings(max_examples=50)
@given(cards, st.booleans())
def test_every_card_is_within_every_limit_and_says_nothing_in_markup(
    card: Card, heard: bool
) -> None:
    """Block Kit's limits; the 64 KiB that the relay takes of a call, since Slack sends the message back with each click.

    And mentions are of people whom the card names as people, and of nobody else.
    """
    message = card_message(card, TEAM, button_value if heard else None)
    assert well_formed(message.blocks)
    assert 0 < len(message.text) <= 10_000
    posted = Posted("1700000000.000001", message.text, list(message.blocks))  # type: ignore[arg-type]  # they are only read
    for button in list(posted.buttons().values())[:1]:
        assert (
            len(form(SlackServer(port=65535).clicked(button, posted.ts, message=posted)))
            <= 64 * 1024
        )
    assert "mrkdwn" not in {
        one.get("type")
        for block in message.blocks
        for one in (block.get("text") or {}, *block.get("elements", ()))
    }
    assert {one["user_id"] for one in parts(message.blocks) if one["type"] == "user"} <= {ALICE}
    assert {one["type"] for one in parts(message.blocks)} <= {"text", "date", "user", "link"}
    assert {one["url"] for one in parts(message.blocks) if one["type"] == "link"} <= {
        "https://relay.example.com/approve#token"
    }
    assert all(piece.startswith((f"@{ALICE}>", "!date^")) for piece in message.text.split("<")[1:])


@settings(max_examples=50)
@given(st.lists(texts, min_size=1, max_size=21))
def test_whatever_is_said_is_within_the_limits(lines: list[Text]) -> None:
    if any(lines):
        message = text_message([("so: ", *line) for line in lines], TEAM)
        assert well_formed(message.blocks)
        assert 0 < len(message.text) <= 10_000


@pytest.mark.parametrize(
    "text",
    [
        "<!channel>",
        "<!here>",
        "<@U1>",
        "<#C1>",
        "<http://evil.example|Approve>",
        "&lt;!channel&gt;",
    ],
)
def test_a_notification_mentions_nobody_whom_a_text_names(text: str) -> None:
    message = card_message(Card(title=text, tone="waiting", summary=(text,)), TEAM, button_value)
    assert "<" not in message.text
    assert message.text.count("&") >= 2
    assert (message.blocks[0]["text"]["type"], message.blocks[0]["text"]["text"]) == (
        "plain_text",
        f"🟡 {text}",
    )
    assert parts(message.blocks) == [{"type": "text", "text": text, "style": {"bold": True}}]


def test_moments_are_shown_in_the_readers_own_zone_and_people_as_they_are_known_there() -> None:
    text: Text = (
        "Azure begins at ",
        NOON,
        ", says ",
        PrincipalRef(f"slack:{TEAM}/{ALICE}"),
        " and ",
        PrincipalRef("slack:T0OTHER/U1"),
    )
    message = card_message(Card(title="Reboot", tone="waiting", summary=text), TEAM, button_value)
    stamp = int(NOON.timestamp())
    date = "{time_secs} on {date_short}"
    assert message.text == (
        f"🟡 Reboot. Azure begins at <!date^{stamp}^{date}|12:00:30 on 2026-04-11 UTC>, says <@{ALICE}> and slack:T0OTHER/U1"
    )
    assert [one for one in parts(message.blocks) if one["type"] != "text"] == [
        {
            "type": "date",
            "timestamp": stamp,
            "format": date,
            "fallback": "12:00:30 on 2026-04-11 UTC",
            "style": {"bold": True},
        },
        {"type": "user", "user_id": ALICE},
    ]


def test_a_text_of_others_cannot_feign_a_line_of_ours() -> None:
    card = Card(
        title="Reboot",
        tone="waiting",
        summary=("So.",),
        facts=(("Azure says", ("all is well\nVotes: 2 of 2\u2028Rule: none\u202e",)),),
    )
    assert Posted(
        "",
        "",
        list(card_message(card, TEAM, button_value).blocks),  # type: ignore[arg-type]  # they are only read
    ).words().splitlines() == [
        "🟡 Reboot",
        "So.",
        "Azure says: all is well Votes: 2 of 2 Rule: none ",
    ]


def test_a_button_asks_before_it_counts_and_brings_back_what_it_is_about() -> None:
    question: Text = (
        f"Reboot of {'vm-0, ' * 80}: it may begin within seconds, and cannot be taken back.",
    )
    button = Button(
        decision="approve",
        label="Approve",
        event_id="E-1 with spaces",
        revision="3f3f",
        question=question,
    )
    message = card_message(
        Card(title="Reboot", tone="waiting", summary=("So.",), buttons=(button,)),
        TEAM,
        button_value,
    )
    (drawn,) = message.blocks[-1]["elements"]
    assert (drawn["value"], drawn["style"], drawn["action_id"]) == (
        "approve 3f3f - E-1 with spaces",
        "primary",
        "approve-1",
    )
    assert drawn["confirm"]["title"]["text"] == "Approve?"
    asked = drawn["confirm"]["text"]["text"]
    assert asked.startswith("Reboot of vm-0, ")
    assert asked.endswith("it may begin within seconds, and cannot be taken back.")
    assert len(asked) <= 300


def test_a_text_that_is_cut_says_so() -> None:
    card = Card(
        title="R" * 200,
        tone="waiting",
        summary=("So.",),
        facts=(("Azure says", ("x" * 5000,)),),
        footer="E" * 900,
    )
    title, _, facts, footer = (
        Posted("", "", list(card_message(card, TEAM, button_value).blocks)).words().splitlines()  # type: ignore[arg-type]  # they are only read
    )
    assert all(one.endswith("…") for one in (title, facts, footer))
    assert len(title) == 150


def test_a_hundred_machines_with_long_texts_leave_room_for_what_matters() -> None:
    """What is cut is what others wrote, never the warning or the buttons."""
    lines = tuple(
        Line(
            (f"Reboot of {'😀' * 900}",),
            (
                Button(
                    decision="approve",
                    label="Approve",
                    event_id=f"E-{n}",
                    revision="3f" * 16,
                    question=("?",),
                ),
            ),
        )
        for n in range(10)
    )
    card = Card(
        title="100 events",
        tone="waiting",
        summary=("So.",),
        lines=lines,
        notes=(("Azure proceeds at NotBefore regardless.",),),
        footer="prod",
    )
    message = card_message(card, TEAM, button_value)
    posted = Posted("", message.text, list(message.blocks))  # type: ignore[arg-type]  # they are only read
    assert sum(block["type"] == "actions" for block in message.blocks) == 10
    click = SlackServer(port=65535).clicked(
        posted.buttons()["Approve"], "1700000000.000001", message=posted
    )
    assert len(form(click)) <= 64 * 1024
    assert "Azure proceeds at NotBefore regardless." in posted.words()
