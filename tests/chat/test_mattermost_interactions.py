"""Mattermost, inward: who clicks and submits decides, and nobody else does, whatever is forged, moved, changed or repeated."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from relay import signature
from relay.chat.platforms.mattermost.action_token import ActionToken, seal, unseal
from relay.simulator import VM, Event, Setup, Simulator
from tests.chat.mattermost_server import PUBLIC, SECRET, Mattermost, mattermost, new_id, said
from tests.chat.running_relay import ALICE, Stage, rule, stage
from tests.journey.relay_process import eventually

ROOT = Path(__file__).parent.parent.parent
KEY = signature.key_of(SECRET)
IN_CHAT = {"approve_in_chat": True, "secret": SECRET}


@dataclass(frozen=True, slots=True)
class Ops:
    """A relay whose reboots ask for two votes, and a channel with two people who have one: ann and ben."""

    here: Stage
    server: Mattermost
    ann: str
    ben: str

    async def announced(self, **plan: Any) -> tuple[Event, dict[str, Any]]:
        """Azure announces a reboot; the event, and its post with buttons."""
        event = self.here.reboot(**plan)
        await eventually(lambda: bool(self.server.roots))
        post = self.server.roots[-1]
        await eventually(self.quiet)
        return event, post

    def quiet(self) -> bool:
        """Whether everything is delivered."""
        return self.here.running.relay.dispatcher.status()[0].waiting == 0

    async def votes(self, event: Event) -> list[tuple[str, str]]:
        """What was recorded about an event: decision and principal."""
        return [
            (one["decision"], one["principal"]) for one in (await self.here.event(event))["votes"]
        ]

    async def said(self, event: Event, name: str) -> int:
        """How often something was told of an event."""
        return sum(
            one["type"] == f"io.imdsrelay.{name}.v1"
            for one in (await self.here.event(event))["history"]
        )

    def principal(self, user: str) -> str:
        return f"mattermost:{self.server.team}/{user}"


@pytest.fixture
async def server() -> AsyncIterator[Mattermost]:
    async with mattermost() as here:
        yield here


@pytest.fixture
async def azure() -> AsyncIterator[Simulator]:
    async with Simulator(Setup(vms=(VM("vm-0"),))) as here:
        yield here


@asynccontextmanager
async def running(
    directory: Path, server: Mattermost, azure: Simulator, ann: str, ben: str, **more: Any
) -> AsyncIterator[Ops]:
    voters = [f"mattermost:{server.team}/{one}" for one in (ann, ben)]
    async with stage(
        directory,
        [server.sink(**IN_CHAT, **more)],
        approvals={"rules": [rule(2, *voters)]},
        azure=azure,
    ) as here:
        server.relay = here.url
        yield Ops(here, server, ann, ben)


@pytest.fixture
async def ops(tmp_path: Path, server: Mattermost, azure: Simulator) -> AsyncIterator[Ops]:
    async with running(tmp_path, server, azure, server.person("ann"), server.person("ben")) as here:
        yield here


def proof_of(server: Mattermost, post: Mapping[str, Any], label: str = "Approve") -> str:
    button = next(one for one in server.buttons(post) if one["name"] == label)
    proof: str = button["integration"]["context"]["proof"]
    return proof


def with_proof(
    server: Mattermost, post: Mapping[str, Any], user: str, proof: object, **more: Any
) -> dict[str, Any]:
    """A click as the server would send it, with another proof."""
    return {
        **server.call_of(post, server.buttons(post)[0], user),
        "context": {"proof": proof},
        **more,
    }


def labels(post: Mapping[str, Any]) -> list[str]:
    return [
        one["name"] for attachment in post["props"]["attachments"] for one in attachment["actions"]
    ]


CALLED = f"{PUBLIC}/v1/chat/ops"

# --- the story


async def test_the_story_from_the_notice_to_the_end(ops: Ops) -> None:
    """Scheduled, a message, the votes of two people in the chat, the StartRequest, started, ended; one post tells it all."""
    event, post = await ops.announced(description="Host server is undergoing maintenance.")
    assert labels(post) == ["Approve", "Hold"]
    assert await ops.server.decide(post, "Approve", ops.ann) == (200, {})
    await eventually(
        lambda: "Votes: 1 of 2: **ann**; 1 missing, from **ben**" in ops.server.texts_of(post)
    )
    assert labels(post) == ["Approve", "Hold"]
    assert await ops.server.decide(post, "Approve", ops.ben) == (200, {})
    await eventually(lambda: ops.here.starts(event) == 1)
    await eventually(lambda: "Azure has begun." in ops.server.texts_of(post))
    assert labels(post) == []
    ops.here.azure.end(event.event_id)
    await eventually(lambda: "It is over" in "".join(ops.server.thread(post)))
    await eventually(ops.quiet)
    assert ops.server.roots == [post]
    assert ops.here.starts(event) == 1
    assert await ops.votes(event) == [
        ("approve", ops.principal(ops.ann)),
        ("approve", ops.principal(ops.ben)),
    ]
    shown = (ROOT / "docs/chat/mattermost.md").read_text(encoding="utf-8")
    assert final(ops.server, post, event) in shown


def final(server: Mattermost, post: Mapping[str, Any], event: Event) -> str:
    """The message and its thread as they read in the end, as the page about Mattermost shows them."""
    text = "\n".join(
        (server.texts_of(post).strip(), "", *(f"> {line}" for line in server.thread(post)))
    )
    text = text.replace(event.event_id, "C7061BAC-AFDC-4513-B24B-AA5F13A16123")
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "2026-11-20 15:04:05 UTC", text)


async def test_a_click_alone_decides_nothing_and_asks_the_person_who_clicked(ops: Ops) -> None:
    event, post = await ops.announced()
    assert await ops.server.click(post, "Approve", ops.ann) == (200, {})
    ((person, asked),) = ops.server.dialogs
    assert person == ops.ann
    assert asked["url"] == CALLED
    assert asked["dialog"]["title"] == asked["dialog"]["submit_label"] == "Approve"
    assert (
        asked["dialog"]["introduction_text"]
        == "Reboot of vm-0: it may begin within seconds, and cannot be taken back."
    )
    assert await ops.votes(event) == []


async def test_a_dialog_that_is_cancelled_decides_nothing(ops: Ops) -> None:
    event, post = await ops.announced()
    await ops.server.click(post, "Approve", ops.ann)
    assert await ops.server.submit(ops.ann, ops.server.dialogs[0][1], cancelled=True) == (200, {})
    assert await ops.votes(event) == []


async def test_hold_and_release_in_the_chat(ops: Ops) -> None:
    event, post = await ops.announced()
    await ops.server.decide(post, "Hold", ops.ann)
    await eventually(lambda: labels(post) == ["Approve", "Release the hold"])
    await ops.server.decide(post, "Release the hold", ops.ann)
    await eventually(lambda: labels(post) == ["Approve", "Hold"])
    assert [decision for decision, _ in await ops.votes(event)] == ["hold", "release"]


async def test_in_a_burst_each_button_is_about_its_own_event(ops: Ops) -> None:
    events = [ops.here.reboot(f"db-{number}") for number in range(8)]
    await eventually(
        lambda: (
            bool(ops.server.roots)
            and "8 maintenance events" in ops.server.texts_of(ops.server.roots[0])
        )
    )
    await eventually(ops.quiet)
    post = ops.server.roots[0]
    assert await ops.server.decide(post, "Approve", ops.ann, number=3) == (200, {})
    assert [len(await ops.votes(event)) for event in events] == [0, 0, 0, 1, 0, 0, 0, 0]


async def test_buttons_vanish_when_the_time_to_vote_is_over(
    tmp_path: Path, server: Mattermost, azure: Simulator
) -> None:
    voter = f"mattermost:{server.team}/{server.person('ann')}"
    approvals = {"rules": [rule(1, voter, close_before="895s")]}
    async with stage(tmp_path, [server.sink(**IN_CHAT)], approvals=approvals, azure=azure) as here:
        here.reboot()
        await eventually(lambda: bool(server.roots))
        assert labels(server.roots[0]) == ["Approve", "Hold"]
        await eventually(lambda: labels(server.roots[0]) == ["Hold"])
    assert len(server.roots) == 1


# --- who


async def test_a_stranger_is_refused_politely_seen_by_them_alone_and_burns_nothing(
    ops: Ops,
) -> None:
    event, post = await ops.announced()
    stranger = ops.server.person("mallory")
    before = len(ops.server.posts)
    status, answer = await ops.server.click(post, "Approve", stranger)
    assert status == 200
    assert set(answer) == {"ephemeral_text", "skip_slack_parsing"}
    ((whom, words),) = ops.server.whispers
    assert whom == stranger
    assert "You are not among those who decide here: nothing was decided." in words
    assert words.endswith(f"`{ops.principal(stranger)}`.")  # to be copied into a rule
    assert ops.server.dialogs == []
    assert len(ops.server.posts) == before
    assert await ops.said(event, "approval.refused") == 0
    assert await ops.server.decide(post, "Approve", ops.ann) == (200, {})
    assert len(await ops.votes(event)) == 1


@pytest.mark.parametrize(
    ("account", "seat", "words"),
    [
        ({"roles": "system_guest"}, {}, "Guests cannot answer"),
        ({}, {"scheme_guest": True}, "Guests cannot answer"),
        ({}, {"roles": "channel_guest"}, "Guests cannot answer"),
        ({"roles": None}, {}, "Guests cannot answer"),
        ({"delete_at": 1700000000000}, {}, "not an active one"),
        ({"delete_at": None}, {}, "not an active one"),
        ({"is_bot": True}, {}, "no bots"),
        ({"remote_id": "q8sjtdyh3pnmxg1kzn4wz9s5ke"}, {}, "nobody of another server"),
        ({}, None, "not a member of this channel"),
        ({}, {"channel_id": "q8sjtdyh3pnmxg1kzn4wz9s5ke"}, "not a member of this channel"),
    ],
    ids=[
        "guest",
        "guest of the channel",
        "guest by role",
        "no roles",
        "deactivated",
        "unclear",
        "bot",
        "shared channel",
        "outside",
        "else",
    ],
)
async def test_whom_the_rules_name_but_the_server_does_not_vouch_for(
    ops: Ops, account: dict[str, Any], seat: dict[str, Any] | None, words: str
) -> None:
    event, post = await ops.announced()
    ops.server.users[ops.ann].update(account)
    if seat is None:
        del ops.server.members[ops.ann]
    else:
        ops.server.members[ops.ann].update(seat)
    assert (await ops.server.click(post, "Approve", ops.ann))[0] == 200
    assert words in ops.server.whispers[0][1]
    assert ops.server.dialogs == []
    assert await ops.votes(event) == []


async def test_who_does_not_exist_is_refused(ops: Ops) -> None:
    event, post = await ops.announced()
    assert (await ops.server.click(post, "Approve", new_id()))[0] == 200
    assert "not an active one" in ops.server.whispers[0][1]
    assert await ops.votes(event) == []


@pytest.mark.parametrize("trouble", ["gone", "silent", "failing", "refusing"])
async def test_where_the_server_does_not_say_who_it_was_nothing_is_decided(
    ops: Ops, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for somebody whom the relay knows from before."""
    monkeypatch.setattr("relay.chat.platforms.mattermost.identity.LOOK_UP", 0.5)
    event, post = await ops.announced()
    call = ops.server.call_of(post, ops.server.buttons(post)[0], ops.ann)
    match trouble:
        case "gone":
            await ops.server.leave()
        case "silent":
            ops.server.stalled = "users/"
        case "failing":
            ops.server.refusals.append(("users/", said(500, "app.user.get.app_error")))
        case "refusing":
            ops.server.refusals.append(
                ("channels/", said(403, "api.context.permissions.app_error"))
            )
    status, answer = await ops.server.send(CALLED, call)
    assert status == 200
    assert "could not verify who you are: nothing was decided" in answer["ephemeral_text"]
    await ops.server.come()
    assert await ops.votes(event) == []


