"""From Azure's notice through a Teams card and two votes on the page to the StartRequest."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from playwright.async_api import Page, expect

from tests.chat.running_relay import ALICE, BOB, Stage, rule, stage
from tests.chat.teams_server import TeamsWorkflow, running_workflow
from tests.chromium import IN_SESSION_LOOP
from tests.eventually import eventually

pytestmark = IN_SESSION_LOOP


async def test_two_people_follow_the_links_of_a_card_and_azure_starts(
    page: Page, tmp_path: Path
) -> None:
    async with running_workflow() as workflow_app, _relay(tmp_path, workflow_app) as stage:
        event = stage.reboot("vm-0", "vm-1")
        await eventually(lambda: len(workflow_app.cards) == 1)
        code = re.search(r"\b\d{6}\b", workflow_app.card_texts[0])
        assert code is not None
        for who, outcome in ((ALICE, "Recorded"), (BOB, "Approved")):
            await page.goto("about:blank")
            await page.goto(
                f"{stage.url}/approve#{workflow_app.links(0)['Approve'].partition('#')[2]}"
            )
            await expect(page.get_by_role("heading", level=1)).to_have_text("Reboot of vm-0, vm-1")
            await page.get_by_label("Code in the message").fill(code[0])
            await page.get_by_label("Your key or token").fill(str(who["key"]))
            await page.get_by_label("Reason").fill(f"{who['name']} has looked")
            await page.get_by_role("button", name="Approve", exact=True).click()
            await expect(page.get_by_role("heading", name=outcome, exact=True)).to_be_focused()
        await eventually(lambda: stage.starts(event) == 1)
        votes = (await stage.event(event))["votes"]
        assert [(vote["principal"], vote["channel"]) for vote in votes] == [
            ("client:alice", "page"),
            ("client:bob", "page"),
        ]
        await eventually(
            lambda: any("alice has looked" in text for text in workflow_app.card_texts)
        )


def _relay(folder: Path, workflow_app: TeamsWorkflow) -> AbstractAsyncContextManager[Stage]:
    sink = {"kind": "teams", "name": "ops", "url": workflow_app.url, "allow_http": True}
    return stage(folder, [sink], approvals={"rules": [rule(2, "client:alice", "client:bob")]})
