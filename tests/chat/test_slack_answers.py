"""Whose clicks and commands count in Slack, which have no effect, and what people are told."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.chat.cards.card import Button
from relay.chat.platforms.slack.api import Workspace
from relay.chat.platforms.slack.clicks import (
    ButtonDecision,
    Unreadable,
    membership_refusal,
    parse_click,
    parse_command,
)
from relay.chat.platforms.slack.messages import button_value
from tests.chat.running_relay import ANN, VOTERS, AnnouncedReboot, announced_reboot, rule, stage
from tests.chat.slack_server import (
    ALICE,
    BOB,
    CHANNEL,
    EVE,
    TEAM,
    PostedMessage,
    SlackServer,
    api_error,
    member,
    never_answers,
    responds,
)
from tests.eventually import eventually
from tests.hostile import ANY_JSON
from tests.relay_in_process import simulated

GUEST = "guests cannot decide"
OTHER_WORKSPACE = "people of other workspaces cannot decide"


async def test_two_people_approve_and_the_message_shows_everything(reboot: AnnouncedReboot) -> None:
    relay, slack, event, message = reboot.relay, reboot.slack, reboot.event, reboot.message
    assert message.text_of_blocks().splitlines()[0] == "🟡 Reboot of vm-0"
    assert f"Votes: 0 of 2; 2 missing, from @{ALICE}, @{BOB}" in message.text_of_blocks()
    assert set(message.buttons()) == {"Approve", "Hold"}
    await reboot.click("Approve")
    (vote,) = (await relay.event(event))["votes"]  # on disk before it was acknowledged
    assert (vote["principal"], vote["channel"], vote["counts"]) == (ANN, "slack", True)
    votes = f"Votes: 1 of 2: @{ALICE}; 1 missing, from @{BOB}"
    await eventually(lambda: votes in message.text_of_blocks())
    assert relay.starts(event) == 0
    await reboot.click("Approve", BOB)
    await eventually(lambda: relay.starts(event) == 1)
    await eventually(lambda: "Azure has begun" in message.text_of_blocks())
    relay.azure.end(event)
    await eventually(lambda: any("It is over" in line for line in slack.thread_lines(message)))
    assert message.buttons() == {}
    first, second, *_ = message.text_of_blocks().splitlines()
    assert (first, second) == ("⚪ Reboot of vm-0", "It is over: Azure has completed it.")
    assert [line.partition(": ")[2] for line in slack.thread_lines(message)] == [
        f"@{ALICE} voted to approve, 1 of 2.",
        f"@{BOB} voted to approve, 2 of 2.",
        "Approved by rule reboots: 2 of 2 votes.",
        "Azure accepted the StartRequest.",
        "Azure began, as this relay had approved.",
        "It is over: Azure has completed it.",
    ]
    assert slack.private_replies == []


# --- who decides


def enterprise_user(enterprise_id: str, *teams: str) -> dict[str, Any]:
    membership = {"enterprise_id": enterprise_id, "teams": list(teams)}
    return member(ALICE, team_id="T0OTHER", enterprise_user=membership)


@pytest.mark.parametrize(
    ("user", "enterprise_id", "refusal"),
    [
        (member(ALICE), None, None),
        (member(ALICE, is_restricted=True), None, GUEST),
        (member(ALICE, is_ultra_restricted=True), None, GUEST),
        (member(ALICE, is_restricted=None), None, GUEST),
        ({k: v for k, v in member(ALICE).items() if k != "is_restricted"}, None, GUEST),
        (member(ALICE, deleted=True), None, "your account is deactivated"),
        (member(ALICE, is_bot=True), None, "an app cannot decide"),
        (member(ALICE, is_app_user=True), None, "an app cannot decide"),
        (member(ALICE, is_workflow_bot=True), None, "a workflow cannot decide"),
        (member(ALICE, is_stranger=True), None, OTHER_WORKSPACE),
        (member(ALICE, team_id="T0OTHER"), None, OTHER_WORKSPACE),
        (enterprise_user("E1", TEAM), None, OTHER_WORKSPACE),
        (enterprise_user("E1", TEAM, "T0OTHER"), "E1", None),
        (enterprise_user("E1", "T0OTHER"), "E1", OTHER_WORKSPACE),
        (enterprise_user("E2", TEAM), "E1", OTHER_WORKSPACE),
        (member(BOB), None, "Slack does not know you"),
        (None, None, "Slack does not know you"),
    ],
)
def test_only_a_full_member_can_decide(
    user: dict[str, Any] | None, enterprise_id: str | None, refusal: str | None
) -> None:
    assert membership_refusal(user, ALICE, Workspace(TEAM, enterprise_id)) == refusal


@pytest.mark.usefixtures("impatient")
async def test_a_click_counts_once_slack_vouches_for_it(slack: SlackServer, tmp_path: Path) -> None:
    """The refused click is not used up: the same click counts afterwards, and once."""
    bot = responds(200, {"ok": True, "user": member(ALICE, is_bot=True)})
    async with announced_reboot(slack, tmp_path) as reboot:
        click = slack.click_payload(reboot.message, "Approve")
        for method, failure, told in (
            ("users.info", responds(500), "Try again in a moment"),
            ("users.info", bot, "an app"),
            ("users.info", never_answers, "Try again in a moment"),
            ("users.info", api_error("user_not_found"), "Try again in a moment"),
        ):
            slack.failures[method] = failure
            slack.private_replies.clear()
            await slack.send_envelope(click)
            assert told in await reboot.told()
            assert await reboot.recorded() == ["event.scheduled"]
            slack.failures.clear()
        for _ in range(2):
            await slack.send_envelope(click)
        assert await reboot.voters() == [ALICE]


async def test_a_person_whom_no_rule_names_is_refused_without_asking_slack(
    slack: SlackServer, caplog: pytest.LogCaptureFixture, reboot: AnnouncedReboot
) -> None:
    """Whatever name they have chosen. The log is not filled."""
    for label in ("Hold", "Approve"):
        await reboot.click(label, EVE, user={"id": EVE, "name": ALICE, "team_id": TEAM})
    principal = f"slack:{TEAM}/{EVE}"
    refusal = f"Nothing was decided: no rule of this relay names you, {principal}."
    assert await reboot.told(EVE) == refusal
    assert slack.call_count("users.info") == 0
    assert await reboot.recorded() == ["event.scheduled"]
    assert caplog.text.count(f"{principal} was refused") == 1


async def test_no_click_of_another_workspace_decides(slack: SlackServer, tmp_path: Path) -> None:
    """Though a rule names that principal. Slack's user ids are unique in a workspace only."""
    voters = {"rules": [rule(1, f"slack:T0OTHER/{ALICE}")]}
    async with announced_reboot(slack, tmp_path, approvals=voters) as reboot:
        await reboot.click("Approve", team={"id": "T0OTHER"})
        assert OTHER_WORKSPACE in await reboot.told()
        assert await reboot.recorded() == ["event.scheduled"]


