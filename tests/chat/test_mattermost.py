"""Mattermost, outward: one post per event, kept current over the REST API, through the whole relay."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relay.simulator import VM, Setup, Simulator
from tests.chat.mattermost_server import PUBLIC, SECRET, Mattermost, mattermost
from tests.chat.running_relay import ALICE, BOB, rule, stage
from tests.journey.relay_process import eventually

GAP = "\N{ZERO WIDTH SPACE}"
IN_CHAT = {"approve_in_chat": True, "secret": SECRET}
TWO_CLIENTS = {"rules": [rule(2, "client:alice", "client:bob")]}


@pytest.fixture
async def server() -> AsyncIterator[Mattermost]:
    async with mattermost() as here:
        yield here


@pytest.fixture
async def azure() -> AsyncIterator[Simulator]:
    """An Azure that outlives the relay."""
    async with Simulator(Setup(vms=(VM("vm-0"),))) as here:
        yield here


def texts(post: dict[str, Any]) -> str:
    """All that a post says, without the gaps that keep words from being markup."""
    said = [post["message"]]
    for one in post["props"].get("attachments", []):
        said += [one.get("title", ""), one.get("text", ""), one.get("footer", "")]
        said += [f"{field['title']}: {field['value']}" for field in one.get("fields", [])]
    return "\n".join(said).replace(GAP, "")


def labels(post: dict[str, Any]) -> list[str]:
    return [
        one["name"] for attachment in post["props"]["attachments"] for one in attachment["actions"]
    ]


async def first(server: Mattermost) -> dict[str, Any]:
    """The first post in the channel."""
    await eventually(lambda: bool(server.roots))
    return server.roots[0]


async def test_an_event_is_one_post_that_is_edited_and_whose_thread_tells_its_history(
    tmp_path: Path, server: Mattermost
) -> None:
    async with stage(tmp_path, [server.sink()], approvals=TWO_CLIENTS) as here:
        event = here.reboot("vm-0", "vm-1")
        post = await first(server)
        assert "Reboot of vm-0, vm-1" in texts(post)
        assert "Votes: 0 of 2; 2 missing, from `client:alice`, `client:bob`" in texts(post)
        assert await here.approve(event, client=ALICE) == 202
        await eventually(lambda: "Votes: 1 of 2: `client:alice`" in texts(post))
        assert await here.approve(event, client=BOB) == 202
        await eventually(lambda: here.starts(event) == 1)
        await eventually(lambda: "Azure has begun." in texts(post))
        here.azure.end(event.event_id)
        await eventually(lambda: "It is over: Azure has completed it." in texts(post))
        await eventually(lambda: any("It is over" in line for line in server.thread(post)))
    assert server.roots == [post]
    assert [line.partition("UTC: ")[2] for line in server.thread(post)] == [
        "`client:alice` voted to approve, 1 of 2.",
        "`client:bob` voted to approve, 2 of 2.",
        "Approved by rule reboots: 2 of 2 votes.",
        "Azure accepted the StartRequest.",
        "Azure began, as this relay had approved.",
        "It is over: Azure has completed it.",
    ]


async def test_without_approve_in_chat_a_decision_is_a_link_and_the_code_stands_beside_it(
    tmp_path: Path, server: Mattermost
) -> None:
    """Buttons of Mattermost open no page, so they are links in the text."""
    async with stage(tmp_path, [server.sink()], approvals=TWO_CLIENTS) as here:
        here.reboot()
        post = await first(server)
    assert labels(post) == []
    text = post["props"]["attachments"][0]["text"]
    assert re.search(
        rf"\*\*\[Approve\]\({PUBLIC}/approve#[\w-]+\)\*\* · \*\*\[Hold\]\({PUBLIC}/approve#[\w-]+\)\*\*",
        text,
    )
    assert re.search(r"The page asks for this code: \*\*\d{6}\*\*", text)


async def test_moments_say_that_they_are_in_utc(tmp_path: Path, server: Mattermost) -> None:
    """A post knows no reader's time zone."""
    async with stage(tmp_path, [server.sink()], approvals=TWO_CLIENTS) as here:
        event = here.reboot()
        post = await first(server)
    assert f"Azure begins at {event.not_before:%Y-%m-%d %H:%M:%S} UTC or soon after" in texts(post)


async def test_a_burst_of_fifty_events_is_one_post(
    tmp_path: Path, server: Mattermost, azure: Simulator
) -> None:
    async with stage(
        tmp_path, [server.sink(**IN_CHAT)], approvals=TWO_CLIENTS, azure=azure
    ) as here:
        events = [here.reboot(f"db-{number}") for number in range(50)]
        post = await first(server)
        await eventually(lambda: "50 maintenance events at once" in texts(post))
        assert len(post["props"]["attachments"]) == 11
        assert "And 40 more" in texts(post)
        assert labels(post) == ["Approve", "Hold"] * 10
        for event in events:
            azure.cancel(event.event_id)
        await eventually(lambda: labels(post) == [])
    assert server.roots == [post]
    assert sum(call == ("POST", "posts") for call in server.calls) <= 6


