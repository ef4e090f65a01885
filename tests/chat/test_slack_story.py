"""One reboot in Slack from its announcement to its end, over signed requests and Socket Mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat.running_relay import Stage, rule, stage
from tests.chat.slack_server import (
    ALICE,
    APP_TOKEN,
    BOB,
    TEAM,
    PostedMessage,
    RelayResponse,
    SlackServer,
    running_slack,
)
from tests.eventually import eventually

VOTERS = {"rules": [rule(2, f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")]}


async def click(
    slack: SlackServer, message: PostedMessage, label: str, user_id: str
) -> RelayResponse:
    """Click a button. The click reaches the relay in the way that the app is set up for."""
    payload = slack.click_payload(message, label, user_id)
    if slack.opened_sockets:
        return await slack.send_envelope(payload)
    return await slack.call_relay(payload)


@pytest.mark.parametrize("transport", ["signed requests", "socket"])
async def test_two_people_approve_in_the_channel_and_the_message_shows_everything(
    tmp_path: Path, transport: str
) -> None:
    async with running_slack() as slack:
        by_socket: dict[str, object] = (
            {"signing_secret": None, "app_token": APP_TOKEN} if transport == "socket" else {}
        )
        sink = slack.settings(approve_in_chat=True, **by_socket)
        async with stage(tmp_path, [sink], approvals=VOTERS) as relay:
            slack.request_url = f"{relay.url}/v1/chat/ops"
            if transport == "socket":
                await eventually(lambda: len(slack.sockets) == 1)
            await approve_and_end(slack, relay)


async def approve_and_end(slack: SlackServer, relay: Stage) -> None:
    """Announce a reboot, approve it with two votes, and check what the channel shows."""
    event = relay.reboot("vm-0", lasts=2.0)
    await eventually(lambda: len(slack.channel_messages()) == 1)
    (message,) = slack.channel_messages()
    assert message.text_of_blocks().splitlines()[0] == "🟡 Reboot of vm-0"
    assert f"Votes: 0 of 2; 2 missing, from @{ALICE}, @{BOB}" in message.text_of_blocks()
    assert "whether or not anybody answers" in message.text_of_blocks()
    assert set(message.buttons()) == {"Approve", "Hold"}

    response = await click(slack, message, "Approve", ALICE)
    assert (response.status, response.body) == (200, None)
    assert response.elapsed < 3 + 7  # for a machine that stands still
    vote = (await relay.event(event))["votes"][0]
    assert (vote["principal"], vote["channel"], vote["counts"]) == (
        f"slack:{TEAM}/{ALICE}",
        "slack",
        True,
    )
    await eventually(
        lambda: f"Votes: 1 of 2: @{ALICE}; 1 missing, from @{BOB}" in message.text_of_blocks()
    )
    assert relay.starts(event) == 0

    await click(slack, message, "Approve", BOB)
    await eventually(lambda: relay.starts(event) == 1)
    await eventually(lambda: "Azure has begun" in message.text_of_blocks())
    await eventually(lambda: "Azure has completed it" in message.text_of_blocks())
    await eventually(lambda: any("It is over" in line for line in slack.thread_lines(message)))

    assert message.buttons() == {}
    assert message.text_of_blocks().splitlines() == [
        "⚪ Reboot of vm-0",
        "It is over: Azure has completed it.",
        "Machines: vm-0",
        "What happens: The machine is rebooted: what is in memory is lost.",
        "Who started it: Azure itself",
        "Azure says: Host server is undergoing maintenance.",
        f"{event.event_id} · prod",
    ]
    assert [line.partition(": ")[2] for line in slack.thread_lines(message)] == [
        f"@{ALICE} voted to approve, 1 of 2.",
        f"@{BOB} voted to approve, 2 of 2.",
        "Approved by rule reboots: 2 of 2 votes.",
        "Azure accepted the StartRequest.",
        "Azure began, as this relay had approved.",
        "It is over: Azure has completed it.",
    ]
    assert len(slack.channel_messages()) == 1
    assert slack.private_replies == []
    assert relay.starts(event) == 1
