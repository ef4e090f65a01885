"""The slash command: it lists events and takes decisions, but approves no unseen state."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.chat.cards.card import Button
from relay.chat.platforms.slack.requests import (
    ACTION_TOKEN_LIFETIME,
    ButtonDecision,
    SlashCommand,
    is_action_token_valid,
    make_action_token,
    parse_click_or_command_http_body,
)
from relay.simulator import Event
from tests.approvals.manual_clock import NOON
from tests.chat.running_relay import Stage, rule, stage
from tests.chat.slack_block_kit import is_valid_block_kit
from tests.chat.slack_server import (
    ALICE,
    BOB,
    EVE,
    TEAM,
    PostedMessage,
    RelayResponse,
    SlackServer,
    encode_form,
    member,
    never_answers,
    running_slack,
)
from tests.eventually import eventually

VOTERS = {"rules": [rule(2, f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")]}


@dataclass(frozen=True, slots=True)
class CommandChannel:
    """A channel in which people type commands."""

    slack: SlackServer
    relay: Stage

    async def run_command(self, text: str, user_id: str = ALICE, **changes: Any) -> PostedMessage:
        """Type a command and return the reply, which only that person sees."""
        payload = self.slack.command_payload(text, user_id, **changes)
        return reply_of(await self.slack.call_relay(payload))

    async def reply_text(self, text: str, user_id: str = ALICE, **changes: Any) -> str:
        """Type a command and return what the reply says."""
        return (await self.run_command(text, user_id, **changes)).text_of_blocks()

    async def votes(self, event: Event) -> list[dict[str, Any]]:
        """Return the decisions that are recorded for an event."""
        votes: list[dict[str, Any]] = (await self.relay.event(event))["votes"]
        return votes

    async def wait_for_messages(self, count: int = 1) -> None:
        """Return when the channel shows so many events, and the store knows their messages."""
        await eventually(lambda: len(self.slack.channel_messages()) >= count)
        await self.relay.settle()


def reply_of(response: RelayResponse) -> PostedMessage:
    """Return the reply in a response to a command."""
    assert response.status == 200
    assert response.elapsed < 3 + 7  # for a machine that stands still
    assert response.body is not None
    assert response.body["response_type"] == "ephemeral"
    assert is_valid_block_kit(response.body["blocks"])
    return PostedMessage("1700000001.000001", response.body["text"], response.body["blocks"])


@asynccontextmanager
async def command_channel(
    directory: Path, *, public_url: str | None = "https://relay.example.com", **settings: Any
) -> AsyncIterator[CommandChannel]:
    """Run a relay with a channel in which the command works."""
    async with running_slack() as slack:
        sink = slack.settings(**{"approve_in_chat": True, **settings})
        async with stage(directory, [sink], approvals=VOTERS, public_url=public_url) as relay:
            slack.request_url = f"{relay.url}/v1/chat/ops"
            yield CommandChannel(slack, relay)


async def test_list_shows_the_announced_events(tmp_path: Path) -> None:
    async with command_channel(tmp_path) as channel:
        assert await channel.reply_text("list") == "Azure has announced nothing."
        event = channel.relay.reboot("vm-0")
        await channel.wait_for_messages()
        text = await channel.reply_text("")
        assert text.startswith(f"{event.event_id[:8]}  Reboot of vm-0, not before ")
        assert text.endswith(", 0 of 2 votes")


async def test_list_shows_only_events_that_match_the_sink(tmp_path: Path) -> None:
    async with command_channel(tmp_path, match={"resources": ["db-*"]}) as channel:
        channel.relay.reboot("vm-0")
        channel.relay.reboot("db-0")
        await channel.wait_for_messages()
        assert "vm-0" not in await channel.reply_text("list")


async def test_approve_shows_the_event_with_a_button_that_votes(tmp_path: Path) -> None:
    async with command_channel(tmp_path) as channel:
        event = channel.relay.reboot("vm-0")
        await channel.wait_for_messages()
        card = await channel.run_command(f"approve {event.event_id[:4].lower()}")
        assert "Votes: 0 of 2" in card.text_of_blocks()
        assert set(card.buttons()) == {"Approve"}
        assert await channel.votes(event) == []
        click = channel.slack.button_payload(card.buttons()["Approve"], card.ts)
        assert (await channel.slack.call_relay(click)).status == 200
        (vote,) = await channel.votes(event)
        assert vote["principal"] == f"slack:{TEAM}/{ALICE}"
        await eventually(lambda: len(channel.slack.private_replies) == 1)
        (reply,) = channel.slack.private_replies
        assert reply["replace_original"] is True
        assert reply["text"].startswith("Your vote is recorded: 1 of 2 votes.")


async def test_a_button_of_an_ephemeral_card_works_for_one_person_and_decision_only(
    tmp_path: Path,
) -> None:
    async with command_channel(tmp_path) as channel:
        slack = channel.slack
        event, other_event = channel.relay.reboot("vm-0"), channel.relay.reboot("vm-1")
        await channel.wait_for_messages(2)
        card = await channel.run_command(f"approve {event.event_id}")
        button = card.buttons()["Approve"]
        decision, revision, action_token, event_id = button["value"].split(" ", 3)
        expires, digest = action_token.split(".")
        assert decision == "approve"
        altered_values = {
            "other decision": f"hold {revision} {action_token} {event_id}",
            "other revision": f"approve {'0' * len(revision)} {action_token} {event_id}",
            "other event": f"approve {revision} {action_token} {other_event.event_id}",
            "other expiry": f"approve {revision} {int(expires) - 1}.{digest} {event_id}",
            "other digest": f"approve {revision} {expires}.{'0' * 64} {event_id}",
            "no token": f"approve {revision} - {event_id}",
            "expired": f"approve {revision} 1.{digest} {event_id}",
        }
        clicks = {
            name: slack.button_payload({**button, "value": value}, card.ts)
            for name, value in altered_values.items()
        }
        clicks["other person"] = slack.button_payload(button, card.ts, user_id=BOB)
        clicks["other channel"] = slack.button_payload(
            button,
            card.ts,
            channel={"id": "C0OTHER"},
            container={
                "type": "message",
                "message_ts": card.ts,
                "channel_id": "C0OTHER",
                "is_ephemeral": True,
            },
        )
        message = slack.channel_messages()[0]
        clicks["message in the channel"] = slack.button_payload(button, message.ts, message=message)
        for count, (name, click) in enumerate(clicks.items(), start=1):
            assert (await slack.call_relay(click)).status == 200, name
            await eventually(lambda count=count: len(slack.private_replies) == count)
            assert "no longer valid" in slack.private_replies[-1]["text"], name
        assert await channel.votes(event) == []
        assert await channel.votes(other_event) == []


async def test_a_button_of_one_sink_decides_nothing_in_another_of_the_same_app(
    tmp_path: Path,
) -> None:
    async with running_slack() as slack:
        sinks = [
            slack.settings(name="watchers", approve_in_chat=True, resources=["db-*"]),
            slack.settings(name="leads", channel="C0LEADS", approve_in_chat=True),
        ]
        async with stage(tmp_path, sinks, approvals=VOTERS) as relay:
            event = relay.reboot("vm-0")
            await eventually(lambda: bool(slack.channel_messages()))
            slack.request_url = f"{relay.url}/v1/chat/watchers"
            command = slack.command_payload(f"approve {event.event_id}")
            card = reply_of(await slack.call_relay(command))
            for sink, reply in (
                ("watchers", "may not decide for vm-0"),
                ("leads", "no longer valid"),
            ):
                slack.request_url = f"{relay.url}/v1/chat/{sink}"
                click = slack.button_payload(card.buttons()["Approve"], card.ts)
                assert (await slack.call_relay(click)).status == 200
                await eventually(
                    lambda reply=reply: any(
                        reply in answer["text"] for answer in slack.private_replies
                    )
                )
            assert (await relay.event(event))["votes"] == []


@pytest.mark.parametrize(
    ("seconds_later", "is_valid"),
    [
        pytest.param(0, True, id="at once"),
        pytest.param(ACTION_TOKEN_LIFETIME, True, id="at its expiry"),
        pytest.param(ACTION_TOKEN_LIFETIME + 1, False, id="after its expiry"),
        pytest.param(-1, False, id="before it was made"),
    ],
)
def test_an_action_token_expires_after_a_quarter_of_an_hour(
    seconds_later: float, *, is_valid: bool
) -> None:
    command = parse_click_or_command_http_body(
        encode_form(SlackServer(port=80).command_payload("list"))
    )
    assert isinstance(command, SlashCommand)
    button = Button(decision="approve", label="Approve", event_id="E-1", revision="3f", question=())
    action = ButtonDecision(
        decision="approve",
        revision="3f",
        event_id="E-1",
        action_token=make_action_token("ops", command.actor, button, "xoxb-token", NOON),
    )
    later = NOON + timedelta(seconds=seconds_later)
    assert is_action_token_valid("ops", command.actor, action, "xoxb-token", later) is is_valid
    assert not is_action_token_valid("ops", command.actor, action, "xoxb-other", NOON)


async def test_hold_is_recorded_at_once_with_its_reason(tmp_path: Path) -> None:
    async with command_channel(tmp_path) as channel:
        event = channel.relay.reboot("vm-0")
        await channel.wait_for_messages()
        text = await channel.reply_text(f"hold {event.event_id[:8]} a backup <!channel> runs")
        assert text.startswith("It is on hold; a hold stops this relay alone")
        (hold,) = await channel.votes(event)
        assert hold["decision"] == "hold"
        (message,) = channel.slack.channel_messages()
        await eventually(lambda: "Held by" in message.text_of_blocks())
        await eventually(
            lambda: any(
                "a backup <!channel> runs" in line for line in channel.slack.thread_lines(message)
            )
        )
        posted = channel.slack.messages.values()
        assert all("<!channel>" not in message.text for message in posted)
        card = await channel.run_command(f"release {event.event_id[:8]}")
        assert set(card.buttons()) == {"Release the hold"}
        assert (await channel.relay.event(event))["approval"]["state"] == "held"


async def test_a_repeated_command_holds_once(tmp_path: Path) -> None:
    async with command_channel(tmp_path) as channel:
        event = channel.relay.reboot("vm-0")
        await channel.wait_for_messages()
        command = channel.slack.command_payload(f"hold {event.event_id}")
        for _ in range(2):
            reply_of(await channel.slack.call_relay(command))
        assert len(await channel.votes(event)) == 1


async def test_an_ambiguous_or_unknown_event_prefix_decides_nothing_and_lists_events(
    tmp_path: Path,
) -> None:
    async with command_channel(tmp_path) as channel:
        # EventIds start with one of 16 digits, so two of 17 start with the same one.
        events = [channel.relay.reboot(f"vm-{number}") for number in range(17)]
        prefixes = Counter(event.event_id[0] for event in events)
        ((shared_prefix, _),) = prefixes.most_common(1)
        await channel.wait_for_messages(1)
        text = await channel.reply_text(f"hold {shared_prefix}")
        assert text.startswith(f"More than one event of the document begins with {shared_prefix}.")
        text = await channel.reply_text("approve unknown-event")
        assert text.startswith("No event of the document begins with unknown-event.")
        assert text.endswith("… and 2 more.")
        assert [await channel.votes(event) for event in events] == [[]] * 17


async def test_a_command_of_a_stranger_or_guest_decides_nothing(tmp_path: Path) -> None:
    async with command_channel(tmp_path) as channel:
        event = channel.relay.reboot("vm-0")
        await channel.wait_for_messages()
        assert (
            await channel.reply_text(f"hold {event.event_id}", EVE)
            == f"Nothing was decided: no rule of this relay names you, slack:{TEAM}/{EVE}."
        )
        channel.slack.users[ALICE] = member(ALICE, is_restricted=True)
        for command in ("list", f"hold {event.event_id}"):
            text = await channel.reply_text(command)
            assert text == "Nothing was decided: guests cannot decide."
        assert await channel.votes(event) == []


@pytest.mark.usefixtures("impatient")
async def test_a_command_decides_nothing_while_slack_does_not_identify_its_author(
    tmp_path: Path,
) -> None:
    async with command_channel(tmp_path) as channel:
        event = channel.relay.reboot("vm-0")
        await channel.wait_for_messages()
        channel.slack.failures["users.info"] = never_answers
        assert "Try again" in await channel.reply_text(f"hold {event.event_id}", BOB)
        assert await channel.votes(event) == []


async def test_the_command_works_in_the_sinks_channel_only(tmp_path: Path) -> None:
    async with command_channel(tmp_path) as channel:
        text = await channel.reply_text("list", BOB, channel_id="C0OTHER")
        assert "the channel in which" in text


async def test_an_unknown_command_is_answered_with_the_usage(tmp_path: Path) -> None:
    async with command_channel(tmp_path) as channel:
        for command in ("help", "approve", "reboot everything", "list all", "x" * 3000):
            text = await channel.reply_text(command)
            assert "approve, hold or release, and an EventId" in text


async def test_without_approve_in_chat_each_command_returns_a_new_link(tmp_path: Path) -> None:
    async with command_channel(tmp_path, approve_in_chat=False) as channel:
        event = channel.relay.reboot("vm-0")
        await channel.wait_for_messages()
        urls = {channel.slack.channel_messages()[0].buttons()["Hold"]["url"]}
        for _ in range(2):
            card = await channel.run_command(f"hold {event.event_id[:8]}", EVE)
            urls.add(card.buttons()["Hold"]["url"])
            assert "The page asks for this code: " in card.text_of_blocks()
        assert len(urls) == 3
        assert await channel.votes(event) == []


async def test_without_public_url_the_card_says_that_nothing_can_be_decided(tmp_path: Path) -> None:
    async with command_channel(tmp_path, public_url=None, approve_in_chat=False) as channel:
        event = channel.relay.reboot("vm-0")
        await channel.wait_for_messages()
        card = await channel.run_command(f"approve {event.event_id[:8]}")
        assert card.buttons() == {}
        assert "There is nothing to approve from here now." in card.text_of_blocks()
