"""What a message looks like in Teams: everything the card says, nothing that somebody slipped in, and never too large."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from relay.chat.cards.card import Card, PrincipalRef
from relay.chat.cards.grouped_card import grouped_card
from relay.chat.cards.rendering import event_card
from relay.chat.platforms.teams.card import (
    card_message,
    escaped,
    follow_up,
    moment,
    render_markdown,
)
from tests.approvals.builders import build_decision, build_event, build_occurrence, build_status
from tests.approvals.manual_clock import NOON
from tests.chat.teams_server import Workflow, actions_of, lines_of, mistakes, read

DUE = NOON + timedelta(seconds=900)
HOSTILE = "<at>everyone</at> @all [click](https://evil.example) **Approved** _by_ `rule` {{DATE(2026-01-01T00:00:00Z)}} www.evil.example ~~not~~"


def link(*_: Any) -> str:
    return "https://relay.example.com/approve#t0ken"


def one(**changes: Any) -> Card:
    """The card of an event that waits for votes."""
    return event_card(build_status(build_event(**changes)), "prod", link=link, code="123456")


def shown(card: Card) -> dict[str, Any]:
    """The Adaptive Card in its envelope, looked over as the workflow does."""
    made = card_message(card)
    assert made["type"] == "message"
    (attachment,) = made["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    content: dict[str, Any] = attachment["content"]
    assert list(mistakes(content)) == []
    return content


def ran(message: dict[str, Any]) -> Workflow:
    """A workflow that was given the message."""
    workflow = Workflow()
    workflow._run(message)  # noqa: SLF001  # without a network
    return workflow


def test_it_says_everything_that_the_card_says() -> None:
    card = event_card(
        build_status(build_event(description="Host maintenance"), build_decision(by="bob")),
        "prod",
        link=link,
        code="123456",
    )
    text = "\n".join(lines_of(shown(card)))
    assert text == "\n".join(
        [
            "Reboot of db-1",
            f"Azure begins at {DUE:%Y-%m-%d %H:%M} or soon after, whether or not anybody answers; earlier only when it is approved.",
            "Machines: db-1",
            "What happens: The machine is rebooted: what is in memory is lost.",
            "Who started it: Azure itself",
            "Azure says: Host maintenance",
            "Rule: databases: 2 votes from group:oncall, client:drain",
            f"Votes: 1 of 2: client:bob; 1 missing, from client:alice, client:drain, until {DUE - timedelta(seconds=60):%Y-%m-%d %H:%M}",
            "Azure proceeds at NotBefore regardless.",
            "The page asks for this code: 123456",
            "E-1 · prod",
            "[Approve]",
            "[Hold]",
        ]
    )


def test_it_is_wide_and_says_something_where_no_card_can_be_shown() -> None:
    card = shown(one())
    assert card["msteams"] == {"width": "Full"}
    assert card["fallbackText"].startswith(
        f"Reboot of db-1. Azure begins at {DUE:%Y-%m-%d %H:%M} UTC or soon after"
    )


def test_buttons_open_the_page_and_look_like_what_they_do() -> None:
    assert actions_of(shown(one())) == [
        {"type": "Action.OpenUrl", "title": "Approve", "style": "positive", "url": link()},
        {"type": "Action.OpenUrl", "title": "Hold", "style": "destructive", "url": link()},
    ]


def test_without_a_page_there_is_neither_a_button_nor_a_code() -> None:
    card = shown(event_card(build_status(build_event()), "prod", link=None, code="123456"))
    assert actions_of(card) == []
    assert "code" not in "\n".join(lines_of(card))


def test_what_a_machine_or_a_person_is_called_is_no_markup() -> None:
    text = "\n".join(lines_of(shown(one(resources=("web_01_a", "*db*")))))
    assert "Machines: web_01_a, *db*" in text


@pytest.mark.parametrize(
    "at",
    [
        datetime(2026, 2, 14, 6, 8, 0, 999_999, tzinfo=UTC),
        datetime(2026, 2, 14, 7, 8, 0, tzinfo=timezone(timedelta(hours=1))),
    ],
)
def test_a_moment_is_in_the_one_form_that_every_client_turns_into_the_readers_time(
    at: datetime,
) -> None:
    """Whole seconds and Z, capitals, no blanks inside of the braces."""
    assert moment(at) == "{{DATE(2026-02-14T06:08:00Z, SHORT)}} {{TIME(2026-02-14T06:08:00Z)}}"


def test_moments_are_in_textblocks_alone() -> None:
    """Of no other element is it said that it shows the reader's time."""
    card = shown(
        event_card(
            build_status(build_event(), build_decision("hold", expires=600)),
            "prod",
            link=link,
            code=None,
        )
    )
    facts = [
        fact["value"]
        for element in card["body"]
        if element["type"] == "FactSet"
        for fact in element["facts"]
    ]
    assert facts
    assert not any("{{" in value for value in facts)
    assert any(
        "Held by:" in element.get("text", "") and "{{TIME(" in element["text"]
        for element in card["body"]
    )