async def test_50_clicks_of_two_people_are_two_votes_and_one_start(reboot: AnnouncedReboot) -> None:
    await asyncio.gather(*(reboot.click("Approve", user) for user in [ALICE, BOB] * 25))
    assert sorted(await reboot.voters()) == [ALICE, BOB]
    await eventually(lambda: reboot.message.buttons() == {})
    assert reboot.relay.starts(reboot.event) == 1


# --- which button


async def test_a_replayed_click_never_counts_again(slack: SlackServer, tmp_path: Path) -> None:
    """A released hold stays released, although the click on Hold comes again."""
    async with simulated() as azure:
        async with announced_reboot(slack, tmp_path, azure=azure) as reboot:
            hold = slack.click_payload(reboot.message, "Hold")
            await slack.send_envelope(hold)
            await eventually(lambda: "Release the hold" in reboot.message.buttons())
            await reboot.click("Approve", trigger_id=hold["trigger_id"])  # another decision
            assert (await reboot.told()).startswith("Nothing was decided")
            await reboot.click("Release the hold")
            await slack.send_envelope(hold)
            assert await reboot.voters() == []
        async with announced_reboot(slack, tmp_path, azure=azure) as reboot:
            await slack.send_envelope(hold)
            assert (await reboot.relay.event(reboot.event))["approval"]["state"] != "held"


async def test_a_click_on_an_outdated_state_decides_nothing(reboot: AnnouncedReboot) -> None:
    click = reboot.slack.click_payload(reboot.message, "Approve")
    old_value = reboot.message.buttons()["Approve"]["value"]
    reboot.relay.azure.update_event(reboot.event, notice=3600)
    await eventually(lambda: reboot.message.buttons()["Approve"]["value"] != old_value)
    await reboot.slack.send_envelope(click)
    assert "changed" in await reboot.told()
    assert await reboot.voters() == []
    await reboot.click("Approve")
    assert await reboot.voters() == [ALICE]


async def test_a_button_works_only_in_its_own_message(reboot: AnnouncedReboot) -> None:
    button = reboot.message.buttons()["Approve"]
    other = PostedMessage("1700000000.999999", "", [])
    await reboot.slack.send_envelope(reboot.slack.button_payload(other, button))
    assert "no longer valid" in await reboot.told()
    assert await reboot.recorded() == ["event.scheduled"]


async def test_without_approve_in_chat_no_click_decides(slack: SlackServer, tmp_path: Path) -> None:
    """Neither one on a button that opens a page, nor one on a button from before."""
    async with announced_reboot(slack, tmp_path, approve_in_chat=False) as reboot:
        assert reboot.message.buttons()["Approve"]["url"].startswith("https://relay.example.com/")
        await reboot.click("Approve")
        assert slack.private_replies == []
        revision = (await reboot.relay.event(reboot.event))["revision"]
        old_button = {
            **reboot.message.buttons()["Approve"],
            "action_id": "approve-1",
            "value": f"approve {revision} {reboot.event.event_id}",
        }
        await slack.send_envelope(slack.button_payload(reboot.message, old_button))
        refusal = "Nothing was decided: decisions are taken on the page behind the links."
        assert await reboot.told() == refusal
        assert await reboot.recorded() == ["event.scheduled"]


