"""The page in a real browser: what is scheduled, decisions, and what happened."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from playwright.async_api import Page, Route, expect

from relay.api.routes import events
from relay.approvals.request import HOLD_NOTICE
from relay.errors import Rejected
from relay.events.timestamps import format_rfc3339
from tests.api.message_links import message_links
from tests.api.running_relay import EVENT_ID, SCOPE, TWO_VOTES, RunningRelay, make_event, run_relay
from tests.chromium import IN_SESSION_LOOP
from tests.eventually import eventually
from tests.page.scenes import give_key, look_again, make_busy, page_url, run_page_relay, show

pytestmark = IN_SESSION_LOOP

PHONE = {"viewport": {"width": 320, "height": 568}, "has_touch": True, "is_mobile": True}


async def decisions(relay: RunningRelay) -> list[tuple[str, str, str | None, str]]:
    """What was recorded: decision, principal, reason, revision."""
    return [
        (data["decision"], data["principal"], data["reason"], data["revision"])
        for data in [event["data"] for event in await relay.recorded_events("approval.recorded")]
    ]


# --- what is scheduled


async def test_a_card_says_what_happens_when_and_who_votes(page: Page, relay: RunningRelay) -> None:
    relay.clock.offset += relay.seconds_to_not_before() - 5000
    await relay.decide(by="bob")
    await show(page, relay)
    card = page.get_by_role("article", name="Reboot of WestNO_0, WestNO_1")
    await expect(card).to_contain_text("Each machine is rebooted: what is in memory is lost")
    await expect(card.locator(".count")).to_contain_text("1 h 23 min")
    await expect(card).to_contain_text("1 of 2 by rule two")
    await expect(card).to_contain_text("1 vote missing · started by Azure itself")
    await expect(card.get_by_text("client:bob")).to_be_visible()
    missing = card.locator("dt", has_text="Can still vote").locator("+ dd")
    await expect(missing.get_by_role("listitem")).to_have_text(["client:alice", "client:drain"])


async def test_events_come_change_and_end_without_a_reload(page: Page, relay: RunningRelay) -> None:
    await show(page, relay)
    cards = page.locator(".event")
    await expect(cards).to_have_count(1)
    link = page.get_by_role("link", name="Reboot of WestNO_0, WestNO_1")
    await link.focus()
    sooner = make_event(
        event_id="E-2",
        event_type="Redeploy",
        resources=("db-7",),
        not_before=format_rfc3339(relay.clock.now() + timedelta(minutes=4)),
    )
    await relay.observe(make_event(), sooner)
    await expect(cards).to_have_count(2)
    await expect(cards.first).to_contain_text("Redeploy of db-7")  # the next NotBefore first
    await expect(cards.first.locator(".count")).to_have_class("count now")
    await expect(link).to_be_focused()
    await relay.observe(make_event(resources=("WestNO_0",)), sooner)
    await expect(page.get_by_role("link", name="Reboot of WestNO_0", exact=True)).to_be_focused()
    await relay.observe(replace(sooner, event_status="Started", not_before=None))
    await expect(cards).to_have_count(1)
    await expect(cards.first).to_contain_text("Azure has begun")
    await expect(page.locator("#recent")).to_contain_text("Reboot of WestNO_0")
    await relay.observe()
    await expect(page.get_by_text("Nothing is scheduled.")).to_be_visible()
    await expect(page.locator("#recent li")).to_have_count(2)


async def test_a_card_names_the_limit_and_leads_to_the_runbook(page: Page, tmp_path: Path) -> None:
    limits, runbook = [{"name": "one-database", "max": 1}], "https://wiki.example.com/reboots"
    rules = [{**TWO_VOTES, "runbook": runbook}]
    async with run_relay(tmp_path, approvals={"limits": limits, "rules": rules}) as relay:
        busy = make_event(event_id="E-2", event_status="Started", resources=("db-1",))
        await relay.observe(make_event(), busy)
        for client in ("alice", "bob"):
            await relay.decide(by=client)
        await show(page, relay)
        card = page.get_by_role("article", name="Reboot of WestNO_0, WestNO_1")
        await expect(card).to_contain_text("approved, waits for limit one-database")
        await expect(card).to_contain_text("1 machine at once, taken by db-1")
        link = card.get_by_role("link", name=runbook)
        await expect(link).to_have_attribute("href", runbook)
        await expect(link).to_have_attribute("rel", "noopener noreferrer")


# --- decisions


async def test_a_vote_counts_for_the_revision_shown(page: Page, relay: RunningRelay) -> None:
    await show(page, relay)
    await page.get_by_role("button", name="Approve").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_have_accessible_name("Approve?")
    await expect(dialog).to_contain_text(make_event().revision)
    await expect(dialog).to_contain_text("Azure proceeds at NotBefore regardless")
    await expect(dialog).to_contain_text("cannot be taken back")
    await dialog.get_by_label("Reason").fill("drained")
    await dialog.get_by_role("button", name="Approve").click()
    await expect(dialog.get_by_role("heading", name="Recorded")).to_be_focused()
    await expect(dialog).to_contain_text("1 of 2 votes. More are missing")
    await dialog.get_by_role("button", name="Close").click()
    await expect(page.get_by_role("button", name="Approve")).to_have_count(0)  # once each
    await relay.decide(by="bob")
    await expect(page.locator(".event")).to_contain_text("Azure accepted the StartRequest")
    await expect(page.locator(".event .count")).to_contain_text("any moment")
    assert relay.azure.started == [EVENT_ID]
    seen = make_event().revision
    assert await decisions(relay) == [
        ("approve", "client:alice", "drained", seen),
        ("approve", "client:bob", None, seen),
    ]


async def test_hold_and_release_say_what_they_cannot_do(page: Page, relay: RunningRelay) -> None:
    await show(page, relay, by="bob")
    for button, outcome in (
        ("Hold", "It is on hold. A"),
        ("Release the hold", "The hold is released, and nobody has voted."),
    ):
        await page.locator(".event").get_by_role("button", name=button).click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_have_accessible_name(f"{button}?")
        await expect(dialog).to_contain_text(HOLD_NOTICE[1:])
        await dialog.get_by_role("button", name=button).click()
        await expect(dialog).to_contain_text(outcome)
        await dialog.get_by_role("button", name="Close").click()
        await expect(dialog).to_be_hidden()
    held = page.locator(".event dt", has_text="Held by")
    await expect(held).to_have_count(0)
    await relay.decide("hold", by="alice")
    await expect(held.locator("+ dd")).to_contain_text("client:alice until ")
    # Bob has no right to release the hold of somebody else, but may add one.
    buttons = page.locator(".event").get_by_role("button")
    await expect(buttons).to_have_text(["Approve", "Hold too"])


async def test_only_who_may_decide_gets_buttons(page: Page, relay: RunningRelay) -> None:
    await relay.observe(make_event(), make_event(event_id="E-2", resources=("db-1",)))
    await show(page, relay, by="databases")
    await expect(page.locator(".event")).to_have_count(2)
    about_db = page.get_by_role("article", name="Reboot of db-1")
    await expect(about_db.get_by_role("button")).to_have_text(["Approve", "Hold"])
    await expect(page.locator(".event").get_by_role("button")).to_have_count(2)
    await page.get_by_role("button", name="Forget key").click()
    await page.get_by_label("Your key or token").fill("bearer-test-key-of-reader")
    await page.get_by_role("button", name="Continue").click()
    await expect(page.locator(".event")).to_have_count(2)
    await expect(page.locator(".event").get_by_role("button")).to_have_count(0)


async def test_an_operator_sees_and_ends_a_standing_hold(page: Page, relay: RunningRelay) -> None:
    match = {"resources": ["WestNO*"], "event_type": ["Reboot"]}
    assert (await relay.hold_ahead(match=match, reason="the sale runs")).status == 201
    await show(page, relay, by="bob")
    listed = page.get_by_role("region", name="Standing holds")
    await expect(listed).to_contain_text("resources WestNO*")
    await expect(listed.get_by_role("button")).to_have_count(0)
    await page.get_by_role("button", name="Forget key").click()
    await page.get_by_label("Your key or token").fill("bearer-test-key-of-alice")
    await page.get_by_role("button", name="Continue").click()
    card = page.locator(".event")
    await expect(card).to_contain_text("on hold")
    await expect(card.locator("dt", has_text="Standing hold").locator("+ dd")).to_contain_text(
        "client:alice until"
    )
    await expect(listed).to_contain_text("event_type Reboot; resources WestNO*")
    await expect(listed).to_contain_text("by client:alice (“the sale runs”)")
    dialog = page.get_by_role("dialog")
    await card.get_by_role("button", name="Approve").click()
    await expect(dialog).to_contain_text("It is on hold: the vote waits until no hold is in force")
    await dialog.get_by_role("button", name="Cancel").click()
    await listed.get_by_role("button", name="End the standing hold").click()
    await expect(dialog).to_contain_text(HOLD_NOTICE[1:])
    await dialog.get_by_label("Reason").fill("it is over")
    await dialog.get_by_role("button", name="End the standing hold").click()
    await expect(dialog.get_by_role("heading", name="Ended")).to_be_focused()
    await dialog.get_by_role("button", name="Close").click()
    await expect(listed).to_be_hidden()
    await expect(card).to_contain_text("2 votes missing")
    (ended,) = await relay.recorded_events("standing-hold.ended")
    assert (ended["data"]["endedBy"], ended["data"]["endReason"]) == ("client:alice", "it is over")
    await page.get_by_role("link", name="Log").click()
    await expect(page.locator("#log li").first).to_contain_text(
        "client:alice ended the standing hold of client:alice on "
        "event_type Reboot; resources WestNO* (“it is over”)"
    )


async def test_no_event_that_changes_meanwhile_is_approved(page: Page, relay: RunningRelay) -> None:
    await show(page, relay)
    await page.get_by_role("button", name="Approve").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Reason").fill("drained")
    changed = make_event(resources=("WestNO_0", "db-1"))
    await relay.observe(changed)
    await expect(dialog.get_by_role("alert").first).to_contain_text("Azure has changed the event")
    assert await dialog.get_by_label("Reason").input_value() == "drained"
    await dialog.get_by_role("button", name="Approve").click()
    await expect(dialog).to_contain_text("The event has changed since that revision")
    assert await decisions(relay) == []
    await dialog.get_by_role("button", name="Look at its new state").click()
    await expect(dialog).to_contain_text("WestNO_0, db-1")
    await dialog.get_by_role("button", name="Approve").click()
    await expect(dialog.get_by_role("heading", name="Recorded")).to_be_visible()
    assert [made[3] for made in await decisions(relay)] == [changed.revision]


async def test_a_link_counts_for_its_revision_alone(page: Page, relay: RunningRelay) -> None:
    """With the keyboard, on a small screen in the dark; reading it decides nothing."""
    await page.emulate_media(color_scheme="dark")
    await page.set_viewport_size({"width": 375, "height": 667})
    links = await message_links(relay)
    await give_key(page, "alice")
    changed = make_event(resources=("WestNO_0", "db-1"))
    await relay.observe(changed)
    await page.goto(links["approve"])
    dialog = page.get_by_role("dialog", name="Approve?")
    await expect(dialog.get_by_role("alert").first).to_contain_text("Azure has changed the event")
    await expect(dialog.get_by_role("heading")).to_be_focused()
    assert page.url == page_url(relay, f"event/{SCOPE}/{EVENT_ID}")
    assert await page.evaluate("() => document.documentElement.scrollWidth") <= 375
    await dialog.get_by_role("button", name="Approve").press("Enter")
    await expect(dialog).to_contain_text("The event has changed since that revision")
    assert await decisions(relay) == []
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await page.goto("about:blank")
    await page.goto((await message_links(relay))["hold"])
    await page.get_by_role("dialog", name="Hold?").get_by_role("button", name="Hold").press("Enter")
    await expect(page.get_by_role("heading", name="Recorded")).to_be_focused()
    assert [made[::3] for made in await decisions(relay)] == [("hold", changed.revision)]


async def test_a_wrong_or_old_link_prepares_no_decision(page: Page, relay: RunningRelay) -> None:
    await give_key(page, "alice")
    event = f"event/{SCOPE}/{EVENT_ID}"
    for view in (f"{event}/constructor/x", f"{event}/approve", f"{event}/approve/%E0%A4%A"):
        await page.goto("about:blank")
        await page.goto(page_url(relay, view))
        await page.locator("#history li").first.wait_for()
        await expect(page.get_by_role("dialog")).to_be_hidden()
    await page.goto(page_url(relay).replace("/#/", "/approve#token"))
    await expect(page.get_by_role("heading", name="Scheduled now")).to_be_visible()
    assert page.url == page_url(relay)


async def test_a_new_try_after_a_lost_answer_counts_once(page: Page, relay: RunningRelay) -> None:
    ids: list[str | None] = []

    async def lose_first_answer(route: Route) -> None:
        ids.append(await route.request.header_value("Idempotency-Key"))
        if len(ids) == 1:
            await route.fetch()  # the relay has the decision
            await route.abort()
        else:
            await route.continue_()

    await page.route("**/v1/approvals", lose_first_answer)
    await show(page, relay)
    await page.get_by_role("button", name="Approve").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Approve").dblclick()
    await expect(dialog).to_contain_text("It may have taken your decision. Try again")
    assert len(ids) == 1
    await dialog.get_by_role("button", name="Approve").click()
    await expect(dialog.get_by_role("heading", name="Recorded")).to_be_visible()
    assert len(ids) == 2
    assert ids[0] == ids[1]
    assert len(await decisions(relay)) == 1


async def test_the_keyboard_decides_and_escape_leaves_it(page: Page, relay: RunningRelay) -> None:
    await show(page, relay)
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    hold = page.locator(".event").get_by_role("button", name="Hold")
    await hold.focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog", name="Hold?")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await expect(hold).to_be_focused()
    outline = "() => getComputedStyle(document.activeElement).outlineStyle"
    assert await page.evaluate(outline) == "solid"
    await page.keyboard.press("Enter")
    reason = page.get_by_label("Reason")
    await reason.focus()
    await page.keyboard.type("backup")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Recorded")).to_be_focused()
    assert [made[:3] for made in await decisions(relay)] == [("hold", "client:alice", "backup")]


async def test_voting_closes_on_an_open_page(page: Page, relay: RunningRelay) -> None:
    await page.clock.install()
    await show(page, relay)
    await expect(page.get_by_role("button", name="Approve")).to_be_visible()
    await page.clock.run_for(3000)  # the page has read all that it wants
    relay.clock.offset += relay.seconds_to_not_before() - 30
    await page.clock.run_for(6000)  # the next look at the relay's clock
    await page.clock.run_for(2000)
    await expect(page.get_by_role("button", name="Approve")).to_have_count(0)
    await expect(page.get_by_role("button", name="Hold")).to_be_visible()


# --- one event


async def test_an_events_view_tells_its_story(page: Page, quiet: RunningRelay) -> None:
    await make_busy(quiet)
    await show(page, quiet)
    await page.get_by_role("link", name="Reboot of WestNO_0, WestNO_1").click()
    heading = page.get_by_role("heading", level=1, name="Reboot of WestNO_0, WestNO_1")
    await expect(heading).to_be_visible()
    story = page.locator("#history li .what")
    await expect(story).to_contain_text(
        [
            "client:alice voted to approve, 1 of 2 (“drained, checked by hand”)",
            "client:databases tried to approve, refused",
            "Azure changed notBefore; votes on the former state do not count. Before: ",
            "Azure announced a Reboot of WestNO_0, WestNO_1.",
        ]
    )
    await expect(page.locator("#rules")).to_contain_text("harmless does not match: event_type")
    await quiet.decide("hold", by="bob", revision="0123")
    await expect(story).to_have_count(5)


async def test_an_unknown_event_has_a_view_too(page: Page, relay: RunningRelay) -> None:
    await show(page, relay, f"event/{SCOPE}/E-404")
    await expect(page.get_by_role("heading", name="No such event")).to_be_visible()
    await page.goto(page_url(relay, "event/%/%E0%A4%A"))
    await expect(page.get_by_role("heading", name="Scheduled now")).to_be_visible()


async def test_the_log_follows_and_can_be_narrowed(page: Page, relay: RunningRelay) -> None:
    await show(page, relay, "log")
    lines = page.locator("#log li")
    await expect(lines).to_have_count(1)  # what was recorded before the page was opened
    await relay.decide(reason="drained", ticket="CHG-7")
    said = "client:alice voted to approve, 1 of 2 (“drained”, ticket CHG-7)"
    await expect(lines.first).to_contain_text(said)
    await page.get_by_label("Show").select_option("Azure")
    await expect(lines).to_have_count(1)
    await expect(lines).to_contain_text("Azure announced a Reboot of WestNO_0, WestNO_1.")


async def test_earlier_events_stay_when_the_list_is_read_again(
    page: Page, relay: RunningRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if more events are live than fit into a page of the API."""
    monkeypatch.setattr(events, "PAGE_SIZE", 2)
    for number in range(5):
        await relay.observe(make_event(event_id=f"ended-{number}", resources=(f"vm-{number}",)))
    live = [make_event(event_id=f"live-{n}", resources=(f"live-{n}",)) for n in range(3)]
    await relay.observe(*live)
    await show(page, relay)
    ended = page.get_by_role("region", name="Ended lately")
    await expect(ended.get_by_role("listitem")).to_have_count(2)
    await expect(page.locator("#recent-empty")).to_be_hidden()
    await page.get_by_role("button", name="Earlier events").click()
    await expect(ended.get_by_role("listitem")).to_have_count(4)
    await relay.observe(*live[1:])
    await expect(ended).to_contain_text(live[0].resources[0])
    await expect(ended).to_contain_text("vm-2")
    await expect(ended.get_by_role("listitem")).to_have_count(4)
    for rest in (live[1:2], ()):
        relay.clock.offset += 60
        await relay.observe(*rest)
    # The end counts, not the announcement.
    last = ["Reboot of live-1", "Reboot of live-2", "Reboot of live-0", "Reboot of vm-4"]
    await expect(ended.get_by_role("link")).to_have_text(last)


