"""Takes the pictures of docs/page.md: the page of a running relay, as Chromium shows it.

``python -m docs.page.pictures`` writes them into the directory of this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.async_api import Browser, Page

from relay.events.model import ScheduledEvent
from tests.api.running_relay import SCOPE, RunningRelay
from tests.chromium import running_chromium
from tests.page.scenes import (
    HELD,
    REBOOT,
    attach_parts,
    break_sinks,
    live_through,
    make_busy,
    make_roster,
    make_scopes,
    open_view,
    page_url,
    run_page_relay,
    visitor,
)

DIRECTORY = Path(__file__).parent
DESKTOP: dict[str, Any] = {
    "color_scheme": "light",
    "viewport": {"width": 1040, "height": 640},
    "device_scale_factor": 0.8,
}
DARK: dict[str, Any] = {**DESKTOP, "color_scheme": "dark"}
PHONE: dict[str, Any] = {
    "color_scheme": "dark",
    "viewport": {"width": 360, "height": 720},
    "has_touch": True,
    "is_mobile": True,
}


async def main() -> None:
    """Take all pictures. Raises FileNotFoundError if there is no Chromium."""
    async with running_chromium() as browser:
        await _take_quiet(browser)
        await _take_busy(browser)
        await _take_story(browser)
        await _take_trouble(browser)
        await _take_fleet(browser)


@asynccontextmanager
async def _relay(**settings: Any) -> AsyncIterator[RunningRelay]:
    with TemporaryDirectory() as folder:
        async with run_page_relay(Path(folder), **settings) as relay:
            yield relay


async def _shoot(page: Page, name: str, *, full: bool = True) -> None:
    await page.screenshot(path=DIRECTORY / f"{name}.png", full_page=full)


async def _take_quiet(browser: Browser) -> None:
    """The field for a key, a wrong key, and nothing that is scheduled."""
    async with _relay() as relay:
        page = await (await visitor(browser, by=None, **DESKTOP)).new_page()
        await page.goto(page_url(relay))
        await page.get_by_label("Your key or token").fill("a-wrong-key-of-nobody")
        await page.get_by_role("button", name="Continue").click()
        await page.locator("#key-wrong:not(:empty)").wait_for()
        await _shoot(page, "key")
        page = await open_view(await visitor(browser, **DESKTOP), relay)
        await page.get_by_text("Nothing is scheduled.").wait_for()
        await _shoot(page, "quiet")


async def _take_busy(browser: Browser) -> None:
    async with _relay() as relay:
        events = await make_busy(relay)
        desk, phone = await visitor(browser, **DESKTOP), await visitor(browser, **PHONE)
        page = await open_view(desk, relay)
        await page.get_by_role("button", name="Approve").first.wait_for()
        await _shoot(page, "now")
        small = await open_view(phone, relay)
        await small.locator(".event").first.wait_for()
        await _shoot(small, "now-phone", full=False)
        dark = await visitor(browser, **DARK)
        detail = await open_view(dark, relay, f"event/{SCOPE}/{REBOOT}")
        await detail.locator("#history li").first.wait_for()
        await _shoot(detail, "event")
        log = await open_view(dark, relay, "log")
        await log.locator("#log li").first.wait_for()
        await _shoot(log, "log", full=False)
        await _take_decisions(page, small)
        await _take_change(page, relay, events)


async def _take_decisions(page: Page, phone: Page) -> None:
    first = page.locator(".event", has=page.locator(f"a[href$='{HELD}']"))
    await first.get_by_role("button", name="Release").click()
    await page.locator("#decide-notices p").nth(0).wait_for()
    await page.get_by_label("Reason").fill("the backup is done")
    await _shoot(page, "release", full=False)
    await page.get_by_role("button", name="Cancel").click()
    await phone.get_by_role("button", name="Hold").first.tap()
    await phone.get_by_role("heading", name="Hold?").wait_for()
    await _shoot(phone, "hold-phone", full=False)
    await phone.get_by_role("dialog").get_by_role("button", name="Hold").tap()
    await phone.get_by_role("heading", name="Recorded").wait_for()
    await _shoot(phone, "held-phone", full=False)


async def _take_change(page: Page, relay: RunningRelay, events: list[ScheduledEvent]) -> None:
    """Azure changes an event while somebody decides, and then the relay goes away."""
    await page.get_by_role("button", name="Approve").first.click()
    await page.locator("#decide-notices p").nth(0).wait_for()
    await relay.observe(*(_renamed(event) for event in events))
    await page.get_by_text("Azure has changed the event since.").wait_for()
    await _shoot(page, "changed", full=False)
    await page.get_by_role("dialog").get_by_role("button", name="Approve").click()
    await page.locator("#decide-wrong:not(:empty)").wait_for()
    await _shoot(page, "refused", full=False)
    await page.get_by_role("button", name="Cancel").click()
    relay.server.state.detach_relay()
    await page.locator("#live", has_text="Connection lost").wait_for()
    await asyncio.sleep(3)
    await _shoot(page, "lost", full=False)


def _renamed(event: ScheduledEvent) -> ScheduledEvent:
    """Return the event about another machine, if it is the held one."""
    return replace(event, resources=("WestNO_0",)) if event.event_id == HELD else event


async def _take_story(browser: Browser) -> None:
    async with _relay() as relay:
        await live_through(relay)
        page = await open_view(await visitor(browser, **DESKTOP), relay, f"event/{SCOPE}/{REBOOT}")
        await page.locator("#history li").first.wait_for()
        await _shoot(page, "story")


async def _take_trouble(browser: Browser) -> None:
    async with _relay() as relay:
        await break_sinks(relay)
        page = await open_view(await visitor(browser, **DESKTOP), relay, "sinks")
        await page.locator("#dead tr").first.wait_for()
        await _shoot(page, "sinks")
        relay.azure.lost = True
        relay.make_store_read_only()
        await page.goto(page_url(relay))
        await relay.call("POST", "/v1/sinks/ops/resume")  # the first write that fails
        await page.get_by_text("State file failing").wait_for()
        await page.locator(".event").first.wait_for()
        await _shoot(page, "trouble", full=False)


async def _take_fleet(browser: Browser) -> None:
    async with _relay(is_hub=True) as relay:
        attach_parts(relay, roster=make_roster(relay))
        page = await open_view(await visitor(browser, **DESKTOP), relay, "fleet")
        await page.locator("#scopes table").first.wait_for()
        await _shoot(page, "fleet")
        await make_scopes(relay)
        await page.goto(page_url(relay))
        await page.locator(".event").nth(1).wait_for()
        await _shoot(page, "hub", full=False)


if __name__ == "__main__":
    asyncio.run(main())
