"""Slack, the whole way: announced, voted on by two people in the channel, started, ended; over signed calls and over a socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat.running_relay import Stage, rule, stage
from tests.chat.slack_server import ALICE, APP_TOKEN, BOB, TEAM, Heard, Posted, SlackServer, slack
from tests.journey.relay_process import eventually

VOTERS = {"rules": [rule(2, f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")]}


async def click(here: SlackServer, message: Posted, label: str, user: str) -> Heard:
    """Somebody clicks, and the call goes the way that the app is set up for."""
    payload = here.click(message, label, user)
    return await (here.calls_relay(payload) if not here.opened else here.sends(payload))


@pytest.mark.parametrize("way", ["signed calls", "socket"])
async def test_two_people_approve_in_the_channel_and_the_message_tells_it_to_the_end(
    tmp_path: Path, way: str
) -> None:
    async with slack() as here:
        by_socket: dict[str, object] = (
            {"signing_secret": None, "app_token": APP_TOKEN} if way == "socket" else {}
        )
        sink = here.settings(approve_in_chat=True, **by_socket)
        async with stage(tmp_path, [sink], approvals=VOTERS) as relay:
            here.relay = f"{relay.url}/v1/chat/ops"
            if way == "socket":
                await eventually(lambda: len(here.sockets) == 1)
            await story(here, relay)


async def story(here: SlackServer, relay: Stage) -> None:
    event = relay.reboot("vm-0", lasts=2.0)
    await eventually(lambda: len(here.tops()) == 1)
    (message,) = here.tops()
    assert message.words().splitlines()[0] == "🟡 Reboot of vm-0"
    assert f"Votes: 0 of 2; 2 missing, from @{ALICE}, @{BOB}" in message.words()
    assert "whether or not anybody answers" in message.words()
    assert set(message.buttons()) == {"Approve", "Hold"}

    heard = await click(here, message, "Approve", ALICE)
    assert (heard.status, heard.body) == (200, None)
    assert heard.took < 3
    vote = (await relay.event(event))["votes"][0]
    assert (vote["principal"], vote["channel"], vote["counts"]) == (
        f"slack:{TEAM}/{ALICE}",
        "slack",
        True,
    )
    await eventually(lambda: f"Votes: 1 of 2: @{ALICE}; 1 missing, from @{BOB}" in message.words())
    assert relay.starts(event) == 0

    await click(here, message, "Approve", BOB)
    await eventually(lambda: relay.starts(event) == 1)
    await eventually(lambda: "Azure has begun" in message.words())
    await eventually(lambda: "Azure has completed it" in message.words())
    await eventually(lambda: any("It is over" in line for line in here.thread(message)))

    assert message.buttons() == {}
    assert message.words().splitlines() == [
        "⚪ Reboot of vm-0",
        "It is over: Azure has completed it.",
        "Machines: vm-0",
        "What happens: The machine is rebooted: what is in memory is lost.",
        "Who started it: Azure itself",
        "Azure says: Host server is undergoing maintenance.",
        f"{event.event_id} · prod",
    ]
    assert [line.partition(": ")[2] for line in here.thread(message)] == [
        f"@{ALICE} voted to approve, 1 of 2.",
        f"@{BOB} voted to approve, 2 of 2.",
        "Approved by rule reboots: 2 of 2 votes.",
        "Azure accepted the StartRequest.",
        "Azure began, as this relay had approved.",
        "It is over: Azure has completed it.",
    ]
    assert len(here.tops()) == 1
    assert here.said == []
    assert relay.starts(event) == 1