async def test_a_channel_without_a_team_names_nobody(ops: Ops) -> None:
    event, post = await ops.announced()
    ops.server.team = ""
    await ops.server.click(post, "Approve", ops.ann)
    assert "this channel belongs to no team" in ops.server.whispers[0][1]
    assert await ops.votes(event) == []


async def test_who_is_deactivated_between_click_and_submission_is_refused_after_half_a_minute(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.chat.platforms.mattermost.identity.GOOD_FOR", 0.0)
    event, post = await ops.announced()
    await ops.server.click(post, "Approve", ops.ann)
    ops.server.users[ops.ann]["delete_at"] = 1
    status, answer = await ops.server.submit(ops.ann, ops.server.dialogs[0][1])
    assert status == 200
    assert "not an active one" in answer["error"]
    assert await ops.votes(event) == []


async def test_who_may_speak_in_the_chat_but_not_by_the_rule_is_refused_by_the_gate(
    tmp_path: Path, server: Mattermost, azure: Simulator
) -> None:
    ann = server.person("ann")
    approvals = {
        "rules": [rule(1, "client:alice")],
        "groups": {"others": [f"mattermost:{server.team}/{ann}"]},
    }
    async with stage(tmp_path, [server.sink(**IN_CHAT)], approvals=approvals, azure=azure) as here:
        server.relay = here.url
        event = here.reboot()
        await eventually(lambda: bool(server.roots))
        await eventually(lambda: here.running.relay.dispatcher.status()[0].waiting == 0)
        status, answer = await server.decide(server.roots[0], "Approve", ann)
        assert (status, answer) == (
            200,
            {"error": "Refused: rule reboots takes votes from others only."},
        )
        assert here.starts(event) == 0


# --- what and where


async def test_a_forged_proof_is_refused(ops: Ops) -> None:
    event, post = await ops.announced()
    good = proof_of(ops.server, post)
    payload, _, mac = good.partition(".")
    other = seal(b"x" * 32, unseal(KEY, good, "button"))
    for proof in (
        "",
        ".",
        payload,
        f"{payload}.",
        f"{payload}.{'0' * 64}",
        f".{mac}",
        mac,
        other,
        f"{good}0",
        "x" * 5000,
        "é.ü",
    ):
        assert (await ops.server.send(CALLED, with_proof(ops.server, post, ops.ann, proof)))[
            0
        ] == 401, proof
    assert ops.server.dialogs == []
    assert await ops.votes(event) == []


async def test_any_change_of_a_proof_is_refused(ops: Ops) -> None:
    _, post = await ops.announced()
    payload, _, mac = proof_of(ops.server, post, "Hold").partition(".")
    fields = orjson.loads(base64.urlsafe_b64decode(payload))
    fields[fields.index("hold")] = "approve"
    changed = base64.urlsafe_b64encode(orjson.dumps(fields)).decode()
    assert (
        await ops.server.send(CALLED, with_proof(ops.server, post, ops.ann, f"{changed}.{mac}"))
    )[0] == 401
    assert ops.server.dialogs == []


async def test_an_expired_button_is_refused_politely(ops: Ops) -> None:
    event, post = await ops.announced()
    old = seal(KEY, replace(unseal(KEY, proof_of(ops.server, post), "button"), expires=1))
    status, answer = await ops.server.send(CALLED, with_proof(ops.server, post, ops.ann, old))
    assert status == 200
    assert "not current any more" in answer["ephemeral_text"]
    assert ops.server.dialogs == []
    assert await ops.votes(event) == []


async def test_an_expired_dialog_is_refused_politely(ops: Ops) -> None:
    event, post = await ops.announced()
    await ops.server.click(post, "Approve", ops.ann)
    state = unseal(KEY, ops.server.dialogs[0][1]["dialog"]["state"], "dialog")
    old = seal(KEY, replace(state, expires=1))
    status, answer = await ops.server.submit(ops.ann, ops.server.dialogs[0][1], state=old)
    assert status == 200
    assert "This took too long" in answer["error"]
    assert await ops.votes(event) == []


async def test_a_proof_that_was_moved_is_refused(ops: Ops) -> None:
    """To a post of somebody else, to that of another event, to another channel, to another sink."""
    first, one = await ops.announced()
    second, two = await ops.announced()
    await eventually(lambda: len(ops.server.roots) == 2)
    one, two = ops.server.roots
    proof = proof_of(ops.server, one)
    for call in (
        with_proof(ops.server, one, ops.ann, proof, post_id=new_id()),
        with_proof(ops.server, two, ops.ann, proof),
    ):
        status, answer = await ops.server.send(CALLED, call)
        assert status == 200
        assert "not current any more" in answer["ephemeral_text"]
    assert (
        await ops.server.send(
            CALLED, with_proof(ops.server, one, ops.ann, proof, channel_id=new_id())
        )
    )[0] == 401
    ours = unseal(KEY, proof, "button")
    for moved in (replace(ours, sink="others"), replace(ours, channel=new_id())):
        elsewhere = seal(KEY, moved)
        assert (await ops.server.send(CALLED, with_proof(ops.server, one, ops.ann, elsewhere)))[
            0
        ] == 401
    assert ops.server.dialogs == []
    assert await ops.votes(first) == await ops.votes(second) == []


async def test_the_query_decides_nothing(ops: Ops) -> None:
    event, post = await ops.announced()
    call = with_proof(ops.server, post, ops.ann, "")
    assert (
        await ops.server.send(f"{CALLED}?proof={proof_of(ops.server, post)}&decision=approve", call)
    )[0] in {400, 401}
    assert await ops.votes(event) == []


async def test_with_a_leaked_proof_nobody_votes_for_another(ops: Ops) -> None:
    """A click is believed only with a trigger id that the server has signed, for the person it names."""
    event, post = await ops.announced()
    proof = proof_of(ops.server, post)
    mallory = ops.server.person("mallory")
    unsigned = base64.b64encode(
        f"{new_id()}:{ops.ann}:1700000000000:".encode() + base64.b64encode(b"forged")
    ).decode()
    for trigger in (
        ops.server.trigger(mallory),
        "",
        "x",
        base64.b64encode(b"a:b").decode(),
        unsigned,
        ops.server.trigger(ops.ann, at=1.0),
    ):
        call = with_proof(ops.server, post, ops.ann, proof, trigger_id=trigger)
        assert (await ops.server.send(CALLED, call))[0] == 401
    assert ops.server.dialogs == []
    assert await ops.votes(event) == []


async def test_a_dialog_is_good_for_the_person_who_was_asked_alone(ops: Ops) -> None:
    event, post = await ops.announced()
    await ops.server.click(post, "Approve", ops.ann)
    dialog = ops.server.dialogs[0][1]
    assert (await ops.server.submit(ops.ben, dialog))[0] == 401
    assert await ops.votes(event) == []


async def test_what_a_button_carries_is_no_submission_and_the_other_way_round(ops: Ops) -> None:
    event, post = await ops.announced()
    await ops.server.click(post, "Approve", ops.ann)
    dialog = ops.server.dialogs[0][1]
    assert (await ops.server.submit(ops.ann, dialog, state=proof_of(ops.server, post)))[0] == 401
    assert (
        await ops.server.send(
            CALLED, with_proof(ops.server, post, ops.ann, dialog["dialog"]["state"])
        )
    )[0] == 401
    assert await ops.votes(event) == []


async def test_an_event_that_changed_since_is_not_decided_by_old_buttons_or_dialogs(
    ops: Ops,
) -> None:
    event, post = await ops.announced()
    old = proof_of(ops.server, post)
    await ops.server.click(post, "Approve", ops.ann)
    ops.here.azure.update(event.event_id, resources=("vm-0", "vm-1"))
    await eventually(lambda: "vm-0, vm-1" in ops.server.texts_of(post))
    status, answer = await ops.server.send(CALLED, with_proof(ops.server, post, ops.ben, old))
    assert status == 200
    assert "has changed since this button was made" in answer["ephemeral_text"]
    status, answer = await ops.server.submit(ops.ann, ops.server.dialogs[0][1])
    assert status == 200
    assert "the event has changed since that revision" in answer["error"]
    assert len(ops.server.dialogs) == 1
    assert await ops.votes(event) == []


async def test_an_old_button_of_what_is_settled_opens_no_dialog(ops: Ops) -> None:
    event, post = await ops.announced()
    old = with_proof(ops.server, post, ops.ann, proof_of(ops.server, post))
    for person in (ops.ann, ops.ben):
        await ops.server.decide(post, "Approve", person)
    await eventually(lambda: ops.here.starts(event) == 1)
    asked = len(ops.server.dialogs)
    answer = (await ops.server.send(CALLED, {**old, "trigger_id": ops.server.trigger(ops.ann)}))[1]
    assert "nothing was decided. Look at the message again." in answer["ephemeral_text"]
    assert len(ops.server.dialogs) == asked


async def test_after_a_post_was_deleted_its_buttons_and_dialogs_decide_nothing(ops: Ops) -> None:
    event, post = await ops.announced()
    call = with_proof(ops.server, post, ops.ann, proof_of(ops.server, post))
    await ops.server.click(post, "Approve", ops.ann)
    ops.server.delete(post)
    await ops.here.approve(event, "hold")
    await eventually(lambda: bool(ops.server.roots))
    await eventually(ops.quiet)
    assert "not current any more" in (await ops.server.send(CALLED, call))[1]["ephemeral_text"]
    assert (
        "not current any more"
        in (await ops.server.submit(ops.ann, ops.server.dialogs[0][1]))[1]["error"]
    )
    assert await ops.votes(event) == [("hold", "client:alice")]
    assert await ops.server.decide(ops.server.roots[0], "Approve", ops.ann) == (200, {})


# --- once


async def test_a_double_click_is_one_vote(ops: Ops) -> None:
    event, post = await ops.announced()
    await ops.server.click(post, "Approve", ops.ann)
    await ops.server.click(post, "Approve", ops.ann)
    answers = [await ops.server.submit(person, dialog) for person, dialog in ops.server.dialogs]
    assert answers == [(200, {}), (200, {})]
    assert len(await ops.votes(event)) == 1
    assert await ops.said(event, "approval.recorded") == 1


async def test_clicks_at_once_are_one_vote_of_each_person(ops: Ops) -> None:
    event, post = await ops.announced()
    people = [ops.ann, ops.ben] * 10
    assert {
        status
        for status, _ in await asyncio.gather(
            *(ops.server.click(post, "Approve", one) for one in people)
        )
    } == {200}
    answers = await asyncio.gather(
        *(ops.server.submit(person, dialog) for person, dialog in ops.server.dialogs)
    )
    assert answers == [(200, {})] * 20
    assert sorted(await ops.votes(event)) == sorted(
        ("approve", ops.principal(one)) for one in (ops.ann, ops.ben)
    )
    assert await ops.said(event, "approval.recorded") == 2
    await eventually(lambda: ops.here.starts(event) == 1)


async def test_a_replay_is_the_same_vote_also_after_a_restart(
    tmp_path: Path, server: Mattermost, azure: Simulator
) -> None:
    ann, ben = server.person("ann"), server.person("ben")
    async with running(tmp_path, server, azure, ann, ben) as ops:
        event, post = await ops.announced()
        await server.decide(post, "Hold", ann)
        await eventually(lambda: labels(post) == ["Approve", "Release the hold"])
        await server.decide(post, "Release the hold", ann)
        await eventually(lambda: labels(post) == ["Approve", "Hold"])
        held = server.dialogs[0][1]
        assert await server.submit(ann, held) == (200, {})
    async with running(tmp_path, server, azure, ann, ben) as ops:
        await eventually(lambda: bool(ops.here.running.relay.chats))
        assert await server.submit(ann, held) == (200, {})
        assert [decision for decision, _ in await ops.votes(event)] == ["hold", "release"]
        assert await ops.said(event, "approval.recorded") == 2
        await eventually(ops.quiet)
        assert labels(post) == ["Approve", "Hold"]
        assert await server.decide(post, "Approve", ben) == (
            200,
            {},
        )  # a button of before is still good


# --- when not


async def test_without_approve_in_chat_every_call_is_refused(
    tmp_path: Path, server: Mattermost, azure: Simulator
) -> None:
    ann = server.person("ann")
    proof = ActionToken("button", "ops", server.channel, "E", "r", "approve", 2**40, "n")
    async with stage(
        tmp_path,
        [server.sink(secret=SECRET)],
        approvals={"rules": [rule(1, "client:alice")]},
        azure=azure,
    ) as here:
        server.relay = here.url
        here.reboot()
        await eventually(lambda: bool(server.roots))
        post = server.roots[0]
        call = {
            "user_id": ann,
            "channel_id": server.channel,
            "post_id": post["id"],
            "trigger_id": server.trigger(ann),
        }
        assert (await server.send(CALLED, {**call, "context": {"proof": seal(KEY, proof)}}))[
            0
        ] == 401


async def test_readers_of_the_channel_never_see_what_a_button_carries(ops: Ops) -> None:
    _, post = await ops.announced()
    proof = proof_of(ops.server, post)
    assert proof not in orjson.dumps(ops.server.seen(post)).decode()
    assert proof not in ops.server.texts_of(post)


async def test_a_secret_that_was_replaced_ends_the_buttons_of_before(
    tmp_path: Path, server: Mattermost, azure: Simulator
) -> None:
    ann, ben = server.person("ann"), server.person("ben")
    file = tmp_path / "secret"
    file.write_text(SECRET)
    voters = [f"mattermost:{server.team}/{one}" for one in (ann, ben)]
    sink = server.sink(approve_in_chat=True, secret_file=str(file))
    async with stage(
        tmp_path, [sink], approvals={"rules": [rule(2, *voters)]}, azure=azure
    ) as here:
        server.relay = here.url
        event = here.reboot()
        await eventually(lambda: bool(server.roots))
        await eventually(lambda: here.running.relay.dispatcher.status()[0].waiting == 0)
        post = server.roots[0]
        file.write_text("whsec_" + base64.b64encode(b"another secret of thirty-two byt").decode())
        assert (await server.click(post, "Approve", ann))[0] == 401
        assert await here.approve(event, "hold", client=ALICE) == 202
        await eventually(lambda: "Release the hold" in labels(post))
        assert await server.click(post, "Approve", ann) == (200, {})
