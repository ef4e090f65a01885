"""Slack, inward: whose clicks count, and that nothing else ever does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay.simulator import VM, Event, Setup, Simulator
from tests.chat.running_relay import Stage, rule, stage
from tests.chat.slack_server import (
    ALICE,
    BOB,
    CHANNEL,
    EVE,
    TEAM,
    Posted,
    SlackServer,
    error,
    hangs,
    limited,
    member,
    says,
    slack,
)
from tests.journey.relay_process import eventually

OTHERS = "people of other workspaces cannot decide"
VOTERS = {"rules": [rule(2, f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")]}


@dataclass(frozen=True, slots=True)
class Scene:
    """A reboot that is announced, and the message about it."""

    slack: SlackServer
    relay: Stage
    event: Event
    message: Posted

    async def votes(self) -> list[str]:
        """Who has voted, by what is recorded."""
        return [
            one["principal"].rpartition("/")[2]
            for one in (await self.relay.event(self.event))["votes"]
            if one["counts"]
        ]

    async def told(self) -> list[str]:
        """The names of everything that was told about the event."""
        return [
            one["type"].removeprefix("io.imdsrelay.").removesuffix(".v1")
            for one in (await self.relay.event(self.event))["history"]
        ]

    async def hears(self, number: int = 1) -> str:
        """What was said to one person alone, when it has come."""
        await eventually(lambda: len(self.slack.said) >= number)
        said = self.slack.said[-1]
        assert said["response_type"] == "ephemeral"
        assert said["replace_original"] is False
        return str(Posted("", said["text"], said["blocks"]).words())


@asynccontextmanager
async def scene(directory: Path, **settings: Any) -> AsyncIterator[Scene]:
    async with (
        slack() as here,
        stage(
            directory, [here.settings(**{"approve_in_chat": True, **settings})], approvals=VOTERS
        ) as relay,
    ):
        here.relay = f"{relay.url}/v1/chat/ops"
        event = relay.reboot("vm-0")
        await eventually(lambda: len(here.tops()) == 1)
        message = here.tops()[0]
        await eventually(lambda: relay_knows(relay, event))
        yield Scene(here, relay, event, message)


async def relay_knows(relay: Stage, event: Event) -> bool:
    """Whether the message is on record, so that its buttons are known to be ours."""
    return all(one["state"] == "delivered" for one in (await relay.event(event))["deliveries"])


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (member(ALICE, is_restricted=True), "guests cannot decide"),
        (member(ALICE, is_restricted=True, is_ultra_restricted=True), "guests cannot decide"),
        (member(ALICE, deleted=True), "your account is deactivated"),
        (member(ALICE, is_bot=True), "an app cannot decide"),
        (member(ALICE, is_app_user=True), "an app cannot decide"),
        (member(ALICE, is_workflow_bot=True), "a workflow cannot decide"),
        (member(ALICE, is_stranger=True), OTHERS),
        (member(ALICE, team_id="T0OTHER"), OTHERS),
        (
            member(
                ALICE, team_id="T0OTHER", enterprise_user={"enterprise_id": "E1", "teams": [TEAM]}
            ),
            OTHERS,
        ),
        (member(BOB), "Slack does not know you"),
        (
            {key: value for key, value in member(ALICE).items() if key != "is_restricted"},
            "guests cannot decide",
        ),
        (member(ALICE, is_restricted=None), "guests cannot decide"),
    ],
)
async def test_who_is_no_full_member_is_refused_politely_and_burns_nothing(
    tmp_path: Path, record: dict[str, Any], why: str
) -> None:
    """Guests, strangers of shared channels, deactivated users and bots; what Slack leaves out counts against the person."""
    async with scene(tmp_path) as it:
        it.slack.users[ALICE] = record
        click = it.slack.click(it.message, "Approve")
        heard = await it.slack.calls_relay(click)
        assert (heard.status, heard.body) == (200, None)
        assert await it.hears() == f"Nothing was decided: {why}."
        assert await it.told() == ["event.scheduled"]
        it.slack.users[ALICE] = member(ALICE)
        await it.slack.calls_relay(click)
        assert await it.votes() == [ALICE]


async def test_who_is_named_by_no_rule_is_a_stranger_whom_nobody_asks_slack_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as it:
        await it.slack.calls_relay(it.slack.click(it.message, "Hold", EVE))
        heard = await it.slack.calls_relay(it.slack.click(it.message, "Approve", EVE))
        assert heard.status == 200
        assert (
            await it.hears()
            == f"Nothing was decided: no rule of this relay names you, slack:{TEAM}/{EVE}."
        )
        assert it.slack.count("users.info") == 0
        assert await it.told() == ["event.scheduled"]
        assert caplog.text.count(f"slack:{TEAM}/{EVE} was refused") == 1


async def test_a_name_is_nobody(tmp_path: Path) -> None:
    """Everybody can call themselves alice."""
    async with scene(tmp_path) as it:
        it.slack.users[EVE] = member(EVE, name=ALICE, real_name="Alice")
        click = it.slack.click(it.message, "Approve", EVE)
        click["user"]["name"] = click["user"]["username"] = ALICE
        await it.slack.calls_relay(click)
        assert "no rule of this relay names you" in await it.hears()
        assert await it.votes() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"team": {"id": "T0OTHER", "domain": "other"}},
        {"user": {"id": ALICE, "team_id": "T0OTHER"}},
    ],
)
async def test_a_stranger_of_a_shared_channel_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async with scene(tmp_path) as it:
        await it.slack.calls_relay(it.slack.click(it.message, "Approve") | changes)
        assert await it.hears() == "Nothing was decided: people of other workspaces cannot decide."
        assert await it.told() == ["event.scheduled"]


@pytest.mark.parametrize(
    ("organisation", "teams", "counts"),
    [
        ("E0OURS", [TEAM, "T0OTHER"], True),
        ("E0OURS", ["T0OTHER"], False),
        ("E0THEIRS", [TEAM], False),
    ],
)
async def test_somebody_of_the_organisation_counts_who_belongs_to_the_workspace(
    tmp_path: Path, organisation: str, teams: list[str], *, counts: bool
) -> None:
    async with slack() as here:
        here.enterprise = "E0OURS"
        async with stage(
            tmp_path, [here.settings(approve_in_chat=True)], approvals=VOTERS
        ) as relay:
            here.relay = f"{relay.url}/v1/chat/ops"
            here.users[ALICE] = member(
                ALICE,
                team_id="T0OTHER",
                enterprise_user={"enterprise_id": organisation, "teams": teams},
            )
            event = relay.reboot("vm-0")
            await eventually(lambda: len(here.tops()) == 1)
            await eventually(lambda: relay_knows(relay, event))
            await here.calls_relay(
                here.click(here.tops()[0], "Approve")
                | {"user": {"id": ALICE, "team_id": "T0OTHER"}}
            )
            assert len((await relay.event(event))["votes"]) == counts


async def test_a_call_for_another_app_decides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as it:
        await it.slack.calls_relay(it.slack.click(it.message, "Approve", api_app_id="A0OTHER"))
        assert "Try again" in await it.hears()
        assert "take all secrets from one app" in caplog.text
        assert await it.told() == ["event.scheduled"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "trouble",
    [
        hangs,
        limited(30),
        error("missing_scope"),
        says(500),
        error("user_not_found"),
        says(200, body="<html>"),
    ],
)
async def test_where_slack_cannot_say_who_it_is_nothing_is_decided(
    tmp_path: Path, trouble: Any
) -> None:
    async with scene(tmp_path) as it:
        it.slack.trouble["users.info"] = trouble
        click = it.slack.click(it.message, "Approve")
        heard = await it.slack.calls_relay(click)
        assert heard.status == 200
        assert heard.took < 3 + 7  # for a machine that stands still
        assert "Try again in a moment" in await it.hears()
        assert await it.told() == ["event.scheduled"]
        it.slack.trouble.clear()
        await it.slack.calls_relay(click)
        assert await it.votes() == [ALICE]


async def test_a_member_is_asked_about_once_a_minute(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        for label in ("Hold", "Approve"):
            await it.slack.calls_relay(it.slack.click(it.message, label))
        assert it.slack.count("users.info") == 1


def forged(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"secret": "0" * 32}


def old(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"age": 301}


def early(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"age": -303}


def unsigned(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"headers": {"X-Slack-Signature": ""}}


def undated(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"headers": {"X-Slack-Request-Timestamp": "now"}}


def odd(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"headers": {"X-Slack-Signature": "v0=ünïcode"}}


@pytest.mark.parametrize("how", [forged, old, early, unsigned, undated, odd])
async def test_what_slack_did_not_sign_just_now_is_401(
    tmp_path: Path, how: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> None:
    async with scene(tmp_path) as it:
        click = it.slack.click(it.message, "Approve")
        heard = await it.slack.calls_relay(click, **how(click))
        assert heard.status == 401
        assert it.slack.count("users.info") == 0
        assert await it.told() == ["event.scheduled"]


async def test_a_replay_counts_once_even_after_a_restart(tmp_path: Path) -> None:
    """A hold that was released stays released, though its click comes again, signed afresh."""
    async with slack() as here, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        sink = here.settings(approve_in_chat=True)
        async with stage(tmp_path, [sink], approvals=VOTERS, azure=azure) as relay:
            here.relay = f"{relay.url}/v1/chat/ops"
            event = relay.reboot("vm-0")
            await eventually(lambda: len(here.tops()) == 1)
            await eventually(lambda: relay_knows(relay, event))
            (message,) = here.tops()
            held = here.click(message, "Hold")
            await here.calls_relay(held)
            await eventually(lambda: "Release the hold" in message.buttons())
            await here.calls_relay(here.click(message, "Release the hold"))
            assert (await relay.event(event))["approval"]["state"] != "held"
            await here.calls_relay(held)
            assert (await relay.event(event))["approval"]["state"] != "held"
        async with stage(tmp_path, [sink], approvals=VOTERS, azure=azure) as relay:
            here.relay = f"{relay.url}/v1/chat/ops"
            assert (await here.calls_relay(held)).status == 200
            found = await relay.event(event)
            assert found["approval"]["state"] != "held"
            assert [one["decision"] for one in found["votes"]].count("hold") == 1


async def test_a_click_on_a_state_that_has_changed_decides_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        click = it.slack.click(it.message, "Approve")
        before = it.message.buttons()["Approve"]["value"]
        it.relay.azure.update(it.event, notice=3600)
        await eventually(lambda: it.message.buttons()["Approve"]["value"] != before)
        await it.slack.calls_relay(click)
        assert "changed" in await it.hears()
        assert await it.votes() == []
        await it.slack.calls_relay(it.slack.click(it.message, "Approve"))
        assert await it.votes() == [ALICE]


async def test_a_button_counts_only_on_the_message_that_it_was_posted_with(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        click = it.slack.click(it.message, "Approve")
        for container in (
            {
                "type": "message",
                "message_ts": "1700000000.999999",
                "channel_id": CHANNEL,
                "is_ephemeral": False,
            },
            {
                "type": "message",
                "message_ts": it.message.ts,
                "channel_id": CHANNEL,
                "is_ephemeral": True,
            },
        ):
            it.slack.said.clear()
            await it.slack.calls_relay(click | {"container": container})
            await eventually(lambda: len(it.slack.said) == 1)
            assert "not good any more" in it.slack.said[0]["text"]
        other = {
            "channel": {"id": "C0OTHER"},
            "container": {"type": "message", "message_ts": it.message.ts, "channel_id": "C0OTHER"},
        }
        it.slack.said.clear()
        await it.slack.calls_relay(click | other)
        await eventually(lambda: len(it.slack.said) == 1)
        assert await it.told() == ["event.scheduled"]


async def test_two_clicks_of_one_person_are_one_vote(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        await asyncio.gather(
            *(it.slack.calls_relay(it.slack.click(it.message, "Approve")) for _ in range(2))
        )
        assert await it.votes() == [ALICE]
        assert it.relay.starts(it.event) == 0


async def test_fifty_clicks_at_once_are_two_votes_and_one_start(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        clicks = [
            it.slack.click(it.message, "Approve", (ALICE, BOB)[number % 2]) for number in range(50)
        ]
        heard = await asyncio.gather(*map(it.slack.calls_relay, clicks))
        assert {one.status for one in heard} == {200}
        assert sorted(await it.votes()) == [ALICE, BOB]
        assert it.slack.count("users.info") == 2
        await eventually(lambda: it.relay.starts(it.event) == 1)
        await eventually(lambda: it.message.buttons() == {})
        assert it.relay.starts(it.event) == 1


async def test_a_link_button_that_was_clicked_decides_nothing(tmp_path: Path) -> None:
    """Slack tells of its click too, and wants it acknowledged."""
    async with scene(tmp_path, approve_in_chat=False) as it:
        assert it.message.buttons()["Approve"]["url"].startswith(
            "https://relay.example.com/approve#"
        )
        heard = await it.slack.calls_relay(it.slack.click(it.message, "Approve"))
        assert (heard.status, heard.body) == (200, None)
        assert await it.told() == ["event.scheduled"]
        assert it.slack.said == []


async def test_buttons_of_before_decide_nothing_once_the_chat_may_not_approve(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, approve_in_chat=False) as it:
        button = it.message.buttons()["Approve"]
        value = f"approve {(await it.relay.event(it.event))['revision']} - {it.event.event_id}"
        click = it.slack.clicked(
            {**button, "action_id": "approve-1", "value": value}, it.message.ts, message=it.message
        )
        await it.slack.calls_relay(click)
        assert (
            await it.hears()
            == "Nothing was decided: decisions are taken on the page behind the links."
        )
        assert await it.votes() == []


@pytest.mark.parametrize(
    "url",
    [
        "https://evil.example/x",
        "http://169.254.169.254/metadata",
        "",
        "http://127.0.0.1:1/x",
        "file:///etc/passwd",
    ],
)
async def test_a_response_url_that_is_not_slacks_own_is_never_called(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as it:
        heard = await it.slack.calls_relay(
            it.slack.click(it.message, "Approve", EVE, response_url=url)
        )
        assert heard.status == 200
        assert "a response URL was not of 127.0.0.1" in caplog.text


async def test_a_sink_without_a_signing_secret_is_not_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path, approve_in_chat=False, signing_secret=None) as it:
        button = {
            "action_id": "approve-1",
            "value": "approve 3f - E-1",
            "text": {"type": "plain_text", "text": "Approve"},
        }
        heard = await it.slack.calls_relay(
            it.slack.clicked(button, it.message.ts, message=it.message)
        )
        assert heard.status == 401
        assert "sink ops has no signing_secret: nobody calls it" in caplog.text
