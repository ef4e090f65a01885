"""Mattermost through the whole relay: one post per event, which the REST API keeps current."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.simulator import VM, Setup, Simulator
from tests.chat.mattermost_relay import IN_CHAT
from tests.chat.mattermost_server import (
    PUBLIC_URL,
    Json,
    MattermostServer,
    button_labels,
    post_text,
    running_mattermost,
)
from tests.chat.running_relay import ALICE, BOB, rule, stage
from tests.eventually import eventually

GAP = "\N{ZERO WIDTH SPACE}"
TWO_CLIENTS = {"rules": [rule(2, "client:alice", "client:bob")]}


@pytest.fixture
async def server() -> AsyncIterator[MattermostServer]:
    async with running_mattermost() as server:
        yield server


@pytest.fixture
async def azure() -> AsyncIterator[Simulator]:
    """Run an Azure that outlives the relay."""
    async with Simulator(Setup(vms=(VM("vm-0"),))) as simulator:
        yield simulator


async def first_post(server: MattermostServer) -> Json:
    """Wait for the first post in the channel."""
    await eventually(lambda: bool(server.channel_posts))
    return server.channel_posts[0]


async def test_an_event_is_one_post_that_is_edited_and_whose_thread_tells_its_history(
    tmp_path: Path, server: MattermostServer
) -> None:
    async with stage(tmp_path, [server.sink_section()], approvals=TWO_CLIENTS) as relay:
        event = relay.reboot("vm-0", "vm-1")
        post = await first_post(server)
        assert "Reboot of vm-0, vm-1" in post_text(post)
        assert "Votes: 0 of 2; 2 missing, from `client:alice`, `client:bob`" in post_text(post)
        assert await relay.approve(event, client=ALICE) == 202
        await eventually(lambda: "Votes: 1 of 2: `client:alice`" in post_text(post))
        assert await relay.approve(event, client=BOB) == 202
        await eventually(lambda: relay.starts(event) == 1)
        await eventually(lambda: "Azure has begun." in post_text(post))
        relay.azure.end(event.event_id)
        await eventually(lambda: "It is over: Azure has completed it." in post_text(post))
        await eventually(lambda: any("It is over" in line for line in server.thread_lines(post)))
    assert server.channel_posts == [post]
    assert [line.partition("UTC: ")[2] for line in server.thread_lines(post)] == [
        "`client:alice` voted to approve, 1 of 2.",
        "`client:bob` voted to approve, 2 of 2.",
        "Approved by rule reboots: 2 of 2 votes.",
        "Azure accepted the StartRequest.",
        "Azure began, as this relay had approved.",
        "It is over: Azure has completed it.",
    ]


async def test_without_approve_in_chat_a_post_has_links_and_the_code_that_the_page_asks_for(
    tmp_path: Path, server: MattermostServer
) -> None:
    """The links are in the text, because Mattermost's buttons open no pages."""
    async with stage(tmp_path, [server.sink_section()], approvals=TWO_CLIENTS) as relay:
        relay.reboot()
        post = await first_post(server)
    assert button_labels(post) == []
    text = post["props"]["attachments"][0]["text"]
    link = rf"\({PUBLIC_URL}/approve#[\w-]+\)"
    assert re.search(rf"\*\*\[Approve\]{link}\*\* · \*\*\[Hold\]{link}\*\*", text)
    assert re.search(r"The page asks for this code: \*\*\d{6}\*\*", text)


async def test_times_say_that_they_are_in_utc(tmp_path: Path, server: MattermostServer) -> None:
    async with stage(tmp_path, [server.sink_section()], approvals=TWO_CLIENTS) as relay:
        event = relay.reboot()
        post = await first_post(server)
    not_before = f"{event.not_before:%Y-%m-%d %H:%M:%S} UTC"
    assert f"Azure begins at {not_before} or soon after" in post_text(post)


