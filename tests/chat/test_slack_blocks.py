"""How cards look in Slack: always within its limits, and other people's texts unchanged."""

from __future__ import annotations

from datetime import UTC, datetime

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.chat.cards.card import Button, Card, EventLine
from relay.chat.platforms.slack.messages import MAX_BLOCKS_BYTES, card_message, text_message
from relay.sentences import PrincipalRef, Text
from tests.chat.slack_block_kit import is_valid_block_kit, rich_text_elements, text_of_blocks
from tests.chat.slack_server import ALICE, TEAM
from tests.depth import depth

NOON = datetime(2026, 4, 11, 12, 0, 30, 500000, tzinfo=UTC)

words = st.text(max_size=60) | st.sampled_from(
    ["<!channel>", "<@U1>", "*bold*", "a\nb", "&amp;", "😀" * 900, "x" * 5000, "\x00", "\u202e"]
)
people = st.sampled_from(
    ["slack:T0OTHER/U1", "client:alice", *(f"slack:{TEAM}/{who}" for who in (ALICE, "<!here>", ""))]
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
    url=st.none() | st.just("https://relay.example.com/#/event/s/E-1/approve/r"),
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
        st.builds(EventLine, text=texts, buttons=st.lists(buttons, max_size=3).map(tuple)),
        max_size=10,
    ).map(tuple),
    buttons=st.lists(buttons, max_size=3).map(tuple),
    footer=st.text(max_size=400),
)


@settings(max_examples=depth(200, 15))
@given(cards, st.booleans())
def test_a_card_is_within_limits_and_mentions_only_principals(card: Card, has_clicks: bool) -> None:
    message = card_message(card, TEAM, has_clicks=has_clicks)
    assert is_valid_block_kit(message["blocks"])
    assert 0 < len(message["text"]) <= 10_000
    assert len(orjson.dumps(message["blocks"])) <= MAX_BLOCKS_BYTES
    assert len(text_of_blocks(message["blocks"]).splitlines()) <= len(message["blocks"]) + 12
    if has_clicks:
        shown = sum(block["type"] == "actions" for block in message["blocks"])
        assert shown == sum(map(bool, (card.buttons, *(line.buttons for line in card.lines))))
    text_types = {
        element.get("type")
        for block in message["blocks"]
        for element in (block.get("text") or {}, *block.get("elements", ()))
    }
    assert "mrkdwn" not in text_types
    elements = rich_text_elements(message["blocks"])
    assert {element["type"] for element in elements} <= {"text", "date", "user", "link"}
    mentioned = {element["user_id"] for element in elements if element["type"] == "user"}
    assert mentioned <= {ALICE}
    linked = {element["url"] for element in elements if element["type"] == "link"}
    assert linked <= {"https://relay.example.com/#/event/s/E-1/approve/r"}
    markup = message["text"].split("<")[1:]
    assert all(piece.startswith((f"@{ALICE}>", "!date^")) for piece in markup)


@settings(max_examples=depth(200, 15))
@given(st.lists(texts, min_size=1, max_size=21))
def test_every_text_message_is_within_the_limits(lines: list[Text]) -> None:
    if any(lines):
        message = text_message([("so: ", *line) for line in lines], TEAM)
        assert is_valid_block_kit(message["blocks"])
        assert 0 < len(message["text"]) <= 10_000


def test_times_are_in_the_readers_time_zone_and_members_are_mentioned() -> None:
    summary: Text = (
        "Azure begins at ",
        NOON,
        ", says ",
        PrincipalRef(f"slack:{TEAM}/{ALICE}"),
        " and ",
        PrincipalRef("slack:T0OTHER/U1"),
    )
    card = Card(title="Reboot", tone="waiting", summary=summary)
    message = card_message(card, TEAM, has_clicks=True)
    timestamp = int(NOON.timestamp())
    date_format = "{time_secs} on {date_short}"
    assert message["text"] == (
        f"🟡 Reboot. Azure begins at <!date^{timestamp}^{date_format}|2026-04-11 12:00:30 UTC>, "
        f"says <@{ALICE}> and slack:T0OTHER/U1"
    )
    elements = rich_text_elements(message["blocks"])
    assert [element for element in elements if element["type"] != "text"] == [
        {
            "type": "date",
            "timestamp": timestamp,
            "format": date_format,
            "fallback": "2026-04-11 12:00:30 UTC",
            "style": {"bold": True},
        },
        {"type": "user", "user_id": ALICE},
    ]


def test_a_button_asks_for_confirmation_and_returns_its_decision() -> None:
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
    card = Card(title="Reboot", tone="waiting", summary=("So.",), buttons=(button,))
    message = card_message(card, TEAM, has_clicks=True)
    (element,) = message["blocks"][-1]["elements"]
    assert (element["value"], element["style"], element["action_id"]) == (
        "approve 3f3f E-1 with spaces",
        "primary",
        "approve-1",
    )
    assert element["confirm"]["title"]["text"] == "Approve?"
    confirm_text = element["confirm"]["text"]["text"]
    assert confirm_text.startswith("Reboot of vm-0, ")
    assert confirm_text.endswith("it may begin within seconds, and cannot be taken back.")
    assert len(confirm_text) == 300


def test_long_texts_are_cut_until_slack_takes_the_message_and_keep_their_ends() -> None:
    lines = tuple(EventLine((f"{'😀' * 1500} end",)) for _ in range(10))
    card = Card(title="100 events", tone="waiting", summary=("So.",), lines=lines, notes=(("N",),))
    message = card_message(card, TEAM, has_clicks=True)
    assert len(orjson.dumps(message["blocks"])) <= MAX_BLOCKS_BYTES
    text = text_of_blocks(message["blocks"])
    assert text.count(" end\n") == 10
    assert text.endswith("\nN")