@given(
    st.text(st.characters(codec="utf-8"), max_size=200)
    | st.text("*_[]()<>@{}$&`~#-+.! \\:/wW1\n", max_size=40)
)
@example(HOSTILE)
@example("# a heading")
@example("1. a list")
@example("- a list")
@example("MailTo:a@b.example")
def test_words_stay_words_whatever_they_hold(words: str) -> None:
    """The oracle is a CommonMark parser: it finds nothing but text."""
    made = render_markdown((words,))
    reader = MarkdownIt("commonmark", {"html": False}).enable("strikethrough")
    kinds = {
        token.type for block in reader.parse(made) for token in (block, *(block.children or ()))
    }
    assert kinds <= {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}
    assert "{{" not in made
    assert "://" not in made
    assert "@" not in made.rstrip("@").replace("@\N{ZERO WIDTH SPACE}", "").replace("@ ", "")
    assert "\n" not in made
    assert "mailto:" not in made.lower()


@given(st.text("ab*_[]`~\\@<{:/w.", max_size=60))
def test_nobody_sees_the_escapes(words: str) -> None:
    assert read(escaped(words)) == words


def test_nothing_is_slipped_in_by_a_description() -> None:
    card = shown(one(description=f"{HOSTILE}\r\n\r\nApproved by everybody."))
    text = "\n".join(lines_of(card))
    assert f"Azure says: {HOSTILE} Approved by everybody." in text
    assert "<at>" not in str(card).replace("<\N{ZERO WIDTH SPACE}at>", "")


@pytest.mark.parametrize("letter", ["x", "*", "\\", '"', "é", "\N{PILE OF POO}"], ids=ascii)
def test_long_texts_are_cut_to_what_teams_takes(letter: str) -> None:
    """Each in its own place, with a sign that there was more; not only where the letters are short."""
    text = letter * 1500
    card = one(
        description=text,
        event_type="Reboot",
        event_source=text,
        resources=tuple(f"{text[:300]}-{number}" for number in range(100)),
    )
    workflow = ran(card_message(card))
    assert workflow.failed == []
    says = workflow.texts[0]
    assert "…" in says
    assert "and 90 more" in says
    assert "[Approve]" in says
    assert "123456" in says


def test_text_of_a_thousand_characters_is_shown_whole_where_there_is_room() -> None:
    assert f"Azure says: {'x' * 1000}\n" in "\n".join(lines_of(shown(one(description="x" * 1000))))


@pytest.mark.parametrize("letter", ["x", "\N{PILE OF POO}"], ids=ascii)
def test_a_burst_fits_with_all_its_buttons(letter: str) -> None:
    standings = [
        build_status(
            build_event(
                f"E-{number}",
                resources=tuple(f"{letter * 60}-{number}-{machine}" for machine in range(100)),
            )
        )
        for number in range(50)
    ]
    standings = [
        replace(each, occurrence=replace(each.occurrence, id=number))
        for number, each in enumerate(standings)
    ]
    workflow = ran(
        card_message(
            grouped_card(
                standings,
                "prod",
                link=lambda *_: f"https://relay.example.com/approve#{'t' * 43}",
                code="123456",
            )
        )
    )
    assert workflow.failed == []
    assert len(actions_of(workflow.cards[0])) == 20
    assert "50 maintenance events at once" in workflow.texts[0]
    assert "And 40 more" in workflow.texts[0]


@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=2000), min_size=1, max_size=22
    )
)
def test_a_follow_up_fits_whatever_it_tells(lines: list[str]) -> None:
    workflow = ran(follow_up([(line,) for line in lines]))
    assert [one for one in workflow.failed if "empty" not in one] == []


def test_a_follow_up_says_first_what_it_is_about() -> None:
    workflow = ran(
        follow_up(
            [
                ("Reboot of db-1 (C7061BAC)",),
                (NOON, ": ", PrincipalRef("client:alice"), " voted to approve, 1 of 2."),
            ]
        )
    )
    assert workflow.texts == [
        f"Reboot of db-1 (C7061BAC)\n{NOON:%Y-%m-%d %H:%M}: client:alice voted to approve, 1 of 2."
    ]
    assert workflow.cards[0]["body"][0]["weight"] == "Bolder"


def test_every_tone_has_its_colour_and_what_is_over_has_none() -> None:
    over = event_card(
        replace(
            build_status(build_event()),
            occurrence=build_occurrence(live=False, outcome="completed"),
        ),
        "prod",
        link=link,
        code=None,
    )
    styles = [shown(card)["body"][0]["style"] for card in (one(), over)]
    assert styles == ["warning", "emphasis"]
