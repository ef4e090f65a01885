"""Whose clicks count in Slack, and which requests have no effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay.simulator import VM, Event, Setup, Simulator
from tests.chat.running_relay import Stage, rule, stage
from tests.chat.slack_block_kit import text_of_blocks
from tests.chat.slack_server import (
    ALICE,
    BOB,
    CHANNEL,
    EVE,
    TEAM,
    FailureHandler,
    PostedMessage,
    RelayResponse,
    SlackServer,
    api_error,
    member,
    never_answers,
    rate_limited,
    responds,
    running_slack,
)
from tests.eventually import eventually

GUEST = "guests cannot decide"
OTHER_WORKSPACE = "people of other workspaces cannot decide"
VOTERS = {"rules": [rule(2, f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")]}


@dataclass(frozen=True, slots=True)
class AnnouncedReboot:
    """A relay with an announced reboot, and the message about reboot."""

    slack: SlackServer
    relay: Stage
    event: Event
    message: PostedMessage

    async def voters(self) -> list[str]:
        """Return the user ids of the decisions that count."""
        return [
            vote["principal"].rpartition("/")[2]
            for vote in (await self.relay.event(self.event))["votes"]
            if vote["counts"]
        ]

    async def recorded_events(self) -> list[str]:
        """Return the names of the CloudEvents about the reboot."""
        return [
            entry["type"].removeprefix("io.imdsrelay.").removesuffix(".v1")
            for entry in (await self.relay.event(self.event))["history"]
        ]

    async def click(self, label: str, user_id: str = ALICE, **changes: Any) -> RelayResponse:
        """Click a button of the message."""
        payload = self.slack.click_payload(self.message, label, user_id, **changes)
        return await self.slack.call_relay(payload)

    async def private_reply(self) -> str:
        """Return the text of the newest private reply, once one has come."""
        await eventually(lambda: bool(self.slack.private_replies))
        reply = self.slack.private_replies[-1]
        assert reply["response_type"] == "ephemeral"
        assert reply["replace_original"] is False
        return text_of_blocks(reply["blocks"])


@asynccontextmanager
async def announced_reboot(directory: Path, **settings: Any) -> AsyncIterator[AnnouncedReboot]:
    """Run a relay whose channel shows a reboot."""
    async with running_slack() as slack:
        sink = slack.settings(**{"approve_in_chat": True, **settings})
        async with stage(directory, [sink], approvals=VOTERS) as relay:
            event, message = await announce_reboot(slack, relay)
            yield AnnouncedReboot(slack, relay, event, message)


async def announce_reboot(slack: SlackServer, relay: Stage) -> tuple[Event, PostedMessage]:
    """Announce a reboot, and return it and its message once the store knows the message."""
    slack.request_url = f"{relay.url}/v1/chat/ops"
    event = relay.reboot("vm-0")

    async def is_delivered() -> bool:
        deliveries = (await relay.event(event))["deliveries"]
        return all(delivery["state"] == "delivered" for delivery in deliveries)

    await eventually(lambda: len(slack.channel_messages()) == 1)
    await eventually(is_delivered)
    return event, slack.channel_messages()[0]


USER_WITHOUT_FLAG = {key: value for key, value in member(ALICE).items() if key != "is_restricted"}
MEMBER_OF_ENTERPRISE = member(
    ALICE, team_id="T0OTHER", enterprise_user={"enterprise_id": "E1", "teams": [TEAM]}
)


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        pytest.param(member(ALICE, is_restricted=True), GUEST, id="guest"),
        pytest.param(
            member(ALICE, is_restricted=True, is_ultra_restricted=True),
            GUEST,
            id="single-channel guest",
        ),
        pytest.param(member(ALICE, deleted=True), "your account is deactivated", id="deactivated"),
        pytest.param(member(ALICE, is_bot=True), "an app cannot decide", id="bot"),
        pytest.param(member(ALICE, is_app_user=True), "an app cannot decide", id="app user"),
        pytest.param(
            member(ALICE, is_workflow_bot=True), "a workflow cannot decide", id="workflow"
        ),
        pytest.param(member(ALICE, is_stranger=True), OTHER_WORKSPACE, id="stranger"),
        pytest.param(member(ALICE, team_id="T0OTHER"), OTHER_WORKSPACE, id="other workspace"),
        pytest.param(MEMBER_OF_ENTERPRISE, OTHER_WORKSPACE, id="enterprise that is not ours"),
        pytest.param(member(BOB), "Slack does not know you", id="other user"),
        pytest.param(USER_WITHOUT_FLAG, GUEST, id="missing flag"),
        pytest.param(member(ALICE, is_restricted=None), GUEST, id="flag is null"),
    ],
)
async def test_only_a_full_member_can_decide(
    tmp_path: Path, user: dict[str, Any], reason: str
) -> None:
    """A refused click has no effect: the same click counts once its author is a full member."""
    async with announced_reboot(tmp_path) as reboot:
        reboot.slack.users[ALICE] = user
        click = reboot.slack.click_payload(reboot.message, "Approve")
        response = await reboot.slack.call_relay(click)
        assert (response.status, response.body) == (200, None)
        assert await reboot.private_reply() == f"Nothing was decided: {reason}."
        assert await reboot.recorded_events() == ["event.scheduled"]
        reboot.slack.users[ALICE] = member(ALICE)
        await reboot.slack.call_relay(click)
        assert await reboot.voters() == [ALICE]


async def test_a_person_whom_no_rule_names_is_refused_without_asking_slack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with announced_reboot(tmp_path) as reboot:
        await reboot.click("Hold", EVE)
        assert (await reboot.click("Approve", EVE)).status == 200
        assert (
            await reboot.private_reply()
            == f"Nothing was decided: no rule of this relay names you, slack:{TEAM}/{EVE}."
        )
        assert reboot.slack.call_count("users.info") == 0
        assert await reboot.recorded_events() == ["event.scheduled"]
        assert caplog.text.count(f"slack:{TEAM}/{EVE} was refused") == 1


async def test_names_identify_nobody(tmp_path: Path) -> None:
    """Everybody can choose the name alice."""
    async with announced_reboot(tmp_path) as reboot:
        reboot.slack.users[EVE] = member(EVE, name=ALICE, real_name="Alice")
        click = reboot.slack.click_payload(reboot.message, "Approve", EVE)
        click["user"]["name"] = click["user"]["username"] = ALICE
        await reboot.slack.call_relay(click)
        assert "no rule of this relay names you" in await reboot.private_reply()
        assert await reboot.voters() == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"team": {"id": "T0OTHER", "domain": "other"}}, id="in another workspace"),
        pytest.param({"user": {"id": ALICE, "team_id": "T0OTHER"}}, id="from another workspace"),
    ],
)
async def test_a_member_of_another_workspace_is_refused_in_a_shared_channel(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async with announced_reboot(tmp_path) as reboot:
        await reboot.click("Approve", **changes)
        assert await reboot.private_reply() == f"Nothing was decided: {OTHER_WORKSPACE}."
        assert await reboot.recorded_events() == ["event.scheduled"]


@pytest.mark.parametrize(
    ("enterprise_id", "teams", "votes"),
    [
        pytest.param("E0OURS", [TEAM, "T0OTHER"], 1, id="belongs to this workspace"),
        pytest.param("E0OURS", ["T0OTHER"], 0, id="belongs to another workspace"),
        pytest.param("E0THEIRS", [TEAM], 0, id="belongs to another enterprise"),
    ],
)
async def test_a_member_of_the_enterprise_can_decide_in_their_own_workspaces(
    tmp_path: Path, enterprise_id: str, teams: list[str], votes: int
) -> None:
    async with running_slack() as slack:
        slack.enterprise_id = "E0OURS"
        slack.users[ALICE] = member(
            ALICE,
            team_id="T0OTHER",
            enterprise_user={"enterprise_id": enterprise_id, "teams": teams},
        )
        sink = slack.settings(approve_in_chat=True)
        async with stage(tmp_path, [sink], approvals=VOTERS) as relay:
            event, message = await announce_reboot(slack, relay)
            user = {"id": ALICE, "team_id": "T0OTHER"}
            await slack.call_relay(slack.click_payload(message, "Approve", user=user))
            assert len((await relay.event(event))["votes"]) == votes


async def test_a_click_for_another_app_decides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with announced_reboot(tmp_path) as reboot:
        await reboot.click("Approve", api_app_id="A0OTHER")
        assert "Try again" in await reboot.private_reply()
        assert "take all secrets from one app" in caplog.text
        assert await reboot.recorded_events() == ["event.scheduled"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(never_answers, id="no answer"),
        pytest.param(rate_limited(30), id="rate limit"),
        pytest.param(api_error("missing_scope"), id="missing scope"),
        pytest.param(responds(500), id="server error"),
        pytest.param(api_error("user_not_found"), id="unknown user"),
        pytest.param(responds(200, body="<html>"), id="not JSON"),
    ],
)
async def test_nothing_is_decided_while_slack_cannot_identify_the_person(
    tmp_path: Path, failure: FailureHandler
) -> None:
    async with announced_reboot(tmp_path) as reboot:
        reboot.slack.failures["users.info"] = failure
        click = reboot.slack.click_payload(reboot.message, "Approve")
        response = await reboot.slack.call_relay(click)
        assert response.status == 200
        assert response.elapsed < 3 + 7  # for a machine that stands still
        assert "Try again in a moment" in await reboot.private_reply()
        assert await reboot.recorded_events() == ["event.scheduled"]
        reboot.slack.failures.clear()
        await reboot.slack.call_relay(click)
        assert await reboot.voters() == [ALICE]


async def test_slack_is_asked_about_a_member_once_a_minute(tmp_path: Path) -> None:
    async with announced_reboot(tmp_path) as reboot:
        for label in ("Hold", "Approve"):
            await reboot.click(label)
        assert reboot.slack.call_count("users.info") == 1


@pytest.mark.parametrize(
    "signing",
    [
        pytest.param({"secret": "0" * 32}, id="other secret"),
        pytest.param({"age": 301}, id="too old"),
        pytest.param({"age": -303}, id="too far in the future"),
        pytest.param({"headers": {"X-Slack-Signature": ""}}, id="no signature"),
        pytest.param({"headers": {"X-Slack-Request-Timestamp": "now"}}, id="no timestamp"),
        pytest.param({"headers": {"X-Slack-Signature": "v0=ünïcode"}}, id="not ASCII"),
    ],
)
async def test_a_request_without_a_fresh_signature_of_slack_is_401(
    tmp_path: Path, signing: dict[str, Any]
) -> None:
    async with announced_reboot(tmp_path) as reboot:
        click = reboot.slack.click_payload(reboot.message, "Approve")
        response = await reboot.slack.call_relay(click, **signing)
        assert response.status == 401
        assert reboot.slack.call_count("users.info") == 0
        assert await reboot.recorded_events() == ["event.scheduled"]


async def test_a_replayed_click_has_no_effect_even_after_a_restart(tmp_path: Path) -> None:
    """A released hold stays released, although the click on Hold comes again, newly signed."""
    async with running_slack() as slack, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        sink = slack.settings(approve_in_chat=True)
        async with stage(tmp_path, [sink], approvals=VOTERS, azure=azure) as relay:
            event, message = await announce_reboot(slack, relay)
            hold = slack.click_payload(message, "Hold")
            await slack.call_relay(hold)
            await eventually(lambda: "Release the hold" in message.buttons())
            await slack.call_relay(slack.click_payload(message, "Release the hold"))
            assert (await relay.event(event))["approval"]["state"] != "held"
            await slack.call_relay(hold)
            assert (await relay.event(event))["approval"]["state"] != "held"
        async with stage(tmp_path, [sink], approvals=VOTERS, azure=azure) as relay:
            slack.request_url = f"{relay.url}/v1/chat/ops"
            assert (await slack.call_relay(hold)).status == 200
            document = await relay.event(event)
            assert document["approval"]["state"] != "held"
            assert [vote["decision"] for vote in document["votes"]].count("hold") == 1


async def test_a_click_on_an_outdated_state_decides_nothing(tmp_path: Path) -> None:
    async with announced_reboot(tmp_path) as reboot:
        click = reboot.slack.click_payload(reboot.message, "Approve")
        old_value = reboot.message.buttons()["Approve"]["value"]
        reboot.relay.azure.update_event(reboot.event, notice=3600)
        await eventually(lambda: reboot.message.buttons()["Approve"]["value"] != old_value)
        await reboot.slack.call_relay(click)
        assert "changed" in await reboot.private_reply()
        assert await reboot.voters() == []
        await reboot.click("Approve")
        assert await reboot.voters() == [ALICE]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"message_ts": "1700000000.999999"}, id="other message"),
        pytest.param({"is_ephemeral": True}, id="ephemeral message"),
        pytest.param({"channel_id": "C0OTHER"}, id="other channel"),
    ],
)
async def test_a_button_works_only_in_the_message_that_it_was_posted_with(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async with announced_reboot(tmp_path) as reboot:
        container = {
            "type": "message",
            "message_ts": reboot.message.ts,
            "channel_id": CHANNEL,
            "is_ephemeral": False,
            **changes,
        }
        await reboot.click("Approve", container=container, channel={"id": container["channel_id"]})
        await eventually(lambda: bool(reboot.slack.private_replies))
        assert "no longer valid" in reboot.slack.private_replies[0]["text"]
        assert await reboot.recorded_events() == ["event.scheduled"]


async def test_two_simultaneous_clicks_of_one_person_are_one_vote(tmp_path: Path) -> None:
    async with announced_reboot(tmp_path) as reboot:
        await asyncio.gather(*(reboot.click("Approve") for _ in range(2)))
        assert await reboot.voters() == [ALICE]
        assert reboot.relay.starts(reboot.event) == 0


async def test_fifty_simultaneous_clicks_of_two_people_are_two_votes_and_one_start(
    tmp_path: Path,
) -> None:
    async with announced_reboot(tmp_path) as reboot:
        user_ids = [ALICE, BOB] * 25
        responses = await asyncio.gather(
            *(reboot.click("Approve", user_id) for user_id in user_ids)
        )
        assert {response.status for response in responses} == {200}
        assert sorted(await reboot.voters()) == [ALICE, BOB]
        assert reboot.slack.call_count("users.info") == 2
        await eventually(lambda: reboot.relay.starts(reboot.event) == 1)
        await eventually(lambda: reboot.message.buttons() == {})
        assert reboot.relay.starts(reboot.event) == 1


async def test_a_click_on_a_link_button_is_acknowledged_and_decides_nothing(
    tmp_path: Path,
) -> None:
    async with announced_reboot(tmp_path, approve_in_chat=False) as reboot:
        url = reboot.message.buttons()["Approve"]["url"]
        assert url.startswith("https://relay.example.com/approve#")
        response = await reboot.click("Approve")
        assert (response.status, response.body) == (200, None)
        assert await reboot.recorded_events() == ["event.scheduled"]
        assert reboot.slack.private_replies == []


async def test_old_buttons_decide_nothing_once_approve_in_chat_is_off(tmp_path: Path) -> None:
    async with announced_reboot(tmp_path, approve_in_chat=False) as reboot:
        revision = (await reboot.relay.event(reboot.event))["revision"]
        old_button = {
            **reboot.message.buttons()["Approve"],
            "action_id": "approve-1",
            "value": f"approve {revision} - {reboot.event.event_id}",
        }
        click = reboot.slack.button_payload(old_button, reboot.message.ts, message=reboot.message)
        await reboot.slack.call_relay(click)
        assert (
            await reboot.private_reply()
            == "Nothing was decided: decisions are taken on the page behind the links."
        )
        assert await reboot.recorded_events() == ["event.scheduled"]


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("https://evil.example/x", id="other host"),
        pytest.param("http://169.254.169.254/metadata", id="metadata service"),
        pytest.param("", id="empty"),
        pytest.param("http://127.0.0.1:1/x", id="other port"),
        pytest.param("file:///etc/passwd", id="file"),
    ],
)
async def test_a_response_url_that_is_not_slacks_is_never_called(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with announced_reboot(tmp_path) as reboot:
        response = await reboot.click("Approve", EVE, response_url=url)
        assert response.status == 200
        assert "ignored a response URL: expected a URL of 127.0.0.1" in caplog.text


async def test_a_sink_without_a_signing_secret_refuses_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with announced_reboot(tmp_path, approve_in_chat=False, signing_secret=None) as reboot:
        button = {
            "action_id": "approve-1",
            "value": "approve 3f - E-1",
            "text": {"type": "plain_text", "text": "Approve"},
        }
        click = reboot.slack.button_payload(button, reboot.message.ts, message=reboot.message)
        assert (await reboot.slack.call_relay(click)).status == 401
        assert "sink ops has no signing_secret: Slack must not call it" in caplog.text