async def test_views_have_addresses_and_get_the_focus(page: Page, relay: RunningRelay) -> None:
    await show(page, relay)
    await page.get_by_role("link", name="Sinks").click()
    await expect(page.get_by_role("heading", name="Sinks", level=1)).to_be_focused()
    await expect(page.get_by_role("link", name="Sinks")).to_have_attribute("aria-current", "page")
    await page.go_back()
    await expect(page.get_by_role("heading", name="Scheduled now")).to_be_focused()
    await expect(page).to_have_title("2 h: Reboot of WestNO_0, WestNO_1 – westno-0")


@pytest.mark.parametrize("page", [PHONE], indirect=True)
async def test_long_names_fit_on_a_phone_in_every_view(page: Page, tmp_path: Path) -> None:
    names = tuple(
        f"machine-with-a-very-long-name-in-production-of-western-europe-{number:06}"
        for number in range(60)
    )
    async with run_page_relay(tmp_path) as relay:
        relay.sinks["drain"].failure = Rejected("the receiver answered 410: gone", status=410)
        await relay.observe(make_event(resources=names, description="x" * 1000))
        await relay.decide("hold", by="bob", revision=make_event(resources=names).revision)
        await show(page, relay)
        for view, ready in (
            ("", ".event"),
            (f"event/{SCOPE}/{EVENT_ID}", "#open tr"),
            ("log", "#log li"),
            ("sinks", "#dead tr"),
        ):
            await page.goto(page_url(relay, view))
            await page.locator(ready).first.wait_for()
            assert await page.evaluate("() => document.documentElement.scrollWidth") == 320, view
        await page.goto(page_url(relay))
        await page.get_by_role("button", name="Approve").tap()
        await expect(page.get_by_role("dialog")).to_contain_text(names[59])
        dialog = "() => document.querySelector('dialog').scrollWidth"
        assert await page.evaluate(dialog) <= 320
        assert await page.evaluate("() => document.getAnimations().length") == 0


