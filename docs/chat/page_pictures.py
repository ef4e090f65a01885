"""Takes the pictures of docs/chat/page.md: the page itself, as Chromium shows it, of a relay that runs.

``python -m docs.chat.page_pictures`` writes them beside this file.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.async_api import Browser, Page

from tests.api.confirmation_links import MessageLinks, post_confirmation, render_message
from tests.api.running_relay import RunningRelay
from tests.api.running_relay import make_event as announced
from tests.api.running_relay import run_relay as relay_running
from tests.chromium import executable, running

HERE = Path(__file__).parent
DESK: dict[str, Any] = {
    "color_scheme": "light",
    "viewport": {"width": 620, "height": 400},
    "device_scale_factor": 0.62,
}
PHONE: dict[str, Any] = {"color_scheme": "dark", "viewport": {"width": 320, "height": 560}}
SEEN = {
    "resources": ("WestNO_0", "WestNO_1"),
    "description": "Host server is undergoing maintenance.",
    "duration": None,
}


async def main() -> None:
    """Take them all."""
    program = executable()
    if program is None:
        raise FileNotFoundError("expected an installed Chromium, found none")
    with TemporaryDirectory() as folder:
        async with running(program) as browser, relay_running(Path(folder)) as relay:
            await relay.see(announced(**SEEN))
            sent = await render_message(relay)
            await _ready(browser, relay, sent, "approve", DESK)
            await _ready(browser, relay, sent, "hold", PHONE)
            await post_confirmation(relay, sent.tokens["approve"], sent.code, by="bob")
            await _granted(browser, relay, sent)


async def _ready(
    browser: Browser,
    relay: RunningRelay,
    sent: MessageLinks,
    decision: str,
    visitor: dict[str, Any],
) -> None:
    page = await _opened(browser, relay, sent.tokens[decision], visitor)
    await page.locator("#decide").wait_for()
    await page.screenshot(path=HERE / f"page-{decision}.png", full_page=visitor is DESK)


async def _granted(browser: Browser, relay: RunningRelay, sent: MessageLinks) -> None:
    page = await _opened(browser, relay, sent.tokens["approve"], DESK)
    await page.locator("#code").fill(sent.wrong_code)
    await page.locator("#key").fill("key-of-alice")
    await page.locator("#decide").click()
    await page.locator("#code-wrong:not(:empty)").wait_for()
    await page.locator("#form").screenshot(path=HERE / "page-wrong-code.png")
    await page.locator("#code").fill(sent.code)
    await page.locator("#decide").click()
    await page.get_by_role("heading", name="Approved").wait_for()
    await page.screenshot(path=HERE / "page-approved.png", full_page=True)


async def _opened(
    browser: Browser, relay: RunningRelay, token: str, visitor: dict[str, Any]
) -> Page:
    context = await browser.new_context(locale="en-GB", timezone_id="Europe/Oslo", **visitor)
    page = await context.new_page()
    await page.goto(f"http://127.0.0.1:{relay.server.port}/approve#{token}")
    return page


if __name__ == "__main__":
    asyncio.run(main())
