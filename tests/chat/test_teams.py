"""Teams: what a workflow's answers mean, and cards that are complete, without markup, and small."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from relay.chat.cards import event_card, grouped_card
from relay.chat.cards.card import Buttons, Card
from relay.chat.platforms import teams
from relay.chat.platforms.teams import (
    Settings,
    WorkflowWebhook,
    card_message,
    escape_markdown,
    follow_up_message,
    format_time,
    render_markdown,
)
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.net.http import open_session
from relay.sentences import PrincipalRef
from tests.approvals.builders import build_decision, build_event, build_status
from tests.chat.teams_server import (
    PATH,
    QUERY,
    SIGNATURE,
    State,
    TeamsWorkflow,
    card_actions,
    displayed_text,
    running_workflow,
    schema_errors,
)
from tests.clocks import NOON


def settings(url: str) -> Settings:
    section = {"kind": "teams", "name": "ops", "url": url, "allow_http": True}
    return Settings.model_validate(section)


@asynccontextmanager
async def webhook(url: str) -> AsyncIterator[WorkflowWebhook]:
    async with open_session() as session:
        yield WorkflowWebhook(settings(url), SystemClock(), session)


@pytest.fixture
async def workflow() -> AsyncIterator[TeamsWorkflow]:
    async with running_workflow() as workflow:
        yield workflow


async def post_error(workflow: TeamsWorkflow, url: str | None = None) -> Deferred:
    """Return the error of a post to the workflow's URL, or to another."""
    async with webhook(url or workflow.url) as platform:
        with pytest.raises(Deferred) as caught:
            await platform.reply_in_thread(None, [("hello",)])
    return caught.value


# --- errors


@pytest.mark.parametrize(
    ("state", "failure", "status", "remedy"),
    [
        ("off", "slow", 400, "turn it on in the Workflows app"),
        ("deleted", "slow", 400, "Send webhook alerts to a channel"),
        ("forbidding", "slow", 401, "copy all of it again"),
        ("gone", "disabled", 410, "imds-relay sink resume"),
        ("busy", "transient", 429, ""),
        ("broken", "transient", 502, ""),
        ("redirecting", "slow", 302, "redirects are not followed"),
    ],
)
async def test_an_error_names_its_remedy_and_no_secret(
    state: State, failure: str, status: int, remedy: str, workflow: TeamsWorkflow
) -> None:
    workflow.state = state
    error = await post_error(workflow)
    assert (error.failure, error.status) == (failure, status)
    assert remedy in error.reason
    assert workflow.refused_calls == 1  # a redirect is not followed
    for text in (error.reason, error.answer or ""):
        assert SIGNATURE not in text
        assert PATH not in text


async def test_a_wrong_url_is_explained(workflow: TeamsWorkflow) -> None:
    for path_and_query, reason in (
        (f"/workflows/other{QUERY}", "there is no such workflow"),
        (f"{PATH}?api-version=1", "to the end of sig="),
        (f"{PATH}{QUERY[:-3]}", "to the end of sig="),
    ):
        error = await post_error(workflow, f"http://127.0.0.1:{workflow.port}{path_and_query}")
        assert reason in error.reason


async def test_retry_after_is_passed_on(workflow: TeamsWorkflow) -> None:
    workflow.retry_after = "17"
    for workflow.state in ("busy", "forbidding"):
        assert (await post_error(workflow)).after == 17.0


async def test_the_url_reaches_the_workflow_unchanged(workflow: TeamsWorkflow) -> None:
    """Its parts are signed, so %2F must not become a slash."""
    async with webhook(workflow.url) as platform:
        await platform.reply_in_thread(None, [("hello",)])
    assert workflow.card_texts == ["hello"]
    assert str(settings(workflow.url).webhook_url()) == workflow.url


# --- configuration


def test_the_urls_of_microsoft_and_of_proxies_are_accepted() -> None:
    for host in (
        "prod-01.westeurope.logic.azure.com",
        "default0f3c.1a.environment.api.powerplatform.com",
        "teams.proxy.example",
    ):
        accepted = settings(f"https://{host}:443{PATH}{QUERY}")
        assert accepted.webhook_url().host == host
        assert SIGNATURE not in repr(accepted)


async def test_doctor_connects_to_the_workflow_and_posts_nothing(workflow: TeamsWorkflow) -> None:
    (finding,) = await teams.diagnose(settings(workflow.url), SystemClock(), "prod")
    assert finding.state == "ok"
    assert workflow.calls == []


