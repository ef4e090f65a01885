"""Decisions in Mattermost: only the person who clicks and submits the dialog decides.

Forged, moved, changed, expired and repeated calls decide nothing.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from relay.chat import CallbackRefused
from relay.chat.platforms.mattermost.api import Settings
from relay.chat.platforms.mattermost.clicks import (
    TokenKind,
    eligibility_problem,
    read_token,
    token_key,
)
from relay.logs import MAX_SINK_WARNINGS
from relay.simulator import Event, Simulator
from tests.chat.mattermost_server import (
    CALLBACK_URL,
    SECRET,
    Json,
    MattermostServer,
    button_labels,
    error_response,
    new_id,
    post_text,
)
from tests.chat.running_relay import MattermostRelay, running_mattermost_relay
from tests.eventually import eventually
from tests.relay_in_process import simulated

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
async def azure() -> AsyncIterator[Simulator]:
    async with simulated() as azure:
        yield azure


@pytest.fixture
async def ops(
    tmp_path: Path, server: MattermostServer, azure: Simulator
) -> AsyncIterator[MattermostRelay]:
    async with running_mattermost_relay(tmp_path, server, azure) as ops:
        yield ops


# --- the story


async def test_the_story_from_the_notice_to_the_end(ops: MattermostRelay) -> None:
    """One post tells of two votes in the chat, the StartRequest, the start and the end."""
    event, post = await ops.announce_reboot(description="Host server is undergoing maintenance.")
    assert button_labels(post) == ["Approve", "Hold"]
    assert await ops.server.decide(post, "Approve", ops.ann) == (200, {})
    await eventually(lambda: "Votes: 1 of 2: **ann**; 1 missing, from **ben**" in post_text(post))
    assert button_labels(post) == ["Approve", "Hold"]
    assert await ops.server.decide(post, "Approve", ops.ben) == (200, {})
    await eventually(lambda: ops.relay.starts(event) == 1)
    await eventually(lambda: "Azure has begun." in post_text(post))
    assert button_labels(post) == []
    ops.relay.azure.end(event.event_id)
    await eventually(lambda: "It is over" in "".join(ops.server.thread_lines(post)))
    await ops.relay.settle()
    assert ops.server.channel_posts == [post]
    assert ops.relay.starts(event) == 1
    assert await ops.votes(event) == [
        ("approve", ops.server.principal(ops.ann)),
        ("approve", ops.server.principal(ops.ben)),
    ]
    page = (ROOT / "docs/chat/mattermost.md").read_text(encoding="utf-8")
    assert documented_text(ops.server, post, event) in page


def documented_text(server: MattermostServer, post: Mapping[str, Any], event: Event) -> str:
    """Return the message and its thread as docs/chat/mattermost.md shows them."""
    thread = "\n".join(f"> {line}" for line in server.thread_lines(post))
    text = f"{post_text(post).strip()}\n\n{thread}"
    text = text.replace(event.event_id, "C7061BAC-AFDC-4513-B24B-AA5F13A16123")
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "2026-11-20 15:04:05 UTC", text)


async def test_a_click_only_opens_a_dialog_for_the_person_who_clicked(ops: MattermostRelay) -> None:
    event, post = await ops.announce_reboot()
    assert await ops.server.click(post, "Approve", ops.ann) == (200, {})
    (opened,) = ops.server.dialogs
    assert opened.user_id == ops.ann
    assert opened.request["url"] == CALLBACK_URL
    dialog = opened.request["dialog"]
    assert dialog["title"] == dialog["submit_label"] == "Approve"
    assert (
        dialog["introduction_text"]
        == "Reboot of vm-0: it may begin within seconds, and cannot be taken back."
    )
    assert await ops.votes(event) == []


async def test_in_a_shared_post_each_button_decides_about_its_event(ops: MattermostRelay) -> None:
    events = [ops.relay.reboot(f"db-{number}") for number in range(8)]
    await eventually(lambda: bool(ops.server.channel_posts))
    post = ops.server.channel_posts[0]
    await eventually(lambda: "8 maintenance events" in post_text(post))
    await ops.relay.settle()
    assert await ops.server.decide(post, "Approve", ops.ann, position=3) == (200, {})
    assert [len(await ops.votes(event)) for event in events] == [0, 0, 0, 1, 0, 0, 0, 0]


# --- who


async def test_a_stranger_is_refused_privately_and_without_effect(ops: MattermostRelay) -> None:
    event, post = await ops.announce_reboot()
    stranger = ops.server.add_user("mallory")
    count = len(ops.server.posts)
    ops.server.calls.clear()
    status, answer = await ops.server.click(post, "Approve", stranger)
    assert status == 200
    assert set(answer) == {"ephemeral_text", "skip_slack_parsing"}
    ((user_id, text),) = ops.server.ephemeral_texts
    assert user_id == stranger
    assert "You are not among those who decide here: nothing was decided." in text
    assert text.endswith(f"`{ops.server.principal(stranger)}`.")  # to be copied into a rule
    # A leaked button lets anybody name anybody: the server is asked about nobody.
    assert ops.server.calls == [("GET", f"channels/{ops.server.channel_id}")]
    assert ops.server.dialogs == []
    assert len(ops.server.posts) == count
    assert await ops.count_events(event, "approval.refused") == 0
    assert await ops.server.decide(post, "Approve", ops.ann) == (200, {})
    assert len(await ops.votes(event)) == 1


OTHER = "q8sjtdyh3pnmxg1kzn4wz9s5ke"


@pytest.mark.parametrize(
    ("user_changes", "member_changes", "problem"),
    [
        ({}, {}, None),
        ({"roles": "system_guest"}, {}, "Guests cannot decide"),
        ({}, {"scheme_guest": True}, "Guests cannot decide"),
        ({}, {"roles": "channel_guest"}, "Guests cannot decide"),
        ({"roles": None}, {}, "Guests cannot decide"),
        ({"delete_at": 1700000000000}, {}, "not an active one"),
        ({"delete_at": None}, {}, "not an active one"),
        ({"id": OTHER}, {}, "not an active one"),
        ({"is_bot": True}, {}, "no bots"),
        ({"remote_id": OTHER}, {}, "nobody of another server"),
        ({}, {"user_id": None}, "not a member of this channel"),
        ({}, {"channel_id": OTHER}, "not a member of this channel"),
    ],
)
def test_only_an_active_person_of_the_channel_is_eligible(
    user_changes: Json, member_changes: Json, problem: str | None
) -> None:
    server = MattermostServer()
    ann = server.add_user("ann", **user_changes)
    member = {**server.members[ann], **member_changes}
    user, channel = server.users[ann], server.channel_id
    found = eligibility_problem(user, member, user_id=ann, channel_id=channel)
    assert (found or "").find(problem or "") >= 0
    assert (found is None) == (problem is None)


async def test_a_person_of_whom_nothing_good_is_known_is_refused(ops: MattermostRelay) -> None:
    """A guest, one who left the channel, and one who does not exist."""
    event, post = await ops.announce_reboot()
    ops.server.users[ops.ann]["roles"] = "system_guest"
    del ops.server.members[ops.ben]
    for user_id, problem in (
        (ops.ann, "Guests cannot decide"),
        (ops.ben, "not a member of this channel"),
        (new_id(), "not among those"),
    ):
        status, _ = await ops.server.click(post, "Approve", user_id)
        assert status == 200
        assert problem in ops.server.ephemeral_texts[-1][1]
    ops.server.team_id = ""
    await ops.server.click(post, "Approve", ops.ann)
    assert "this channel belongs to no team" in ops.server.ephemeral_texts[-1][1]
    assert ops.server.dialogs == []
    assert await ops.votes(event) == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("failure", ["down", "silent", "error", "refusal"])
async def test_nothing_is_decided_if_the_server_does_not_identify_the_person(
    ops: MattermostRelay, failure: str
) -> None:
    event, post = await ops.announce_reboot()
    server = ops.server
    click = server.click_payload(post, ops.ann)
    match failure:
        case "down":
            server.is_down = True
        case "silent":
            server.hanging_prefix = "users/"
        case "error":
            error = error_response(500, "app.user.get.app_error")
            server.scripted_responses.append(("users/", error))
        case "refusal":
            refusal = error_response(403, "api.context.permissions.app_error")
            server.scripted_responses.append(("channels/", refusal))
    text = "could not verify who you are: nothing was decided"
    assert text in await server.answer_to(click)
    assert await ops.votes(event) == []


# --- what and where


async def test_no_call_decides_without_a_proof_of_what_where_and_who(ops: MattermostRelay) -> None:
    """A click needs a trigger id that the server signed for the person whom it names."""
    event, post = await ops.announce_reboot()
    server, ann = ops.server, ops.ann
    await server.click(post, "Approve", ann)
    (opened,) = server.dialogs
    click, state = server.click_payload(post, ann), opened.request["dialog"]["state"]
    genuine: str = click["context"]["proof"]
    settings = Settings.model_validate(server.sink_section(secret=SECRET))
    token = read_token(token_key(settings, "button"), genuine)
    payload, _, mac = genuine.partition(".")
    held: str = server.click_payload(post, ann, "Hold")["context"]["proof"]
    hold, _, mac_of_hold = held.partition(".")
    fields = base64.urlsafe_b64decode(hold).replace(b'"hold"', b'"approve"')
    changed = f"{base64.urlsafe_b64encode(fields).decode()}.{mac_of_hold}"
    proofs = ["", ".", payload, f"{payload}.", f"{payload}.{'0' * 64}", f".{mac}", mac, changed]
    proofs += [f"{genuine}0", "x" * 5000, "é.ü", state, token.sign(b"x" * 32)]
    moves = ({"name": "others"}, {"channel": new_id()})
    elsewhere = [settings.model_copy(update=move) for move in moves]
    proofs += [token.sign(token_key(moved, "button")) for moved in elsewhere]
    unsigned = f"{new_id()}:{ann}:1700000000000:".encode() + base64.b64encode(b"forged")
    triggers = [server.trigger_id(server.add_user("mallory")), server.trigger_id(ann, at=1.0)]
    triggers += ["", "x"] + [base64.b64encode(each).decode() for each in (b"a:b", unsigned)]
    submission = server.submission(ann, opened)
    for call in (
        *({**click, "context": {"proof": proof}} for proof in proofs),
        *({**click, "trigger_id": trigger} for trigger in triggers),
        {**click, "channel_id": new_id()},
        {**submission, "user_id": ops.ben},
        {**submission, "state": genuine},
    ):
        with pytest.raises(CallbackRefused) as caught:
            await ops.relay.running.relay.chats["ops"].handle_callback({}, orjson.dumps(call))
        assert caught.value.status == 401, call
    assert server.dialogs == [opened]
    assert await ops.votes(event) == []
    for body, expected in ((b"[]", 400), (orjson.dumps(click | {"context": {"proof": "x"}}), 401)):
        status, answer = await server.call_relay(CALLBACK_URL, body)
        assert status == expected
        assert set(answer) == {"type", "title", "status", "detail"}  # not why


async def test_what_is_expired_or_elsewhere_is_refused_politely(ops: MattermostRelay) -> None:
    event, post = await ops.announce_reboot()
    _, other_post = await ops.announce_reboot()

    def expired(text: str, kind: TokenKind) -> str:
        key = token_key(Settings.model_validate(ops.server.sink_section(secret=SECRET)), kind)
        return read_token(key, text).model_copy(update={"expires_at": 1}).sign(key)

    click = ops.server.click_payload(post, ops.ann)
    proof = expired(click["context"]["proof"], "button")
    for changes in (
        {"post_id": new_id()},
        {"post_id": other_post["id"]},
        {"context": {"proof": proof}},
    ):
        assert "not current any more" in await ops.server.answer_to(click | changes)
    assert ops.server.dialogs == []
    await ops.server.click(post, "Approve", ops.ann)
    submission = ops.server.submission(ops.ann, ops.server.dialogs[0])
    submission["state"] = expired(submission["state"], "dialog")
    assert "This took too long" in await ops.server.answer_to(submission)
    assert await ops.votes(event) == []


async def test_no_old_button_or_dialog_decides_about_a_changed_event(ops: MattermostRelay) -> None:
    event, post = await ops.announce_reboot()
    click = ops.server.click_payload(post, ops.ben)
    await ops.server.click(post, "Approve", ops.ann)
    ops.relay.azure.update_event(event.event_id, resources=("vm-0", "vm-1"))
    await eventually(lambda: "vm-0, vm-1" in post_text(post))
    assert "has changed since this button was made" in await ops.server.answer_to(click)
    submission = ops.server.submission(ops.ann, ops.server.dialogs[0])
    assert "the event has changed since that revision" in await ops.server.answer_to(submission)
    assert len(ops.server.dialogs) == 1
    assert await ops.votes(event) == []


async def test_an_old_button_opens_no_dialog_after_the_decision(ops: MattermostRelay) -> None:
    event, post = await ops.announce_reboot()
    click = ops.server.click_payload(post, ops.ann)
    for user_id in (ops.ann, ops.ben):
        await ops.server.decide(post, "Approve", user_id)
    await eventually(lambda: ops.relay.starts(event) == 1)
    count = len(ops.server.dialogs)
    click["trigger_id"] = ops.server.trigger_id(ops.ann)
    assert "nothing was decided. Look at the message again." in await ops.server.answer_to(click)
    assert len(ops.server.dialogs) == count


async def test_buttons_and_dialogs_of_a_deleted_post_decide_nothing(ops: MattermostRelay) -> None:
    event, post = await ops.announce_reboot()
    click = ops.server.click_payload(post, ops.ann)
    await ops.server.click(post, "Approve", ops.ann)
    ops.server.delete_post(post)
    await ops.relay.decide(event, "hold")
    await eventually(lambda: bool(ops.server.channel_posts))
    await ops.relay.settle()
    submission = ops.server.submission(ops.ann, ops.server.dialogs[0])
    for call in (click, submission):
        assert "not current any more" in await ops.server.answer_to(call)
    assert await ops.votes(event) == [("hold", "client:alice")]
    new_post = ops.server.channel_posts[0]
    assert await ops.server.decide(new_post, "Approve", ops.ann) == (200, {})


# --- once


async def test_a_button_that_was_used_before_decides_again(ops: MattermostRelay) -> None:
    """The post still shows it if it could not be edited. A hold in vain must not look like one."""
    event, post = await ops.announce_reboot()
    click = ops.server.click_payload(post, ops.ann, "Hold")
    for _ in range(2):
        click["trigger_id"] = ops.server.trigger_id(ops.ann)
        await ops.server.call_relay(CALLBACK_URL, click)
        assert await ops.server.submit(ops.ann, ops.server.dialogs[-1]) == (200, {})
        assert (await ops.relay.event(event))["approval"]["state"] == "held"
        assert (await ops.relay.decide(event, "release"))[0] == 202


async def test_clicks_of_many_strangers_do_not_fill_the_log(
    ops: MattermostRelay, caplog: pytest.LogCaptureFixture
) -> None:
    _, post = await ops.announce_reboot()
    for _ in range(MAX_SINK_WARNINGS):
        await ops.server.click(post, "Approve", new_id())
    caplog.clear()
    for _ in range(5):
        await ops.server.click(post, "Approve", new_id())
    assert "refused" not in caplog.text


async def test_a_repeated_submission_has_no_effect_even_after_a_restart(
    tmp_path: Path, server: MattermostServer, azure: Simulator
) -> None:
    ann, ben = server.ann, server.ben
    async with running_mattermost_relay(tmp_path, server, azure) as ops:
        event, post = await ops.announce_reboot()
        await server.decide(post, "Hold", ann)
        await eventually(lambda: button_labels(post) == ["Approve", "Release the hold"])
        await server.decide(post, "Release the hold", ann)
        await eventually(lambda: button_labels(post) == ["Approve", "Hold"])
        hold_dialog = server.dialogs[0]
        assert await server.submit(ann, hold_dialog) == (200, {})
    async with running_mattermost_relay(tmp_path, server, azure) as ops:
        await eventually(lambda: bool(ops.relay.running.relay.chats))
        assert await server.submit(ann, hold_dialog) == (200, {})
        assert [decision for decision, _ in await ops.votes(event)] == ["hold", "release"]
        assert await ops.count_events(event, "approval.recorded") == 2
        await ops.relay.settle()
        assert button_labels(post) == ["Approve", "Hold"]
        # a button from before the restart is still valid
        assert await server.decide(post, "Approve", ben) == (200, {})
