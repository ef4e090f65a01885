"""The page says whether the relay works, and what waits: sinks, dead letters, fleet, connection."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Page, Request, expect

from relay.api.connections import ServerLimits
from relay.errors import Deferred
from tests.api.running_relay import EVENT_ID, SCOPE, RunningRelay, make_event
from tests.chromium import IN_SESSION_LOOP
from tests.eventually import eventually
from tests.page.scenes import (
    DB,
    WEB,
    Link,
    attach_parts,
    break_sinks,
    give_key,
    look_again,
    make_roster,
    make_scopes,
    page_url,
    run_page_relay,
    show,
)

pytestmark = IN_SESSION_LOOP


async def test_a_relay_that_is_well_says_so(page: Page, relay: RunningRelay) -> None:
    await show(page, relay)
    await expect(page.locator("#health li")).to_have_text(
        [
            "Source read seconds ago",
            "State file written",
            "Broker bus takes events",
            "Approvals link connected",
            "Sinks 2 of 2 take events",
            "Approvals on",
        ]
    )
    await expect(page.locator("#sinks-badge")).to_be_hidden()


async def test_what_is_broken_comes_first_with_its_reason(page: Page, quiet: RunningRelay) -> None:
    link = Link()
    attach_parts(quiet, approvals_link=link)
    await break_sinks(quiet)
    await quiet.call("PUT", "/v1/approvals/mode", {"mode": "dry-run"})
    await show(page, quiet)
    health = page.locator("#health")
    await expect(health.locator("li").first).to_contain_text("Broker bus failing")
    await expect(health).to_contain_text("The broker does not answer: 10.0.0.4:5671")
    await expect(health).to_contain_text("Sink ops paused")
    doubts = health.locator("li.warn")
    await expect(doubts).to_contain_text(["Sink ops", "Sinks 1 of 2", "Approvals"])
    await expect(health).to_contain_text("Approvals dry run: nothing is started")
    quiet.azure.lost, link.is_connected = True, False
    quiet.azure.clock_offset = -95.0
    quiet.make_store_read_only()
    assert (await quiet.decide()).status == 503  # the first write that fails
    await look_again(page)
    await expect(health).to_contain_text("Source lost")
    await expect(health).to_contain_text("The metadata service gives no usable answer")
    await expect(health).to_contain_text("State file failing")
    await expect(health).to_contain_text("Approvals link not connected")
    await expect(health).to_contain_text("Clock 2 min behind Azure’s")
    await page.get_by_role("button", name="Hold").click()
    await expect(page.get_by_role("dialog")).to_contain_text("Approvals are a dry run")
    await page.get_by_role("dialog").get_by_role("button", name="Hold").click()
    await expect(page.get_by_role("dialog").locator("#decide-wrong")).not_to_be_empty()


async def test_polls_that_fail_show_before_the_source_is_lost(
    page: Page, relay: RunningRelay
) -> None:
    relay.azure.read_age, relay.azure.failures = 43.0, 8
    await show(page, relay)
    source = page.locator("#health li.warn")
    await expect(source).to_have_text("Source read 43 s ago; polls failed since: 8")


async def test_approvals_that_are_off_leave_no_buttons(page: Page, relay: RunningRelay) -> None:
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})
    await show(page, relay)
    await expect(page.locator("#health")).to_contain_text("off: nothing can be decided")
    await expect(page.locator(".event")).to_contain_text("approvals are off")
    await expect(page.locator(".event").get_by_role("button")).to_have_count(0)


@pytest.mark.parametrize("view", ["", f"event/{SCOPE}/{EVENT_ID}"])
async def test_a_new_mode_of_approvals_reaches_an_open_page(
    page: Page, relay: RunningRelay, view: str
) -> None:
    """No CloudEvent tells of the mode: the page reads it with the health, and then its events."""
    await page.clock.install()
    await show(page, relay, view)
    event, dialog = page.locator(".event"), page.get_by_role("dialog")
    await event.get_by_role("button", name="Approve").click()
    approve = dialog.get_by_role("button", name="Approve")
    for mode, state, buttons in (
        ("off", "approvals are off", []),
        ("dry-run", "2 votes missing", ["Approve", "Hold"]),
    ):
        await page.clock.run_for(3000)  # the page has read all that it wants
        await relay.call("PUT", "/v1/approvals/mode", {"mode": mode})
        await page.clock.run_for(6000)  # the next look at the relay's health
        await page.clock.run_for(2000)
        # Once a minute the page reads its events anyway: that is too late.
        await expect(event).to_contain_text(state, timeout=20_000)
        await expect(event.get_by_role("button")).to_have_text(buttons)
        await expect(approve).to_be_enabled(enabled=bool(buttons))
    await expect(dialog).not_to_contain_text("may begin within seconds")
    await approve.click()
    await expect(dialog).to_contain_text("1 of 2 votes")


# --- sinks


async def test_sinks_show_what_waits_and_send_again(page: Page, quiet: RunningRelay) -> None:
    await break_sinks(quiet)
    await show(page, quiet, "sinks")
    bus = page.get_by_role("article", name="Sink bus")
    await expect(bus).to_contain_text("failing")
    await expect(bus).to_contain_text("connection refused")
    await expect(bus).to_contain_text(f"Waiting{quiet.dispatcher.get_worker('bus').waiting}, the")
    await expect(bus.locator("dd").nth(1)).to_contain_text("open")
    letters = page.locator("#dead tr")
    await expect(letters).to_have_count(5)
    await expect(letters.first).to_contain_text("The receiver answered 404: no such path")
    await expect(page.locator("#sinks-badge")).to_contain_text("3")
    quiet.sinks["drain"].failure = None
    await letters.last.get_by_role("button", name="Send event.scheduled to drain again").click()
    await expect(page.locator("#said")).to_contain_text("It is sent to drain again.")
    await expect(letters).to_have_count(4)
    await page.get_by_role("button", name="Send all of drain again").click()
    await expect(page.get_by_text("Nothing was given up.")).to_be_visible()
    await eventually(lambda: len(quiet.sinks["drain"].delivered) == 5)


async def test_a_try_that_is_due_is_now(page: Page, quiet: RunningRelay) -> None:
    quiet.sinks["bus"].failure = Deferred("the broker does not answer", after=600)
    await quiet.observe(make_event(resources=()))
    await show(page, quiet, f"event/{SCOPE}/{EVENT_ID}")
    await expect(page.get_by_role("heading", name="Reboot (no machine named)")).to_be_visible()
    await expect(page.locator("#open")).to_contain_text("next try in ")
    quiet.clock.offset += 1200  # the relay's timer was set before
    await look_again(page)
    await expect(page.locator("#open")).to_contain_text("next try now")


async def test_a_sink_is_paused_tested_and_resumed(page: Page, relay: RunningRelay) -> None:
    await show(page, relay, "sinks")
    ops = page.get_by_role("article", name="Sink ops")
    await ops.get_by_role("button", name="Send a test message to ops").click()
    await eventually(lambda: "relay.ping" in relay.sinks["ops"].delivered_names())
    await ops.get_by_role("button", name="Pause ops").click()
    await expect(ops).to_contain_text("Paused by client:alice")
    assert relay.dispatcher.get_worker("ops").state == "paused"
    await expect(ops.get_by_role("button", name="Resume ops")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(ops).to_contain_text("takes events")
    assert relay.dispatcher.get_worker("ops").state == "on"


async def test_who_may_not_operate_has_no_buttons_of_sinks(page: Page, quiet: RunningRelay) -> None:
    await break_sinks(quiet)
    await show(page, quiet, "sinks", by="bob")
    await expect(page.locator("#dead tr")).to_have_count(5)
    assert await page.locator("#view").get_by_role("button").count() == 0


# --- a hub


async def test_a_hub_shows_its_agents_and_one_scope_if_asked(page: Page, tmp_path: Path) -> None:
    async with run_page_relay(tmp_path, is_hub=True) as relay:
        attach_parts(relay, roster=make_roster(relay))
        await make_scopes(relay)
        await show(page, relay, "fleet")
        scopes = page.locator("#scopes details")
        await expect(scopes.first).to_contain_text("all silent: nobody hears of events here")
        await expect(scopes.nth(1)).to_contain_text("1 of 5 silent")
        row = page.get_by_role("row", name="db_0")
        await expect(row).to_contain_text("4 s ahead")
        await page.get_by_role("link", name="Now").click()
        await expect(page.locator(".event")).to_have_count(2)
        await expect(page.locator("#health")).to_contain_text("Agents heard")
        await page.get_by_label("Scope").select_option(WEB)
        await expect(page.locator(".event")).to_have_count(1)
        await expect(page.locator(".event")).to_contain_text(WEB)
        await page.get_by_role("link", name="Fleet").click()
        await expect(scopes).to_have_count(1)
        await page.get_by_label("Scope").select_option(DB)
        await expect(scopes).to_contain_text("db_0")


# --- the connection


async def test_a_lost_connection_is_shown_and_comes_back(page: Page, relay: RunningRelay) -> None:
    positions: list[str | None] = []

    async def note(request: Request) -> None:
        if request.url.endswith("/v1/stream"):
            positions.append((await request.all_headers()).get("last-event-id"))

    page.on("request", note)
    await show(page, relay)
    await relay.decide("hold", by="bob")
    await expect(page.locator(".event")).to_contain_text("on hold")
    attached = relay.relay
    relay.server.state.detach_relay()
    await expect(page.locator("#live")).to_have_text("Connection lost")
    bar = page.get_by_role("region", name="Connection")
    await expect(bar).to_contain_text("Connection lost:")
    await expect(bar).to_contain_text("What you see is from ")
    await expect(page.locator(".event")).to_contain_text("on hold")  # it stays, and is marked
    assert (await page.title()).startswith("? ")
    await relay.observe(make_event(), make_event(event_id="E-2"))
    relay.server.state.attach_relay(attached)
    await bar.get_by_role("button", name="Try now").click()
    await expect(page.locator("#live")).to_have_text("Live")
    await expect(bar).to_be_hidden()
    await expect(page.locator(".event")).to_have_count(2)
    await page.get_by_role("link", name="Log").click()
    await expect(page.locator("#log li")).to_have_count(3)  # nothing is missing, nothing is twice
    # The page may have read the hold from the list before the stream told of it.
    assert positions in (["0", "1"], ["0", "2"])


async def test_without_room_for_a_stream_the_page_asks_again(page: Page, tmp_path: Path) -> None:
    async with run_page_relay(tmp_path, limits=ServerLimits(max_streams_per_principal=0)) as relay:
        await relay.observe(make_event())
        await page.clock.install()
        await give_key(page, "alice")
        await page.goto(page_url(relay))
        await expect(page.locator("#live")).to_have_text("Every 10 s")
        await expect(page.get_by_role("region", name="Connection")).to_contain_text(
            "No live updates: The maximum of 0 streams of client:alice is open."
        )
        await expect(page.locator(".event")).to_have_count(1)
        await relay.observe(make_event(), make_event(event_id="E-2"))
        await page.clock.run_for(12_000)
        await expect(page.locator(".event")).to_have_count(2)