HOSTILE_TEXT = (
    "<at>everyone</at> @all [click](https://evil.example) **Approved** _by_ `rule` "
    "{{DATE(2026-01-01T00:00:00Z)}} www.evil.example ~~not~~"
)
GAP = "\N{ZERO WIDTH SPACE}"


BUTTONS = Buttons(public_url="https://relay.example.com")


def adaptive_card(card: Card) -> dict[str, Any]:
    message = card_message(card)
    assert message["type"] == "message"
    (attachment,) = message["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    content: dict[str, Any] = attachment["content"]
    assert list(schema_errors(content)) == []
    return content


def workflow_after(message: dict[str, Any]) -> TeamsWorkflow:
    workflow = TeamsWorkflow()
    workflow.run(message)
    return workflow


def test_the_tone_has_a_style_and_buttons_open_the_page_in_that_of_their_decision() -> None:
    content = adaptive_card(event_card(build_status(), BUTTONS))
    assert content["body"][0]["style"] == "warning"
    page = "https://relay.example.com/#/event/prod/E-1"
    opens, revision = {"type": "Action.OpenUrl"}, build_event().revision
    assert card_actions(content) == [
        {**opens, "title": "Approve", "style": "positive", "url": f"{page}/approve/{revision}"},
        {**opens, "title": "Hold", "style": "destructive", "url": f"{page}/hold/{revision}"},
    ]


def test_a_time_has_the_notation_that_clients_convert() -> None:
    """Whole seconds and Z, capitals, and no blanks inside the braces."""
    moment, timestamp = datetime(2026, 2, 14, 6, 8, 0, 999_999, tzinfo=UTC), "2026-02-14T06:08:00Z"
    for time in (moment, moment.astimezone(timezone(timedelta(hours=1)))):
        assert format_time(time) == f"{{{{DATE({timestamp}, SHORT)}}}} {{{{TIME({timestamp})}}}}"


def test_times_are_in_text_blocks_only() -> None:
    """Only a TextBlock is documented to show times in the reader's time zone."""
    held = build_status(None, build_decision("hold", expires=600))
    card = adaptive_card(event_card(held, BUTTONS))
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
@example(HOSTILE_TEXT)
@example("# a heading")
@example("1. a list")
@example("- a list")
@example("MailTo:a@b.example")
def test_escaped_words_are_only_text(words: str) -> None:
    """The oracle is a CommonMark parser."""
    markdown = render_markdown((words,), 1000)
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough")
    types = {
        token.type for block in parser.parse(markdown) for token in (block, *(block.children or ()))
    }
    assert types <= {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}
    assert "{{" not in markdown
    assert "://" not in markdown
    assert "@" not in markdown.rstrip("@").replace(f"@{GAP}", "").replace("@ ", "")
    assert "\n" not in markdown
    assert "mailto:" not in markdown.lower()


@given(st.text("ab*_[]`~\\@<{:/w.", max_size=60))
def test_escapes_are_invisible(words: str) -> None:
    assert displayed_text(escape_markdown(words)) == words


def test_a_grouped_card_fits_with_all_its_buttons() -> None:
    letter, statuses = "\N{PILE OF POO}", []
    for number in range(50):
        names = tuple(f"{letter * 60}-{number}-{machine}" for machine in range(100))
        status = build_status(build_event(f"E-{number}", resources=names))
        statuses.append(replace(status, occurrence=replace(status.occurrence, id=number)))
    card = grouped_card(statuses, Buttons(public_url=f"https://{'r' * 160}.example.com"))
    workflow = workflow_after(card_message(card))
    assert workflow.failed_runs == []
    assert len(card_actions(workflow.cards[0])) == 20
    assert "50 maintenance events at once" in workflow.card_texts[0]
    assert "And 40 more" in workflow.card_texts[0]


@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=2000), min_size=1, max_size=22
    )
)
def test_every_follow_up_fits(lines: list[str]) -> None:
    workflow = workflow_after(follow_up_message([(line,) for line in lines]))
    assert [error for error in workflow.failed_runs if "empty" not in error] == []


def test_the_first_line_of_a_follow_up_is_its_heading() -> None:
    heading = "Reboot of db-1 (C7061BAC)"
    line = NOON, ": ", PrincipalRef("client:alice"), " voted to approve, 1 of 2."
    workflow = workflow_after(follow_up_message([(heading,), line]))
    (text,) = workflow.card_texts
    assert text == f"{heading}\n{NOON:%Y-%m-%d %H:%M}: client:alice voted to approve, 1 of 2."
    assert workflow.cards[0]["body"][0]["weight"] == "Bolder"