async def test_fifty_events_at_once_share_one_post(
    tmp_path: Path, server: MattermostServer, azure: Simulator
) -> None:
    section = server.sink_section(**IN_CHAT)
    async with stage(tmp_path, [section], approvals=TWO_CLIENTS, azure=azure) as relay:
        events = [relay.reboot(f"db-{number}") for number in range(50)]
        post = await first_post(server)
        await eventually(lambda: "50 maintenance events at once" in post_text(post))
        assert len(post["props"]["attachments"]) == 11
        assert "And 40 more" in post_text(post)
        assert button_labels(post) == ["Approve", "Hold"] * 10
        for event in events:
            azure.cancel(event.event_id)
        await eventually(lambda: button_labels(post) == [])
    assert server.channel_posts == [post]
    assert sum(call == ("POST", "posts") for call in server.calls) <= 6


async def test_a_server_that_was_down_gets_the_latest_state_and_no_flood(
    tmp_path: Path, server: MattermostServer
) -> None:
    async with stage(tmp_path, [server.sink_section()], approvals=TWO_CLIENTS) as relay:
        dispatcher = relay.running.relay.dispatcher
        await server.stop()
        event = relay.reboot()
        await eventually(lambda: bool(dispatcher.status()[0].tries[("deferred", None)]))
        for _ in range(3):
            assert await relay.approve(event, "hold") == 202
            assert await relay.approve(event, "release") == 202
        assert await relay.approve(event) == 202
        await server.start()
        post = await first_post(server)
        await eventually(lambda: len(server.thread_lines(post)) == 7)
        await relay.settle()
    assert "Votes: 1 of 2: `client:alice`" in post_text(post)
    assert len(server.posts) == 2  # the message, and one reply with the whole history


async def test_a_deleted_post_is_posted_again(tmp_path: Path, server: MattermostServer) -> None:
    """Mattermost answers 403 to an edit of a deleted post, and 404 when the relay asks for it."""
    async with stage(tmp_path, [server.sink_section()], approvals=TWO_CLIENTS) as relay:
        event = relay.reboot()
        server.delete_post(await first_post(server))
        assert await relay.approve(event) == 202
        await eventually(lambda: bool(server.channel_posts))
        post = server.channel_posts[0]
        await eventually(lambda: len(server.thread_lines(post)) == 1)
    assert "Votes: 1 of 2: `client:alice`" in post_text(post)


async def test_people_are_shown_by_name_and_nobody_is_mentioned(
    tmp_path: Path, server: MattermostServer
) -> None:
    carol = server.principal(server.add_user("carol_x"))
    unknown = server.principal("z" * 26)
    approvals = {
        "rules": [rule(1, carol, unknown, "group:dbas")],
        "groups": {"dbas": ["client:alice"]},
    }
    async with stage(tmp_path, [server.sink_section()], approvals=approvals) as relay:
        relay.reboot()
        post = await first_post(server)
    text = post_text(post)
    assert "missing, from `client:alice`, " in text
    assert "**carol_x**" in text
    assert f"`{unknown}`" in text
    assert "@" not in text


async def test_texts_of_others_mention_nobody_and_are_not_formatted(
    tmp_path: Path, server: MattermostServer
) -> None:
    """Neither Azure's description nor a person's reason adds mentions, links or markup."""
    hostile = (
        "@channel @all ~town-square #incident [click](https://evil.example) **bold** `x` "
        "https://evil.example :tada: &#64;here"
    )
    async with stage(tmp_path, [server.sink_section()], approvals=TWO_CLIENTS) as relay:
        event = relay.reboot(description=hostile)
        post = await first_post(server)
        body = {
            "eventId": event.event_id,
            "decision": "hold",
            "revision": (await relay.event(event))["revision"],
            "reason": hostile,
        }
        async with relay.web.post(
            f"{relay.url}/v1/approvals",
            json=body,
            headers={"Authorization": f"Bearer {ALICE['key']}"},
        ) as response:
            assert response.status == 202
        await eventually(lambda: bool(server.thread_lines(post)))
    fields = [field["value"] for field in post["props"]["attachments"][0]["fields"]]
    for text in (server.replies[0]["message"], *fields):
        assert not re.search(
            r"@(?:channel|all|here)|~town|#incident|https:/|:tada:|&#64"
            r"|(?<!\\)\[click|(?<!\\)\*\*bold",
            text,
        )
    assert any(f"@{GAP}channel" in text for text in fields)
