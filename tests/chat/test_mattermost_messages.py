"""Mattermost: what refusals mean, with what a person can do, and how cards look."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from relay.chat import MessageGone
from relay.chat.cards.card import Button, Card, EventLine
from relay.chat.platforms.mattermost import diagnose
from relay.chat.platforms.mattermost.api import MattermostApi, Settings
from relay.chat.platforms.mattermost.posts import (
    MAX_MESSAGE_LENGTH,
    Channel,
    attachments,
    render_markdown,
    thread_message,
)
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.net.http import open_session
from relay.sentences import PrincipalRef, Text
from tests.chat.mattermost_server import (
    SECRET,
    TOKEN,
    MattermostServer,
    active_markup,
    displayed_text,
    error_response,
    new_id,
)

CARD = Card(title="Reboot of vm-0", tone="waiting", summary=("Soon.",))


@asynccontextmanager
async def connected_api(server: MattermostServer, **changes: Any) -> AsyncIterator[MattermostApi]:
    """Yield the API of a sink. ``changes`` are other fields of its section."""
    settings = Settings.model_validate(server.sink_section(**changes))
    async with open_session() as session:
        yield MattermostApi(session, settings, SystemClock())


@pytest.fixture
async def api(server: MattermostServer) -> AsyncIterator[MattermostApi]:
    async with connected_api(server) as api:
        yield api


@pytest.fixture
def channel(api: MattermostApi) -> Channel:
    return Channel(api, None)


async def post_error(channel: Channel) -> Deferred:
    with pytest.raises(Deferred) as caught:
        await channel.post(CARD)
    return caught.value


@pytest.mark.parametrize(
    ("status", "error_id", "remedy"),
    [
        (401, "context.session_expired.app_error", "make a new one for the bot account under"),
        (403, "context.permissions.app_error", "add the bot to the channel and its team"),
        (404, "context.404.app_error", "set api_url to the server's own address"),
        (400, "context.invalid_body_param.app_error", "compare channel with the id"),
        (400, "post.create_post.can_not_post_to_deleted.error", "the channel is archived"),
        (400, "post.create_post.town_square_read_only", "the channel is read-only for the bot"),
        (400, "some.new.error", "refused with 400 (api.some.new.error): the server's log"),
    ],
)
async def test_a_permanent_refusal_names_a_remedy(
    server: MattermostServer, channel: Channel, status: int, error_id: str, remedy: str
) -> None:
    response = error_response(status, f"api.{error_id}", TOKEN)
    server.scripted_responses.append(("posts", response))
    error = await post_error(channel)
    assert (error.failure, error.status) == ("slow", status)
    assert error_id in error.reason
    assert remedy in error.reason
    assert TOKEN not in f"{error.reason}{error.answer}"


async def test_a_refusal_without_an_error_id_names_none(
    server: MattermostServer, channel: Channel
) -> None:
    bodies: list[Any] = [{"message": "forbidden"}, {"id": None}, {"id": 7}, {"id": "<b>"}, []]
    for body in bodies:
        server.scripted_responses.append(("posts", web.json_response(body, status=403)))
        assert "Mattermost refuses: add the bot" in (await post_error(channel)).reason


async def test_an_answer_of_no_api_is_explained(server: MattermostServer, channel: Channel) -> None:
    for status, failure, reason in (
        (503, "transient", "503"),
        (429, "transient", "429"),
        (200, "slow", "set api_url to the server's own address"),
        (302, "slow", "redirects are not followed"),
    ):
        headers = {"Location": f"{server.url}/api/v4/posts", "Retry-After": "7"}
        page = web.Response(status=status, text="<html>sign in</html>", headers=headers)
        server.scripted_responses.append(("posts", page))
        server.calls.clear()
        error = await post_error(channel)
        assert error.failure == failure
        assert reason in error.reason
        assert error.after == (None if status == 200 else 7)
        assert len(server.calls) == 1


async def test_a_repeat_after_a_lost_answer_makes_no_second_post(server: MattermostServer) -> None:
    async with connected_api(server, timeout="2s") as api:
        channel = Channel(api, None)
        server.lost_responses = 1
        assert (await post_error(channel)).failure == "transient"
        ref = await channel.post(CARD)
        assert list(server.posts) == [ref]
        server.lost_responses = 1
        with pytest.raises(Deferred):
            await channel.reply_in_thread(ref, [("It is over.",)])
        await channel.reply_in_thread(ref, [("It is over.",)])
        assert len(server.posts) == 2


async def test_a_post_whose_answer_is_long_is_made_once(
    server: MattermostServer, channel: Channel
) -> None:
    """The server repeats the post, and only the start of an answer is read."""
    ref = await channel.post(CARD)
    await channel.reply_in_thread(ref, [("\N{PILE OF POO}" * 800,)] * 20)
    assert len(server.replies) == 1
    await channel.edit(ref, replace(CARD, notes=(("\N{PILE OF POO}" * 3000,),) * 3))


async def test_two_sinks_with_the_same_content_have_a_post_each(
    server: MattermostServer, api: MattermostApi
) -> None:
    """The server compares the ids of pending posts across channels."""
    async with connected_api(server) as other:
        first_ref = await Channel(api, None).post(CARD)
        assert await Channel(other, None).post(CARD) != first_ref


async def test_a_deleted_post_is_reported(server: MattermostServer, channel: Channel) -> None:
    ref = await channel.post(CARD)
    server.delete_post(server.posts[ref])
    with pytest.raises(MessageGone):
        await channel.edit(ref, CARD)
    with pytest.raises(MessageGone):
        await channel.reply_in_thread(ref, [("x",)])


async def test_a_bot_that_left_the_channel_does_not_take_its_post_for_deleted(
    server: MattermostServer, channel: Channel
) -> None:
    ref = await channel.post(CARD)
    del server.members[server.bot_id]
    with pytest.raises(Deferred, match="add the bot to the channel"):
        await channel.edit(ref, CARD)


async def test_an_edit_leaves_the_message_field(server: MattermostServer, channel: Channel) -> None:
    """So no time limit for edits applies. The stand-in allows edits of the message for 0 s."""
    ref = await channel.post(CARD)
    await channel.edit(ref, Card(title="Reboot of vm-0", tone="over", summary=("It is over.",)))
    assert server.posts[ref]["props"]["attachments"][0]["text"] == "It is over."


async def test_people_are_shown_by_name_and_no_post_fails_without_it(
    server: MattermostServer, channel: Channel
) -> None:
    ann = server.principal(server.add_user("ann"))
    people = tuple(PrincipalRef(each) for each in (ann, "client:alice", "mattermost:x/y"))
    for response in (
        error_response(500, "x"),
        error_response(403, "x"),
        web.Response(text="[1"),
        web.json_response({"id": "x"}),
    ):
        server.scripted_responses.append(("users/ids", response))
        ref = await channel.post(replace(CARD, title=new_id(), summary=people))
        assert f"`{ann}`" in server.posts[ref]["props"]["attachments"][0]["text"]
    ref = await channel.post(replace(CARD, summary=people))
    assert server.posts[ref]["props"]["attachments"][0]["text"].startswith("**ann**")


async def test_a_hundred_people_are_shown_by_name(
    server: MattermostServer, channel: Channel
) -> None:
    """A server gives a kilobyte about each of them in one answer."""
    people = [server.add_user(f"p{number}", props={"x": "x" * 1000}) for number in range(100)]
    summary = tuple(PrincipalRef(server.principal(each)) for each in people)
    ref = await channel.post(replace(CARD, summary=summary))
    assert server.posts[ref]["props"]["attachments"][0]["text"].count("**p") == 100


def make_settings(server: MattermostServer, directory: Path, **changes: Any) -> Settings:
    token_file = directory / "token"
    token_file.write_text(TOKEN)
    section = server.sink_section(token=None, token_file=str(token_file), **changes)
    return Settings.model_validate(section)


async def test_doctor_says_whether_the_bot_sees_the_channel(
    server: MattermostServer, tmp_path: Path
) -> None:
    clock, scope = SystemClock(), "prod"
    settings = make_settings(server, tmp_path)
    (finding,) = await diagnose(settings, clock, scope)
    assert (finding.state, finding.said) == (
        "ok",
        "Mattermost accepts the token and shows the channel to the bot",
    )
    (finding,) = await diagnose(make_settings(server, tmp_path, channel=new_id()), clock, scope)
    assert finding.state == "failed"
    server.rejects_tokens = True
    (finding,) = await diagnose(settings, clock, scope)
    assert "expected a token that Mattermost accepts" in finding.said
    server.is_down = True
    (finding,) = await diagnose(settings, clock, scope)
    assert finding.state == "failed"
    server.is_down = server.rejects_tokens = False
    server.team_id = ""
    in_chat = make_settings(server, tmp_path, approve_in_chat=True, secret=SECRET)
    (finding,) = await diagnose(in_chat, clock, scope)
    assert "belongs to no team" in finding.said
    assert server.posts == {}


# --- cards


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
