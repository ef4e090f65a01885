"""A card as a post of Mattermost: only the relay's own markup has an effect."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

from hypothesis import example, given
from hypothesis import strategies as st

from relay.chat.cards.card import Button, Card, EventLine
from relay.chat.platforms.mattermost.posts import (
    MAX_MESSAGE_LENGTH,
    attachments,
    render_markdown,
    thread_message,
)
from relay.sentences import PrincipalRef, Text
from tests.chat.mattermost_server import active_markup, displayed_text

GAP = "\N{ZERO WIDTH SPACE}"
TIME = datetime(2026, 11, 20, 15, 4, 5, tzinfo=UTC)


def test_markup_of_others_is_shown_literally() -> None:
    for text, escaped in (
        ("@channel", f"@{GAP}channel"),
        ("#incident", f"#{GAP}incident"),
        ("~town-square", f"~{GAP}town-square"),
        (":tada:", f":{GAP}tada:"),
        ("https://evil.example/x", f"https:{GAP}//evil.{GAP}example/x"),
        ("www.evil.example", f"www{GAP}.evil.example"),
        ("&#64;all", f"&{GAP}#{GAP}64;all"),
        ("<https://evil>", f"<{GAP}https:{GAP}//evil>"),
        ("![image](x)", r"!\[image\](x)"),
        ("*a* _b_ `c` |d| $e$", r"\*a\* \_b\_ \`c\` \|d\| \$e\$"),
        ("~~gone~~", f"~{GAP}~{GAP}gone~{GAP}~{GAP}"),
        ("db_main_01 set00000i", "db_main_01 set00000i"),
        ("1. item", f"{GAP}1. item"),
        ("> quote", f"{GAP}> quote"),
        ("a\n\n# b\r\n    code", f"a #{GAP} b code"),
        ("right\u202eleft", "right left"),
    ):
        assert render_markdown((text,), {}) == escaped


@given(st.text() | st.text("@#~:&<*_`[]()|$\\w.-+>=1 a/"))
@example("&; &#64; &amp;")
def test_every_text_is_shown_literally_on_one_line(text: str) -> None:
    shown = render_markdown((text,), {})
    assert active_markup({"message": shown, "props": {}}) == []
    assert "\n" not in shown
    printable = "".join(char if char.isprintable() else " " for char in text)
    assert displayed_text(shown) == displayed_text(re.sub(r"\s+", " ", printable).strip())


def test_times_are_in_utc_and_people_have_names_where_they_are_known() -> None:
    text: Text = (
        "At ",
        TIME.astimezone(timezone(timedelta(hours=5))),
        " by ",
        PrincipalRef("mattermost:t/u"),
        " and ",
        PrincipalRef("client:a`b"),
    )
    rendered = render_markdown(text, {"mattermost:t/u": "ann_b. @here *x*"})
    time = "2026-11-20 15:04:05 UTC"
    assert rendered == rf"At {time} by **ann_b. @{GAP}here \*x\*** and `client:a'b`"


def card(**fields: object) -> Card:
    defaults = {"title": "Reboot of vm-0", "tone": "waiting", "summary": ("Soon.",)}
    return Card(**{**defaults, **fields})  # type: ignore[arg-type]  # each test gives its fields


def test_links_are_in_the_text_and_the_ids_of_other_buttons_are_unique() -> None:
    link = Button(
        decision="approve",
        label="Approve",
        event_id="E",
        revision="r",
        question=("Really?",),
        url="https://relay.example.com/#/event/s/E-1/approve/r",
    )
    button = Button(decision="hold", label="Hold", event_id="E", revision="r", question=("So?",))
    grouped = card(
        buttons=(link,), lines=(EventLine(("One",), (button,)), EventLine(("Two",), (button,)))
    )
    main, *lines = attachments(grouped, {}, lambda button: {"url": button.label})
    assert (
        main["text"] == "Soon.\n\n**[Approve](https://relay.example.com/#/event/s/E-1/approve/r)**"
    )
    assert main["actions"] == []
    action = {"type": "button", "name": "Hold", "style": "default", "integration": {"url": "Hold"}}
    ids = [[{"id": f"hold{number}", **action}] for number in (1, 2)]
    assert [line["actions"] for line in lines] == ids


def test_long_texts_are_cut_and_keep_their_end() -> None:
    long = card(title=f"{'t' * 5000} end", facts=(("Azure says", (f"{'d' * 50_000} end",)),))
    (main,) = attachments(long, {}, lambda _: {})
    for text, length in ((main["title"], 300), (main["fields"][0]["value"], 3000)):
        assert len(text) == length
        assert "…" in text
        assert text.endswith(" end")


@given(st.lists(st.text() | st.just("- item") | st.just("1. x"), min_size=1, max_size=3))
def test_no_text_begins_a_list_a_quote_or_a_heading(words: list[str]) -> None:
    rendered = render_markdown(tuple(words), {})
    assert not re.match(r"[-+>=#]|\d{1,9}[.)]", rendered.replace(f"#{GAP}", ""))
    assert active_markup({"message": rendered, "props": {}}) == []


def test_twenty_long_lines_are_cut_and_all_of_them_are_in_the_reply() -> None:
    message = thread_message([(TIME, f": {number} ", "*" * 1000) for number in range(21)], {})
    assert len(message) <= MAX_MESSAGE_LENGTH
    assert len(message.splitlines()) == 21
