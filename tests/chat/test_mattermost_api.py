"""What Mattermost's refusals mean for a delivery: when it is tried again, and what a person can do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web
from yarl import URL

from relay.chat import MessageGone
from relay.chat.cards.card import Card
from relay.chat.platforms.mattermost import diagnose
from relay.chat.platforms.mattermost.api import Api
from relay.chat.platforms.mattermost.channel import Channel
from relay.chat.platforms.mattermost.identity import MemberDirectory
from relay.chat.platforms.mattermost.settings import Settings
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.net.http import open_session
from tests.approvals.manual_clock import ManualClock
from tests.chat.mattermost_server import TOKEN, Mattermost, mattermost, new_id, said
from tests.journey.relay_process import eventually

CARD = Card(title="Reboot of vm-0", tone="waiting", summary=("Soon.",))


@pytest.fixture
async def server() -> AsyncIterator[Mattermost]:
    async with mattermost() as here:
        yield here


@pytest.fixture
async def api(server: Mattermost) -> AsyncIterator[Api]:
    async with open_session() as session:
        yield Api(
            session, URL(server.url), lambda: TOKEN, server.channel, SystemClock(), timeout=30
        )


@pytest.fixture
def channel(server: Mattermost, api: Api) -> Channel:
    return Channel(api, MemberDirectory(api, server.channel, SystemClock()), None, "life")


async def refused(channel: Channel) -> Deferred:
    """Why nothing could be posted."""
    with pytest.raises(Deferred) as caught:
        await channel.post(CARD)
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (
            401,
            "api.context.session_expired.app_error",
            "make a new one for the bot account under Integrations > Bot Accounts, and set token",
        ),
        (403, "api.context.permissions.app_error", "add the bot to the channel and its team"),
        (
            404,
            "api.context.404.app_error",
            "set api_url to the server's own address, without /api/v4",
        ),
        (
            400,
            "api.context.invalid_body_param.app_error",
            "compare channel with the id in the channel's menu",
        ),
        (
            400,
            "api.post.create_post.can_not_post_to_deleted.error",
            "the channel is archived: unarchive it, or name another",
        ),
        (400, "api.post.create_post.town_square_read_only", "the channel is read-only for the bot"),
        (400, "some.new.error", "refused with 400 (some.new.error): the server's log says more"),
        (413, "api.context.request_body_too_large.app_error", "the server's log says more"),
    ],
)
async def test_what_somebody_must_mend_says_what(
    server: Mattermost, channel: Channel, status: int, code: str, remedy: str
) -> None:
    server.refusals.append(("posts", said(status, code)))
    error = await refused(channel)
    assert error.failure == "slow"
    assert error.status == status
    assert code in error.reason
    assert remedy in error.reason


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_server_in_trouble_is_tried_again(
    server: Mattermost, channel: Channel, status: int
) -> None:
    server.refusals.append(
        (
            "posts",
            web.Response(status=status, text="<html>bad gateway</html>", content_type="text/html"),
        )
    )
    assert (await refused(channel)).failure == "transient"


@pytest.mark.parametrize(
    ("headers", "after"),
    [
        ({"Retry-After": "7", "X-Ratelimit-Reset": "9"}, 7),
        ({"X-Ratelimit-Reset": "9"}, 9),
        ({"X-Ratelimit-Reset": "in ten minutes"}, 600),
        ({"X-Ratelimit-Reset": "99999999999"}, 3600),
        ({"X-Ratelimit-Reset": "1000000001"}, 0),
        ({"X-Ratelimit-Reset": "soon"}, None),
        ({}, None),
    ],
)
async def test_a_rate_limit_says_when_to_come_again(
    server: Mattermost, channel: Channel, headers: Mapping[str, str], after: float | None
) -> None:
    """Seconds in the server's own answers, a moment in its documentation: both are understood."""
    at = {
        name: text.replace("in ten minutes", str(int(time.time()) + 600))
        for name, text in headers.items()
    }
    server.refusals.append(("posts", web.Response(status=429, text="limit exceeded", headers=at)))
    error = await refused(channel)
    assert error.failure == "transient"
    assert error.after == (pytest.approx(after, abs=60) if after is not None else None)


async def test_a_page_of_a_proxy_is_no_post(server: Mattermost, channel: Channel) -> None:
    server.refusals.append(
        ("posts", web.Response(status=200, text="<html>sign in</html>", content_type="text/html"))
    )
    error = await refused(channel)
    assert error.failure == "slow"
    assert "set api_url to the server's own address" in error.reason


async def test_a_redirect_is_not_followed(server: Mattermost, channel: Channel) -> None:
    server.refusals.append(
        ("posts", web.Response(status=302, headers={"Location": f"{server.url}/api/v4/posts"}))
    )
    error = await refused(channel)
    assert "redirects are not followed" in error.reason
    assert len(server.calls) == 1


async def test_an_answer_that_came_too_late_makes_no_second_post(server: Mattermost) -> None:
    """Mattermost knows a post again by its pending_post_id."""
    async with open_session() as session:
        api = Api(
            session, URL(server.url), lambda: TOKEN, server.channel, SystemClock(), timeout=1.5
        )
        channel = Channel(api, MemberDirectory(api, server.channel, SystemClock()), None, "life")
        server.swallows = 1
        assert (await refused(channel)).failure == "transient"
        ref = await channel.post(CARD)
        assert list(server.posts) == [ref]
        server.swallows = 1
        with pytest.raises(Deferred):
            await channel.reply_in_thread(ref, [("It is over.",)])
        await channel.reply_in_thread(ref, [("It is over.",)])
        assert len(server.posts) == 2