async def test_the_console_is_empty_and_nobody_else_called(page: Page, relay: RunningRelay) -> None:
    messages: list[str] = []
    paths: set[str] = set()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: paths.add(request.url.partition("?")[0]))
    await show(page, relay)
    for name in ("Log", "Sinks", "Now"):
        await page.get_by_role("link", name=name, exact=True).click()
    await page.get_by_role("link", name="Reboot of").click()
    await page.locator("#history li").first.wait_for()
    assert messages == []
    origin = f"http://127.0.0.1:{relay.server.port}"
    assert {path.removeprefix(origin).split("/")[1] for path in paths} == {"", "page", "v1"}


async def test_an_unseen_page_gives_its_connection_back(page: Page, relay: RunningRelay) -> None:
    await page.add_init_script(
        "window.away = false;Object.defineProperty(document, 'hidden', { get: () => window.away })"
    )
    await page.clock.install()
    await show(page, relay)
    assert len(relay.server.state.stream_wakeups) == 1
    await page.evaluate("window.away = true")
    await page.clock.run_for(33_000)
    await expect(page.locator("#live")).to_have_text("Paused")
    await eventually(lambda: not relay.server.state.stream_wakeups)
    await relay.observe(make_event(), make_event(event_id="E-2"))
    await page.evaluate("window.away = false")
    await look_again(page)
    await page.clock.run_for(3000)
    await expect(page.locator(".event")).to_have_count(2)
    await expect(page.locator("#live")).to_have_text("Live")
