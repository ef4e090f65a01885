"""axe-core finds nothing in any view of the page, in light and dark, on a desk and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe  # type: ignore[import-untyped]  # no types
from playwright.async_api import Page

from tests.api.running_relay import SCOPE
from tests.chromium import IN_SESSION_LOOP
from tests.page.scenes import (
    HELD,
    REBOOT,
    attach_parts,
    break_sinks,
    make_busy,
    make_roster,
    page_url,
    run_page_relay,
    show,
)

pytestmark = IN_SESSION_LOOP

LIGHT = {"color_scheme": "light"}
DARK = {
    "color_scheme": "dark",
    "viewport": {"width": 360, "height": 640},
    "has_touch": True,
    "is_mobile": True,
}


async def violations(page: Page) -> list[str]:
    """What axe-core finds wrong, whatever its impact."""
    found: dict[str, Any] = (await Axe().run(page)).response
    assert len(found["passes"]) > 10
    return [
        f"{violation['id']} ({violation['impact']}): {node['html'][:200]}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


@pytest.mark.parametrize("page", [LIGHT, DARK], ids=["light", "dark phone"], indirect=True)
async def test_axe_finds_nothing_in_any_view(page: Page, tmp_path: Path) -> None:
    async with run_page_relay(tmp_path, is_hub=True) as relay:
        attach_parts(relay, roster=make_roster(relay))
        await page.goto(page_url(relay))
        await page.get_by_role("button", name="Continue").click()  # the key is missing
        found = {"key": await violations(page)}
        events = await make_busy(relay)
        await show(page, relay)
        for view, ready in (
            ("", ".event"),
            (f"event/{SCOPE}/{REBOOT}", "#history li"),
            ("log", "#log li"),
            ("fleet", "#scopes table"),
        ):
            await page.goto(page_url(relay, view))
            await page.locator(ready).first.wait_for()
            found[view] = await violations(page)
        await page.goto(page_url(relay, f"event/{SCOPE}/{HELD}/release/x"))
        await page.get_by_role("dialog", name="Release the hold?").wait_for()
        found["link"] = await violations(page)
        await page.keyboard.press("Escape")
        await page.goto(page_url(relay))
        await page.get_by_role("button", name="Hold too").click()
        await page.locator("#decide-notices p").first.wait_for()
        await relay.observe(*events[:1])
        await page.get_by_text("is not in Azure’s document any more").wait_for()
        found["question"] = await violations(page)
        await page.keyboard.press("Escape")
        await break_sinks(relay)
        await page.goto(page_url(relay, "sinks"))
        await page.locator("#dead tr").first.wait_for()
        found["sinks"] = await violations(page)
        relay.server.state.detach_relay()
        await page.locator("#live", has_text="Connection lost").wait_for()
        found["lost"] = await violations(page)
    assert {view: wrong for view, wrong in found.items() if wrong} == {}
