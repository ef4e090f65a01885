"""The documentation page about Apprise shows a real text."""

from __future__ import annotations

import re
from pathlib import Path

from relay.chat.cards.event_card import event_card
from relay.chat.platforms.apprise import Services, Settings
from tests.approvals.builders import build_event, build_status
from tests.chat.apprise_server import apprise_url, running_service

PAGES = Path(__file__).parents[2] / "docs" / "chat"


async def test_the_message_on_the_apprise_page_is_what_a_service_gets() -> None:
    reboot = build_event(
        "6F83E8DA-3EB4-4B0A-BFCA-0932494392AD",
        resources=("db-1", "db-2"),
        description="Host server is undergoing maintenance.",
    )
    card = event_card(build_status(reboot), link=lambda *_: None)
    async with running_service() as receiver:
        settings = Settings.model_validate(
            {
                "kind": "apprise",
                "name": "p",
                "urls": [apprise_url(receiver.port)],
                "allow_http": True,
            }
        )
        await Services(settings).post(card)
        title, _, body = receiver.messages[0].partition("\n")
    assert f"```text\n{title}\n\n{body}\n```" in re.sub(
        r"(?m)^   ", "", (PAGES / "apprise.md").read_text()
    )