async def test_a_server_that_was_down_gets_the_latest_state_and_no_flood(
    tmp_path: Path, server: Mattermost
) -> None:
    async with stage(tmp_path, [server.sink()], approvals=TWO_CLIENTS) as here:
        await server.leave()
        event = here.reboot()
        await eventually(
            lambda: bool(here.running.relay.dispatcher.status()[0].tries[("deferred", None)])
        )
        for _ in range(3):
            assert await here.approve(event, "hold") == 202
            assert await here.approve(event, "release") == 202
        assert await here.approve(event) == 202
        await server.come()
        post = await first(server)
        await eventually(lambda: len(server.thread(post)) == 7)
        await eventually(lambda: here.running.relay.dispatcher.status()[0].waiting == 0)
    assert "Votes: 1 of 2: `client:alice`" in texts(post)
    assert len(server.posts) == 2  # the message, and one reply with all that happened


async def test_a_restart_edits_the_post_of_before(
    tmp_path: Path, server: Mattermost, azure: Simulator
) -> None:
    async with stage(tmp_path, [server.sink()], approvals=TWO_CLIENTS, azure=azure) as here:
        event = here.reboot()
        post = await first(server)
    async with stage(tmp_path, [server.sink()], approvals=TWO_CLIENTS, azure=azure) as here:
        assert await here.approve(event) == 202
        await eventually(lambda: "Votes: 1 of 2: `client:alice`" in texts(post))
    assert server.roots == [post]


async def test_a_post_that_somebody_deleted_is_posted_anew(
    tmp_path: Path, server: Mattermost
) -> None:
    """To an edit of it Mattermost answers 403; that it is gone shows when it is asked for."""
    async with stage(tmp_path, [server.sink()], approvals=TWO_CLIENTS) as here:
        event = here.reboot()
        server.delete(await first(server))
        assert await here.approve(event) == 202
        await eventually(lambda: bool(server.roots))
        post = server.roots[0]
        await eventually(lambda: len(server.thread(post)) == 1)
    assert "Votes: 1 of 2: `client:alice`" in texts(post)


async def test_people_are_shown_by_name_and_nobody_is_mentioned(
    tmp_path: Path, server: Mattermost
) -> None:
    carol = server.person("carol_x")
    voters = [
        f"mattermost:{server.team}/{carol}",
        f"mattermost:{server.team}/{'z' * 26}",
        "group:dbas",
    ]
    approvals = {"rules": [rule(1, *voters)], "groups": {"dbas": ["client:alice"]}}
    async with stage(tmp_path, [server.sink()], approvals=approvals) as here:
        here.reboot()
        post = await first(server)
    assert "missing, from `client:alice`, " in texts(post)
    assert "**carol_x**" in texts(post)
    assert f"`mattermost:{server.team}/{'z' * 26}`" in texts(post)
    assert "@" not in texts(post)


async def test_untrusted_words_stay_words(tmp_path: Path, server: Mattermost) -> None:
    """Azure's description and a person's reason inject no mention, link, hashtag or format."""
    evil = "@channel @all ~town-square #incident [click](https://evil.example) **bold** `x` https://evil.example :tada: &#64;here"
    async with stage(tmp_path, [server.sink()], approvals=TWO_CLIENTS) as here:
        event = here.reboot(description=evil)
        post = await first(server)
        body = {
            "eventId": event.event_id,
            "decision": "hold",
            "revision": (await here.event(event))["revision"],
            "reason": evil,
        }
        async with here.web.post(
            f"{here.url}/v1/approvals",
            json=body,
            headers={"Authorization": f"Bearer {ALICE['key']}"},
        ) as answer:
            assert answer.status == 202
        await eventually(lambda: bool(server.thread(post)))
    reply = next(one["message"] for one in server.posts.values() if one["root_id"])
    fields = [field["value"] for field in post["props"]["attachments"][0]["fields"]]
    for said in (reply, *fields):
        assert not re.search(
            r"@(?:channel|all|here)|~town|#incident|https:/|:tada:|&#64|(?<!\\)\[click|(?<!\\)\*\*bold",
            said,
        )
    assert any(f"@{GAP}channel" in said for said in fields)


async def test_a_ping_is_a_post_of_its_own(tmp_path: Path, server: Mattermost) -> None:
    async with stage(tmp_path, [server.sink()], approvals=TWO_CLIENTS) as here:
        headers = {"Authorization": f"Bearer {ALICE['key']}"}
        async with here.web.post(f"{here.url}/v1/sinks/ops/ping", headers=headers) as answer:
            assert answer.status < 300
        post = await first(server)
    assert "a test message" in post["message"]


async def test_no_error_and_no_log_holds_the_token(
    tmp_path: Path, server: Mattermost, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(
        tmp_path, [server.sink(token="another-token-of-a-bot")], approvals=TWO_CLIENTS
    ) as here:
        here.reboot()
        await eventually(
            lambda: bool(here.running.relay.dispatcher.status()[0].tries[("deferred", 401)])
        )
        headers = {"Authorization": f"Bearer {ALICE['key']}"}
        async with here.web.get(f"{here.url}/v1/deliveries", headers=headers) as answer:
            delivery = (await answer.json())["items"][0]["id"]
        async with here.web.get(f"{here.url}/v1/deliveries/{delivery}", headers=headers) as answer:
            told = await answer.text()
    assert "make a new one for the bot account" in told
    assert "another-token-of-a-bot" not in told + caplog.text