# --- the command


async def test_the_command_only_lists_events_with_links(slack: SlackServer, tmp_path: Path) -> None:
    async with announced_reboot(slack, tmp_path, approve_in_chat=False) as reboot:
        event_id = reboot.event.event_id
        for text in ("", "list", event_id[:8].lower()):
            reply = await reboot.command(text, EVE)
            assert reply.text.startswith(f"{event_id[:8]}: Reboot of vm-0, not before ")
            assert "0 of 2 votes" in reply.text
            assert reply.links() == {"Open": f"https://relay.example.com/#/event/prod/{event_id}"}
        for text in ("approve", f"hold {event_id}", "x" * 3000):
            reply = await reboot.command(text)
            assert reply.text.startswith("No event of the document begins with ")
        assert await reboot.recorded() == ["event.scheduled"]


async def test_the_command_lists_fifteen_events_at_most(slack: SlackServer, tmp_path: Path) -> None:
    sink = slack.settings(match={"resources": ["db-*"]})
    async with stage(tmp_path, [sink], approvals=VOTERS, public_url=None) as relay:
        await eventually(lambda: len(slack.sockets) == 1)
        relay.reboot("vm-0")
        listed = await slack.send_envelope(slack.command_payload("list"), "slash_commands")
        assert listed is not None
        assert "Azure has announced nothing." in listed["text"]
        for number in range(17):
            relay.reboot(f"db-{number}")
        await eventually(lambda: bool(slack.channel_messages()))
        await relay.settle()
        listed = await slack.send_envelope(slack.command_payload("list"), "slash_commands")
        assert listed is not None
        text = PostedMessage("", listed["text"], listed["blocks"]).text_of_blocks()
        assert text.count("Reboot of db-") == 15
        assert "vm-0" not in text
        assert text.endswith("… and 2 more.")
        assert "Open" not in text


@pytest.mark.usefixtures("impatient")
async def test_guests_and_other_channels_are_told_nothing(reboot: AnnouncedReboot) -> None:
    assert "the channel in which" in (await reboot.command("", channel_id="C0OTHER")).text
    reboot.slack.users[EVE] = member(EVE, is_restricted=True)
    assert (await reboot.command("", EVE)).text == f"Nothing was decided: {GUEST}."
    reboot.slack.failures["users.info"] = never_answers
    assert "Try again in a moment" in (await reboot.command("", BOB)).text


# --- what cannot be read

SLACK = SlackServer()
MESSAGE = PostedMessage("1700000000.000001", "text", [])
BUTTON = {
    "action_id": "approve-1",
    "text": {"type": "plain_text", "text": "Approve"},
    "value": "approve 3f E-1",
}
CLICK = SLACK.button_payload(MESSAGE, BUTTON)
(ACTION,) = CLICK["actions"]
COMMAND = SLACK.command_payload("list")


@given(
    st.text(min_size=1, max_size=256).filter(
        lambda text: all(ord(char) > 31 and not 126 < ord(char) < 160 for char in text)
    )
)
def test_a_click_returns_the_decision_of_its_button(event_id: str) -> None:
    button = Button(
        decision="hold", label="Hold", event_id=event_id, revision="3f" * 16, question=()
    )
    click, decision = parse_click({**CLICK, "actions": [{**ACTION, "value": button_value(button)}]})
    assert decision == ButtonDecision(decision="hold", revision="3f" * 16, event_id=event_id)
    assert click.principal == ANN
    assert click.message_ref == f"{CHANNEL}/{MESSAGE.ts}"


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "view_submission"},
        {"actions": []},
        {"actions": [{**ACTION, "value": "approve"}]},
        {"actions": [{**ACTION, "value": "start 3f E-1"}]},
        {"actions": [{**ACTION, "value": "approve 3f \x07"}]},
        {"actions": [{**ACTION, "value": f"approve 3f {'E' * 300}"}]},
        {"actions": [{**ACTION, "value": 7}]},
        {"team": None},
        {"user": {"id": ["U1"]}},
        {"user": {"id": "alice"}},
        {"container": {"type": "view", "view_id": "V1"}},
        {"container": {**CLICK["container"], "message_ts": "1e9"}},
        {"trigger_id": ""},
        {"trigger_id": "x" * 1000},
    ],
    ids=str,
)
def test_a_malformed_click_is_unreadable(changes: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        parse_click(CLICK | changes)


def test_a_malformed_command_is_unreadable() -> None:
    for changes in ({"user_id": "alice"}, {"team_id": ""}, {"text": "x" * 5000}):
        with pytest.raises(Unreadable):
            parse_command(COMMAND | changes)


def paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(document, dict | list):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield from paths(document[key], (*path, key))


@given(st.sampled_from([path for path in paths(CLICK) if path]), ANY_JSON, st.booleans())
def test_an_altered_click_is_read_or_unreadable(
    path: tuple[Any, ...], value: Any, is_removed: bool
) -> None:
    click = copy.deepcopy(CLICK)
    parent: Any = click
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    if is_removed:
        del parent[path[-1]]
    with suppress(Unreadable):
        parse_click(click)
