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

from playwright.async_api import Browser, BrowserContext, Page

from relay.errors import Rejected
from relay.events.model import ScheduledEvent
from tests.api.running_relay import SCOPE, RunningRelay
from tests.chromium import STEP_MILLISECONDS, running_chromium
from tests.eventually import eventually
from tests.page.scenes import (
    HELD,
    REBOOT,
    all_delivered,
    attach_parts,
    break_sinks,
    give_key,
    make_busy,
    make_roster,
    make_scopes,
    page_url,
    reboot,
    run_page_relay,
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
        page = await (await _visitor(browser, by=None, **DESKTOP)).new_page()
        await page.goto(page_url(relay))
        await page.get_by_label("Your key or token").fill("a-wrong-key-of-nobody")
        await page.get_by_role("button", name="Continue").click()
        await page.locator("#key-wrong:not(:empty)").wait_for()
        await _shoot(page, "key")
        page = await _open_view(await _visitor(browser, **DESKTOP), relay)
        await page.get_by_text("Nothing is scheduled.").wait_for()
        await _shoot(page, "quiet")


async def _take_busy(browser: Browser) -> None:
    async with _relay() as relay:
        events = await make_busy(relay)
        desk, phone = await _visitor(browser, **DESKTOP), await _visitor(browser, **PHONE)
        page = await _open_view(desk, relay)
        await page.get_by_role("button", name="Approve").first.wait_for()
        await _shoot(page, "now")
        small = await _open_view(phone, relay)
        await small.locator(".event").first.wait_for()
        await _shoot(small, "now-phone", full=False)
        dark = await _visitor(browser, **DARK)
        detail = await _open_view(dark, relay, f"event/{SCOPE}/{REBOOT}")
        await detail.locator("#history li").first.wait_for()
        await _shoot(detail, "event")
        log = await _open_view(dark, relay, "log")
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
        await _live_through(relay)
        page = await _open_view(
            await _visitor(browser, **DESKTOP), relay, f"event/{SCOPE}/{REBOOT}"
        )
        await page.locator("#history li").first.wait_for()
        await _shoot(page, "story")


async def _take_trouble(browser: Browser) -> None:
    async with _relay() as relay:
        await break_sinks(relay)
        page = await _open_view(await _visitor(browser, **DESKTOP), relay, "sinks")
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
        page = await _open_view(await _visitor(browser, **DESKTOP), relay, "fleet")
        await page.locator("#scopes table").first.wait_for()
        await _shoot(page, "fleet")
        await make_scopes(relay)
        await page.goto(page_url(relay))
        await page.locator(".event").nth(1).wait_for()
        await _shoot(page, "hub", full=False)


async def _visitor(browser: Browser, *, by: str | None = "alice", **options: Any) -> BrowserContext:
    """Return a visitor whose tabs have the key of a client already."""
    context = await browser.new_context(locale="en-GB", timezone_id="Europe/Oslo", **options)
    context.set_default_timeout(STEP_MILLISECONDS)
    if by is not None:
        await give_key(context, by)
    return context


async def _open_view(context: BrowserContext, relay: RunningRelay, view: str = "") -> Page:
    """Open a view in a new tab, and wait until it is live."""
    page = await context.new_page()
    await page.goto(page_url(relay, view))
    await page.locator("#live", has_text="Live").wait_for()
    return page


async def _live_through(relay: RunningRelay) -> None:
    """Let an event be held, changed, approved, started and ended, in 25 minutes."""
    relay.clock.offset -= 1500
    event = reboot(relay, 30)
    await relay.observe(event)
    relay.clock.offset += 90
    await relay.decide("hold", by="bob", revision=event.revision, reason="backup runs")
    relay.clock.offset += 240
    event = replace(event, resources=("WestNO_0", "WestNO_1", "db-1"))
    relay.sinks["drain"].failure = Rejected("the receiver answered 410: gone", status=410)
    await relay.observe(event)
    await all_delivered(relay)
    relay.sinks["drain"].failure = None
    relay.clock.offset += 200
    await relay.decide("release", by="bob", revision=event.revision)
    relay.clock.offset += 60
    await relay.decide(by="bob", revision=event.revision)
    relay.clock.offset += 150
    await relay.decide(by="alice", revision=event.revision, reason="drained")
    await eventually(lambda: bool(relay.azure.started))
    relay.clock.offset += 100
    started = replace(event, event_status="Started", not_before=None)
    await relay.observe(started)
    await all_delivered(relay)
    relay.clock.offset += 360
    await relay.observe()
    relay.clock.offset += 300
    await all_delivered(relay)


if __name__ == "__main__":
    asyncio.run(main())
