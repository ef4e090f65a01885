"""A card as a post of Mattermost: what is ours is markup, what is not is words."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.chat.cards.card import Button, Card, Line, PrincipalRef, Text
from relay.chat.platforms.mattermost.post import (
    MOST_MESSAGE,
    attachments,
    plain,
    rendered,
    thread_reply,
)
from tests.chat.mattermost_server import Mattermost

GAP = "\N{ZERO WIDTH SPACE}"
AT = datetime(2026, 11, 20, 15, 4, 5, tzinfo=UTC)


def word_for_word(escaped: str) -> str:
    """What a reader sees of it."""
    return re.sub(r"\\(?=[\\`*\[\]|$_])", "", escaped.replace(GAP, ""))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("@channel", f"@{GAP}channel"),
        ("#incident", f"#{GAP}incident"),
        ("~town-square", f"~{GAP}town-square"),
        (":tada:", f":{GAP}tada:"),
        ("https://evil.example/x", f"https:{GAP}//evil.{GAP}example/x"),
        ("www.evil.example", f"www{GAP}.evil.example"),
        ("me@evil.example", f"me@{GAP}evil.example"),
        ("&#64;all", f"&{GAP}#{GAP}64;all"),
        ("<https://evil>", f"<{GAP}https:{GAP}//evil>"),
        ("[click](x)", r"\[click\](x)"),
        ("![image](x)", r"!\[image\](x)"),
        ("*a* _b_ `c` |d| $e$", r"\*a\* \_b\_ \`c\` \|d\| \$e\$"),
        ("~~gone~~", f"~{GAP}~{GAP}gone~{GAP}~{GAP}"),
        ("db_main_01 set00000i", "db_main_01 set00000i"),
        ("- item", f"{GAP}- item"),
        ("1. item", f"{GAP}1. item"),
        ("> quote", f"{GAP}> quote"),
        ("# title", f"#{GAP} title"),
        ("a\n\n# b\r\n    code", f"a #{GAP} b code"),
        ("right\u202eleft", "right left"),
    ],
)
def test_markup_of_others_is_words(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(st.text())
def test_every_text_is_one_line_without_anything_alive_and_reads_as_it_was(text: str) -> None:
    shown = plain(text)
    post = {"message": shown, "props": {}}
    assert Mattermost().alive_in(post) == []
    assert "\n" not in shown
    assert word_for_word(shown) == word_for_word(
        re.sub(r"\s+", " ", "".join(char if char.isprintable() else " " for char in text)).lstrip()
    )


@given(st.text(alphabet="@#~:&<*_`[]()|$\\w.-+>=1 a/"))
def test_nothing_alive_comes_of_what_is_nearly_markup(text: str) -> None:
    assert Mattermost().alive_in({"message": plain(text), "props": {}}) == []


def test_moments_are_in_utc_and_people_by_name_where_it_is_known() -> None:
    elsewhere = AT.astimezone(timezone(timedelta(hours=5)))
    text: Text = (
        "At ",
        elsewhere,
        " by ",
        PrincipalRef("mattermost:t/u"),
        " and ",
        PrincipalRef("client:a`b"),
    )
    assert (
        rendered(text, {"mattermost:t/u": "ann_b."})
        == "At 2026-11-20 15:04:05 UTC by **ann_b.** and `client:a'b`"
    )


def test_a_name_mentions_nobody() -> None:
    assert rendered((PrincipalRef("p"),), {"p": "@here *x*"}) == rf"**@{GAP}here \*x\***"


def card(**more: object) -> Card:
    made: dict[str, object] = {
        "title": "Reboot of vm-0",
        "tone": "waiting",
        "summary": ("Soon.",),
        **more,
    }
    return Card(**made)  # type: ignore[arg-type]  # each test gives the fields that it is about


def test_links_stand_in_the_text_and_other_buttons_are_actions_with_ids_of_their_own() -> None:
    link = Button(
        decision="approve",
        label="Approve",
        event_id="E",
        revision="r",
        question=("Really?",),
        url="https://relay.example.com/approve#t",
    )
    button = Button(
        decision="hold", label="Hold", event_id="E", revision="r", question=("Really?",)
    )
    made = attachments(
        card(buttons=(link,), lines=(Line(("One",), (button,)), Line(("Two",), (button,)))),
        {},
        lambda one: {"url": one.label},
    )
    assert made[0]["text"] == "Soon.\n\n**[Approve](https://relay.example.com/approve#t)**"
    assert [one["actions"] for one in made] == [
        [],
        [
            {
                "id": "hold1",
                "type": "button",
                "name": "Hold",
                "style": "default",
                "integration": {"url": "Hold"},
            }
        ],
        [
            {
                "id": "hold2",
                "type": "button",
                "name": "Hold",
                "style": "default",
                "integration": {"url": "Hold"},
            }
        ],
    ]


def test_what_is_long_is_cut_and_says_so() -> None:
    made = attachments(
        card(title="t" * 5000, facts=(("Azure says", ("d" * 50_000,)),)), {}, lambda _: {}
    )
    assert made[0]["title"] == f"{'t' * 299}…"
    assert made[0]["fields"][0]["value"] == f"{'d' * 2999}…"


@given(st.lists(st.text(max_size=3000), min_size=1, max_size=21))
def test_a_reply_is_never_longer_than_a_message_may_be(lines: list[str]) -> None:
    assert (
        len(thread_reply([(AT, ": ", PrincipalRef("client:alice"), line) for line in lines], {}))
        <= MOST_MESSAGE
    )


def test_of_twenty_long_lines_each_is_cut_and_none_left_out() -> None:
    message = thread_reply([(AT, f": {number} ", "*" * 1000) for number in range(21)], {})
    assert len(message) <= MOST_MESSAGE
    assert len(message.splitlines()) == 21
