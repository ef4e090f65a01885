"""In a chat a person has no more rights than with their clients, and than the sink allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chat.running_relay import ALICE as OPERATOR
from tests.chat.running_relay import rule, stage
from tests.chat.slack_block_kit import text_of_blocks
from tests.chat.slack_server import ALICE, TEAM, running_slack
from tests.chat.test_slack_interactions import AnnouncedReboot, announce_reboot

ANN = f"slack:{TEAM}/{ALICE}"
ALL = ("read", "approve", "hold", "operate")


def client(name: str, *can: str, resources: list[str] | None = None) -> dict[str, Any]:
    """A client of the person in the chat."""
    return {
        "name": name,
        "key": f"bearer-test-key-of-{name}",
        "can": can,
        "resources": resources,
    }


@pytest.mark.parametrize(
    ("clients", "sink", "label", "refusal"),
    [
        pytest.param([], {}, "Approve", None, id="no client"),
        pytest.param([client("ann", *ALL)], {}, "Approve", None, id="client with every right"),
        pytest.param(
            [client("ann", "approve", resources=["vm-*"])],
            {"can": ["approve"], "resources": ["VM-?"]},
            "Approve",
            None,
            id="client and sink with just the rights",
        ),
        pytest.param(
            [client("ann", "read", "hold")], {}, "Approve", "may not approve", id="client's can"
        ),
        pytest.param(
            [client("ann", "approve")], {}, "Hold", "may not hold", id="client's can, for holds"
        ),
        pytest.param(
            [client("ann", *ALL, resources=["db-*"])],
            {},
            "Approve",
            "may not decide for vm-0",
            id="client's resources",
        ),
        pytest.param(
            [client("ann", *ALL), client("ann2", "hold")],
            {},
            "Approve",
            "may not approve",
            id="can of the second client",
        ),
        pytest.param(
            [client("ann", *ALL, resources=["vm-*"]), client("ann2", *ALL, resources=["db-*"])],
            {},
            "Hold",
            "may not decide for vm-0",
            id="resources of the second client",
        ),
        pytest.param(
            [client("ann", *ALL)],
            {"resources": ["db-*"]},
            "Hold",
            "may not decide for vm-0",
            id="sink's resources",
        ),
    ],
)
async def test_a_decision_in_a_chat_needs_the_rights_of_person_and_sink(
    tmp_path: Path,
    clients: list[dict[str, Any]],
    sink: dict[str, Any],
    label: str,
    refusal: str | None,
) -> None:
    people = {"ann": [ANN, *(f"client:{each['name']}" for each in clients)]}
    approvals = {"people": people, "rules": [rule(2, "person:ann", "client:alice", "local:root")]}
    async with (
        running_slack() as slack,
        stage(
            tmp_path,
            [slack.settings(approve_in_chat=True, **sink)],
            approvals=approvals,
            clients=[OPERATOR, *clients],
        ) as relay,
    ):
        reboot = AnnouncedReboot(slack, relay, *await announce_reboot(slack, relay))
        await reboot.click(label)
        if refusal is None:
            assert await reboot.voters() == [ALICE]
        else:
            assert refusal in await reboot.private_reply()
            assert await reboot.voters() == []
            assert await reboot.recorded_events() == ["event.scheduled", "approval.refused"]


async def test_a_chat_shows_only_the_buttons_that_its_can_allows(tmp_path: Path) -> None:
    approvals = {"rules": [rule(1, ANN, "client:alice")]}
    async with (
        running_slack() as slack,
        stage(
            tmp_path, [slack.settings(approve_in_chat=True, can=["hold"])], approvals=approvals
        ) as relay,
    ):
        reboot = AnnouncedReboot(slack, relay, *await announce_reboot(slack, relay))
        assert list(reboot.message.buttons()) == ["Hold"]
        # a button from before the limit
        payload = slack.click_payload(reboot.message, "Hold")
        (action,) = payload["actions"]
        action["value"] = action["value"].replace("hold", "approve", 1)
        await slack.call_relay(payload)
        assert "may not approve" in await reboot.private_reply()
        assert await reboot.recorded_events() == ["event.scheduled", "approval.refused"]
        command = slack.command_payload(f"approve {reboot.event.event_id}")
        answer = await slack.call_relay(command)
        assert answer.body is not None
        assert "There is nothing to approve from here now." in text_of_blocks(answer.body["blocks"])