async def test_two_sinks_that_post_the_same_have_a_post_each(server: Mattermost, api: Api) -> None:
    """The server would take the second for the first, though it were for another channel."""
    people = MemberDirectory(api, server.channel, SystemClock())
    assert await Channel(api, people, None, "one").post(CARD) != await Channel(
        api, people, None, "two"
    ).post(CARD)


async def test_of_a_deleted_post_edit_and_reply_say_that_it_is_gone(
    server: Mattermost, channel: Channel
) -> None:
    ref = await channel.post(CARD)
    server.delete(server.posts[ref])
    with pytest.raises(MessageGone):
        await channel.edit(ref, CARD)
    with pytest.raises(MessageGone):
        await channel.reply_in_thread(ref, [("x",)])


async def test_a_bot_that_was_removed_from_the_channel_does_not_think_its_post_gone(
    server: Mattermost, channel: Channel
) -> None:
    ref = await channel.post(CARD)
    del server.members[server.bot]
    with pytest.raises(Deferred, match="add the bot to the channel"):
        await channel.edit(ref, CARD)


async def test_an_edit_leaves_the_message_alone(server: Mattermost, channel: Channel) -> None:
    """So no time limit for edits applies: the stand-in has one of no time at all."""
    ref = await channel.post(CARD)
    await channel.edit(ref, Card(title="Reboot of vm-0", tone="over", summary=("It is over.",)))
    assert server.posts[ref]["props"]["attachments"][0]["text"] == "It is over."


async def test_a_token_that_cannot_be_read_any_more_is_said(server: Mattermost) -> None:
    def token() -> str:
        raise ValueError("expected a token")

    async with open_session() as session:
        api = Api(session, URL(server.url), token, server.channel, SystemClock(), timeout=30)
        with pytest.raises(Deferred, match="the token of this sink cannot be used any more"):
            await api.create({"message": "x"})


async def test_a_refusal_that_repeats_the_token_is_logged_without_it(
    server: Mattermost, channel: Channel
) -> None:
    server.mistrusts = True
    error = await refused(channel)
    assert TOKEN not in f"{error.reason}{error.response}"


async def test_names_that_cannot_be_looked_up_keep_no_post_back(
    server: Mattermost, api: Api
) -> None:
    people, principal = (
        MemberDirectory(api, server.channel, SystemClock()),
        f"mattermost:{server.team}/{server.person('ann')}",
    )
    for refusal in (
        said(500, "x"),
        said(403, "x"),
        web.Response(text="[1"),
        web.json_response({"id": "x"}),
    ):
        server.refusals.append(("users/ids", refusal))
        assert await people.names([principal]) == {}
    assert await people.names([principal, "client:alice", "mattermost:x/y"]) == {principal: "ann"}
    asked = len(server.calls)
    assert await people.names([principal]) == {principal: "ann"}
    assert len(server.calls) == asked


async def test_what_the_server_said_of_a_person_holds_for_half_a_minute(
    server: Mattermost, api: Api
) -> None:
    clock = ManualClock()
    people, ann = MemberDirectory(api, server.channel, clock), server.person("ann")
    assert await people.principal(ann) == f"mattermost:{server.team}/{ann}"
    asked = len(server.calls)
    clock.advance(29)
    assert await people.principal(ann)
    assert len(server.calls) == asked
    clock.advance(2)
    server.users[ann]["delete_at"] = 1
    with pytest.raises(Exception, match="not an active one"):
        await people.principal(ann)


def settings(server: Mattermost, tmp_path: Path, **more: object) -> Settings:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    given = {key: value for key, value in server.sink().items() if key != "token"}
    return Settings.model_validate({**given, "token_file": str(file), **more})


async def test_doctor_says_whether_the_bot_sees_the_channel(
    server: Mattermost, tmp_path: Path
) -> None:
    clock, scope = SystemClock(), "prod"
    good = settings(server, tmp_path)
    (found,) = await diagnose(good, clock, scope)
    assert (found.state, found.message) == (
        "ok",
        "Mattermost takes the token, and shows the channel to the bot",
    )
    (found,) = await diagnose(settings(server, tmp_path, channel=new_id()), clock, scope)
    assert found.state == "failed"
    server.mistrusts = True
    (found,) = await diagnose(good, clock, scope)
    assert "expected a token that Mattermost accepts" in found.message
    await server.leave()
    (found,) = await diagnose(good, clock, scope)
    assert found.state == "failed"
    await server.come()
    server.team = ""
    secret = "whsec_" + "QUFB" * 8
    (found,) = await diagnose(
        settings(server, tmp_path, approve_in_chat=True, secret=secret), clock, scope
    )
    assert "belongs to no team" in found.message
    assert server.posts == {}


async def test_a_rate_limit_of_the_server_delays_and_loses_nothing(
    server: Mattermost, channel: Channel
) -> None:
    server.rate = 1
    await channel.post(CARD)
    with pytest.raises(Deferred) as caught:
        await channel.reply_in_thread(None, [("x",)])
    assert caught.value.after == 1
    server.rate = None
    await channel.reply_in_thread(None, [("x",)])
    await eventually(lambda: len(server.posts) == 2)
    assert datetime.now(UTC) - timedelta(minutes=5) < datetime.fromtimestamp(
        server.roots[-1]["create_at"] / 1000, UTC
    )
