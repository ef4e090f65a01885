"""Takes the pictures of docs/chat/page.md and docs/sign-in.md: the page as Chromium shows it.

``python -m docs.chat.page_pictures`` writes them into the directory of this file.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.async_api import Browser, Page

from tests.api.confirmation_links import MessageLinks, post_confirmation, render_message
from tests.api.running_relay import APPROVALS, TWO_VOTES, RunningRelay, make_event, run_relay
from tests.api.signed_in import Desk, run_desk
from tests.chromium import connected, executable, serving

DIRECTORY = Path(__file__).parent
DESKTOP: dict[str, Any] = {
    "color_scheme": "light",
    "viewport": {"width": 620, "height": 400},
    "device_scale_factor": 0.57,
}
PHONE: dict[str, Any] = {"color_scheme": "dark", "viewport": {"width": 320, "height": 560}}
EVENT = {
    "resources": ("WestNO_0", "WestNO_1"),
    "description": "Host server is undergoing maintenance.",
    "duration": None,
}


async def main() -> None:
    """Take all pictures. Raises FileNotFoundError if there is no Chromium."""
    chromium = executable()
    if chromium is None:
        raise FileNotFoundError("expected an installed Chromium, found none")
    with TemporaryDirectory() as directory, serving(chromium, Path(directory)) as address:
        async with connected(address) as browser, _run_relay(directory) as relay:
            await relay.observe(make_event(**EVENT))
            links = await render_message(relay)
            await _take_form(browser, relay, links, "approve", DESKTOP)
            await _take_form(browser, relay, links, "hold", PHONE)
            await post_confirmation(relay, links.tokens["approve"], links.code, by="bob")
            await _take_wrong_code_and_approval(browser, relay, links)
        with TemporaryDirectory() as other:
            async with connected(address) as browser, run_desk(Path(other)) as desk:
                await _take_sign_in(browser, desk)


async def _take_sign_in(browser: Browser, desk: Desk) -> None:
    """Take the form before and after a sign-in."""
    links = await render_message(desk.relay)
    page = await _open_page(browser, desk.relay, links.tokens["approve"], DESKTOP)
    await page.locator("#decide").wait_for()
    await page.locator("#form").screenshot(path=DIRECTORY / "page-sign-in.png")
    await page.locator("#sign-in").click()
    await page.get_by_role("link", name="Ann Example").click()
    await page.locator("#signed-in").wait_for()
    await page.locator("#form").screenshot(path=DIRECTORY / "page-signed-in.png")


def _run_relay(directory: str) -> AbstractAsyncContextManager[RunningRelay]:
    rule = TWO_VOTES | {"runbook": "https://wiki.example.com/reboots"}
    return run_relay(Path(directory), approvals={"rules": [rule], "groups": APPROVALS["groups"]})


async def _take_form(
    browser: Browser,
    relay: RunningRelay,
    links: MessageLinks,
    decision: str,
    device: dict[str, Any],
) -> None:
    page = await _open_page(browser, relay, links.tokens[decision], device)
    await page.locator("#decide").wait_for()
    await page.screenshot(path=DIRECTORY / f"page-{decision}.png", full_page=device is DESKTOP)


async def _take_wrong_code_and_approval(
    browser: Browser, relay: RunningRelay, links: MessageLinks
) -> None:
    page = await _open_page(browser, relay, links.tokens["approve"], DESKTOP)
    await page.locator("#code").fill(links.wrong_code)
    await page.locator("#key").fill("bearer-test-key-of-alice")
    await page.locator("#decide").click()
    await page.locator("#code-wrong:not(:empty)").wait_for()
    await page.locator("#form").screenshot(path=DIRECTORY / "page-wrong-code.png")
    await page.locator("#code").fill(links.code)
    await page.locator("#decide").click()
    await page.get_by_role("heading", name="Approved").wait_for()
    await page.screenshot(path=DIRECTORY / "page-approved.png", full_page=True)


async def _open_page(
    browser: Browser, relay: RunningRelay, token: str, device: dict[str, Any]
) -> Page:
    context = await browser.new_context(locale="en-GB", timezone_id="Europe/Oslo", **device)
    page = await context.new_page()
    await page.goto(f"http://127.0.0.1:{relay.server.port}/approve#{token}")
    return page


if __name__ == "__main__":
    asyncio.run(main())
