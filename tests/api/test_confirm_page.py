"""The confirm page in a real browser: every state, with keyboards and small screens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect
from pytest_aiohttp import AiohttpServer
from yarl import URL

from relay.approvals.admission import HOLD_NOTICE
from relay.approvals.confirmation_link import MAX_WRONG_CODES
from relay.events.timestamps import parse_timestamp
from tests.api.confirmation_links import post_confirmation, proxy_application, render_message
from tests.api.running_relay import (
    APPROVALS,
    EVENT_ID,
    TWO_VOTES,
    RunningRelay,
    make_event,
    run_relay,
)
from tests.chromium import IN_SESSION_LOOP
from tests.eventually import eventually

pytestmark = IN_SESSION_LOOP


@pytest_asyncio.fixture(loop_scope="session")
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay with the usual clients and rules, whose document holds `make_event()`."""
    async with run_relay(tmp_path) as running_relay:
        await running_relay.observe(make_event())
        yield running_relay


CONTRAST = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(c => linear(c / 255))
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")]
    .filter(node => node.checkVisibility() &&
      [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()))
    .map(node => {
      const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
      const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
      return [node.tagName + " " + node.textContent.slice(0, 40), contrast];
    });
}"""
"""Returns every visible text with its contrast by WCAG 2.2."""
LABELS = """() => [...document.querySelectorAll("input, textarea, button, summary")]
.filter(node => node.checkVisibility()).map(node => ({
  name: node.labels && node.labels.length ? node.labels[0].textContent : node.textContent,
  described: (node.getAttribute("aria-describedby") || "").split(" ")
    .filter(id => id).every(id => document.getElementById(id)),
  height: node.getBoundingClientRect().height,
}))"""
SHOW = """link => new Promise(done => {
  const image = new Image();
  image.onload = image.onerror = () => done(link.href);
  image.src = link.href;
})"""
"""Loads the page's icon as a tab does; a headless browser loads none."""
PHONE = {"viewport": {"width": 320, "height": 568}, "has_touch": True, "is_mobile": True}


def url(relay: RunningRelay, token: str = "") -> str:
    """Return the URL of the page, with a link's fragment."""
    return f"http://127.0.0.1:{relay.server.port}/approve" + (f"#{token}" if token else "")


async def opened(page: Page, relay: RunningRelay, token: str, button: str = "Approve") -> None:
    """Open the page, and wait until it is ready for a decision."""
    await page.goto("about:blank")
    await page.goto(url(relay, token))
    await page.get_by_role("button", name=button, exact=True).wait_for()


async def decide(
    page: Page, *, key: str, code: str | None = None, reason: str = "", button: str = "Approve"
) -> None:
    """Fill in the form and submit it."""
    if code is not None:
        await page.get_by_label("Code in the message").fill(code)
    await page.get_by_label("Your key or token").fill(key)
    await page.get_by_label("Reason").fill(reason)
    await page.get_by_role("button", name=button, exact=True).click()


def heading(page: Page, name: str) -> Any:
    """Return the heading of this name, for assertions."""
    return expect(page.get_by_role("heading", name=name, exact=True))


async def votes(relay: RunningRelay) -> list[tuple[str, str, str | None]]:
    """What was recorded: decision, principal, reason."""
    return [
        (event["data"]["decision"], event["data"]["principal"], event["data"]["reason"])
        for event in await relay.recorded_events("approval.recorded")
    ]


# --- a decision


async def test_two_people_approve_and_azure_starts(page: Page, relay: RunningRelay) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    await expect(page.get_by_text("Azure proceeds at NotBefore regardless.")).to_be_visible()
    await expect(
        page.get_by_text("it may begin within seconds, and cannot be taken back.")
    ).to_be_visible()
    await decide(
        page,
        key="bearer-test-key-of-alice",
        code=f"{message.code[:3]} {message.code[3:]}",
        reason="drained",
    )
    await heading(page, "Recorded").to_be_focused()
    await expect(page.get_by_role("status")).to_contain_text("1 of 2 votes. More are missing")
    await expect(page.locator("form")).to_be_hidden()
    assert await page.locator("#key").input_value() == ""
    await opened(page, relay, message.tokens["approve"])
    await expect(page.locator("#facts")).to_contain_text("1 of 2: client:alice")
    await decide(page, key="bearer-test-key-of-bob", code=message.code)
    await heading(page, "Approved").to_be_focused()
    assert await votes(relay) == [
        ("approve", "client:alice", "drained"),
        ("approve", "client:bob", None),
    ]
    await eventually(lambda: relay.azure.started == [(EVENT_ID,)])


async def test_a_second_answer_of_a_person_changes_nothing_and_says_so(
    page: Page, relay: RunningRelay
) -> None:
    message = await render_message(relay)
    await post_confirmation(relay, message.tokens["approve"], message.code)
    await opened(page, relay, message.tokens["approve"])
    await decide(page, key="bearer-test-key-of-alice", code=message.code)
    await heading(page, "You have answered already").to_be_focused()
    assert len(await votes(relay)) == 1


async def test_a_hold_and_its_release_need_no_code_and_explain_holds(
    page: Page, relay: RunningRelay
) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["hold"], "Hold")
    await expect(page.get_by_label("Code in the message")).to_be_hidden()
    await expect(page.locator("form")).to_contain_text(HOLD_NOTICE)
    await decide(page, key="bearer-test-key-of-bob", button="Hold")
    await heading(page, "Recorded").to_be_focused()
    await expect(page.get_by_role("status")).to_contain_text(HOLD_NOTICE)
    held = await render_message(relay)
    await opened(page, relay, held.tokens["release"], "Release the hold")
    await expect(page.locator("#notes")).to_contain_text(HOLD_NOTICE[2:])
    await decide(page, key="bearer-test-key-of-bob", button="Release the hold")
    await expect(page.get_by_role("status")).to_contain_text(
        f"The hold is released, and nobody has voted. A{HOLD_NOTICE[1:]}."
    )
    assert [decision for decision, _, _ in await votes(relay)] == ["hold", "release"]


async def test_the_page_works_with_the_keyboard(page: Page, relay: RunningRelay) -> None:
    """What is reached is in the order in which it is read, and Enter sends the form."""
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    await expect(page.get_by_role("heading", level=1)).to_be_focused()
    await page.keyboard.press("Tab")
    await page.keyboard.type(message.wrong_code)
    await page.keyboard.press("Tab")
    await page.keyboard.type("bearer-test-key-of-alice")
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Code in the message")).to_be_focused()
    await expect(page.get_by_label("Code in the message")).to_have_accessible_description(
        "This is not the code that the message shows; the link takes 4 more tries."
    )
    await page.keyboard.press("ControlOrMeta+a")
    await page.keyboard.type(message.code)
    for _ in range(3):
        await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Approve")).to_be_focused()
    assert (
        await page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        == "solid"
    )
    await page.keyboard.press("Space")
    await heading(page, "Recorded").to_be_focused()
    assert await votes(relay) == [("approve", "client:alice", None)]


async def test_a_double_click_is_one_call(page: Page, relay: RunningRelay) -> None:
    calls: list[str] = []
    page.on("request", lambda request: calls.append(request.url.rpartition("/")[2]))
    message = await render_message(relay)
    await opened(page, relay, message.tokens["hold"], "Hold")
    await page.get_by_label("Your key or token").fill("bearer-test-key-of-alice")
    await page.get_by_role("button", name="Hold").dblclick()
    await heading(
        page, "Recorded"
    ).to_be_visible()  # and not focused, where the second click falls beside the heading
    assert calls.count("confirmations") == 1


# --- what can be wrong


async def test_a_page_without_a_link_says_where_to_find_a_link(
    page: Page, relay: RunningRelay
) -> None:
    await page.goto(url(relay))
    await heading(page, "No link").to_be_focused()
    await expect(page.locator("form")).to_be_hidden()
    await expect(page.get_by_role("main")).not_to_have_attribute("aria-busy", "true")


async def test_an_unknown_link_is_invalid(page: Page, relay: RunningRelay) -> None:
    for fragment in ("nonsense", "%00%F0", "x" * 5000, "<img src=x onerror=alert(1)>"):
        await page.goto("about:blank")
        await page.goto(url(relay, fragment))
        await heading(page, "This link is void").to_be_focused()
        await expect(page.locator("form")).to_be_hidden()


async def test_errors_are_shown_beside_their_field(page: Page, relay: RunningRelay) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    code, key = page.get_by_label("Code in the message"), page.get_by_label("Your key or token")
    await decide(page, key="bearer-test-key-of-alice", code=" ")
    await expect(code).to_be_focused()
    await expect(code).to_have_attribute("aria-invalid", "true")
    await decide(page, key="", code=message.code)
    await expect(key).to_be_focused()
    await expect(code).not_to_have_attribute("aria-invalid", "true")
    await decide(page, key="schlüssel von alice", code=message.code)
    await expect(page.locator("#key-wrong")).to_contain_text("This cannot be a key")
    await decide(page, key="bearer-test-key-of-nobody", code=message.code)
    await expect(page.locator("#key-wrong")).to_contain_text("The relay does not know this key")
    assert (await key.input_value(), await code.input_value()) == ("", message.code)
    await decide(page, key="bearer-test-key-of-alice", code=message.wrong_code)
    await expect(code).to_be_focused()
    assert await key.input_value() == "bearer-test-key-of-alice"  # the same person tries again
    assert await votes(relay) == []


async def test_five_wrong_codes_make_a_link_invalid_and_the_page_says_what_to_do(
    page: Page, relay: RunningRelay
) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    for _ in range(MAX_WRONG_CODES - 1):
        await post_confirmation(relay, message.tokens["approve"], message.wrong_code)
    await decide(page, key="bearer-test-key-of-alice", code=message.wrong_code)
    await heading(page, "Refused").to_be_focused()
    await expect(page.get_by_role("status")).to_contain_text(
        "the message gets a new link when it is edited next"
    )
    await page.goto("about:blank")
    await page.goto(url(relay, message.tokens["approve"]))
    await heading(page, "This link is void").to_be_focused()


async def test_the_page_says_why_a_caller_may_not_decide(page: Page, relay: RunningRelay) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    await decide(page, key="bearer-test-key-of-reader", code=message.code)
    await heading(page, "Refused").to_be_focused()
    await expect(page.get_by_role("status")).to_contain_text(
        "You may not approve: it is not in your rights (can)."
    )
    assert await page.get_by_label("Your key or token").input_value() == ""


async def test_the_page_shows_changes_in_the_meantime_and_approves_nothing(
    page: Page, relay: RunningRelay
) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    await relay.observe(make_event(resources=("WestNO_0", "db-1")))
    await decide(page, key="bearer-test-key-of-alice", code=message.code)
    await heading(page, "It cannot be decided now").to_be_focused()
    await expect(page.get_by_role("status")).to_contain_text(
        "machines: now WestNO_0, db-1; before WestNO_0, WestNO_1."
    )
    await expect(page.locator("form")).to_be_hidden()
    assert await votes(relay) == []


async def test_when_it_is_too_late_there_is_no_form(page: Page, relay: RunningRelay) -> None:
    message = await render_message(relay)
    relay.clock.offset = 7200 - 30
    await page.goto(url(relay, message.tokens["approve"]))
    await expect(page.get_by_role("status")).to_contain_text("Too late: it closed at")
    await expect(page.locator("form")).to_be_hidden()


async def test_an_open_page_says_by_itself_that_voting_has_closed(
    page: Page, relay: RunningRelay
) -> None:
    message = await render_message(relay)
    await page.clock.install()
    closes_at = parse_timestamp(make_event().not_before)
    assert closes_at is not None
    relay.clock.offset = (closes_at - datetime.now(UTC)).total_seconds() - 180
    await opened(page, relay, message.tokens["approve"])
    await page.get_by_label("Reason").fill("drained")
    await expect(page.locator("#facts")).to_contain_text("2 missing")
    relay.clock.offset += 125
    await page.clock.run_for(60_000)
    await expect(page.locator("#facts")).to_contain_text("2 missing")
    await page.clock.run_for(75_000)
    await expect(page.locator("#facts")).to_contain_text("voting closed at")
    await expect(page.locator("#facts")).not_to_contain_text("missing")
    await expect(page.get_by_role("status")).to_contain_text("Too late: it closed at")
    await expect(page.locator("form")).to_be_hidden()


async def test_after_the_start_the_page_shows_no_votes(page: Page, relay: RunningRelay) -> None:
    message = await render_message(relay)
    for client in ("alice", "bob"):
        await relay.decide(by=client)
    await eventually(lambda: relay.azure.started == [(EVENT_ID,)])
    await relay.observe(make_event(event_status="Started", not_before=None))
    await page.goto(url(relay, message.tokens["approve"]))
    await expect(page.locator("#event")).to_contain_text("It is approved")
    await expect(page.locator("#facts")).not_to_contain_text("of 2")


async def test_while_approvals_are_off_the_page_can_be_reloaded(
    page: Page, relay: RunningRelay
) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})
    await decide(page, key="bearer-test-key-of-alice", code=message.code)
    await heading(page, "It cannot be decided now").to_be_focused()
    await expect(page.get_by_role("status")).to_contain_text(
        "Approvals are off: nothing can be decided now."
    )
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "on"})
    await page.get_by_role("button", name="Look again").click()
    await page.get_by_role("button", name="Approve", exact=True).wait_for()
    await expect(page.get_by_role("status")).to_be_hidden()


async def test_while_nothing_can_be_recorded_the_form_is_kept(
    page: Page, relay: RunningRelay
) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    relay.make_store_read_only()
    await decide(page, key="bearer-test-key-of-alice", code=message.code)
    await heading(page, "Nothing can be decided now").to_be_focused()
    connection = relay.store._state_file.connection  # noqa: SLF001  # the disk works again
    connection.execute("PRAGMA query_only = OFF")
    await eventually(lambda: relay.store.write_error is None)
    await page.get_by_role("button", name="Approve", exact=True).click()
    await heading(page, "Recorded").to_be_focused()


async def test_while_the_relay_cannot_be_reached_the_page_offers_another_try(
    page: Page, relay: RunningRelay
) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    await page.context.set_offline(True)
    await decide(page, key="bearer-test-key-of-alice", code=message.code)
    await heading(page, "The relay cannot be reached").to_be_focused()
    await page.evaluate("token => { location.hash = token }", message.tokens["hold"])
    await expect(page.get_by_role("status")).to_contain_text("Nothing was decided.")
    await page.context.set_offline(False)
    await page.get_by_role("button", name="Look again").click()
    await decide(page, key="bearer-test-key-of-alice", button="Hold")
    await heading(page, "Recorded").to_be_focused()
    assert [decision for decision, _, _ in await votes(relay)] == ["hold"]


async def test_while_the_relay_starts_the_page_says_so(page: Page, relay: RunningRelay) -> None:
    message = await render_message(relay)
    relay.server.state.detach_relay()
    await page.goto(url(relay, message.tokens["approve"]))
    await heading(page, "Nothing can be decided now").to_be_focused()
    relay.server.state.attach_relay(relay.relay)
    await page.get_by_role("button", name="Look again").click()
    await page.get_by_role("button", name="Approve", exact=True).wait_for()


@pytest.mark.parametrize("page", [{"java_script_enabled": False}], indirect=True)
async def test_without_javascript_the_page_names_the_command_line(
    page: Page, relay: RunningRelay
) -> None:
    await page.goto(url(relay, "x"))
    await expect(page.get_by_role("heading", name="This page needs JavaScript")).to_be_visible()
    await expect(page.locator("form")).to_be_hidden()


# --- how it looks


@pytest.mark.parametrize(
    "page",
    [{"color_scheme": "light"}, {"color_scheme": "dark"}, {**PHONE, "color_scheme": "dark"}],
    indirect=True,
)
async def test_every_text_has_contrast_and_every_control_has_a_name(
    page: Page, relay: RunningRelay
) -> None:
    """WCAG 2.2: contrast of 4.5 (1.4.3), labels (3.3.2), targets of 24 pixels (2.5.8)."""
    message = await render_message(relay)

    async def is_well() -> None:
        for text, contrast in await page.evaluate(CONTRAST):
            assert contrast >= 4.5, text
        for field in await page.evaluate(LABELS):
            assert field["name"].strip()
            assert field["described"]
            assert field["height"] >= 24

    await opened(page, relay, message.tokens["approve"])
    await expect(page.get_by_role("main")).not_to_have_attribute("aria-busy", "true")
    await is_well()
    await decide(page, key="bearer-test-key-of-alice", code=message.wrong_code)
    await expect(page.locator("#code-wrong")).to_contain_text("more tries")
    await is_well()
    await decide(page, key="bearer-test-key-of-reader", code=message.code)
    await heading(page, "Refused").to_be_focused()
    await is_well()
    await decide(page, key="bearer-test-key-of-alice", code=message.code)
    await heading(page, "Recorded").to_be_focused()
    await is_well()
    assert await page.locator("html").get_attribute("lang") == "en"
    assert await page.get_by_role("main").count() == 1


@pytest.mark.parametrize("page", [{**PHONE, "reduced_motion": "reduce"}], indirect=True)
async def test_a_hundred_long_names_fit_on_a_phone_and_nothing_moves(
    page: Page, tmp_path: Path
) -> None:
    names = tuple(
        f"machine-with-a-very-long-name-in-production-of-western-europe-{number:06}"
        for number in range(100)
    )
    async with run_relay(tmp_path) as relay:
        await relay.observe(make_event(resources=names, description="x" * 1000))
        message = await render_message(relay)
        await opened(page, relay, message.tokens["approve"])
        await page.get_by_text("All 100 machines").tap()
        await expect(page.get_by_role("listitem").filter(has_text=names[99])).to_be_visible()
        assert await page.evaluate("() => document.documentElement.scrollWidth") == 320
        assert await page.evaluate(
            "() => [...document.querySelectorAll('body *')].every(node => node.scrollWidth <= 320)"
        )
        assert await page.evaluate("() => document.getAnimations().length") == 0


@pytest.mark.parametrize(
    "page", [{"timezone_id": "Asia/Kathmandu", "locale": "en-GB"}], indirect=True
)
async def test_times_are_in_the_readers_zone_and_count_down_by_the_relays_clock(
    page: Page, relay: RunningRelay
) -> None:
    due = parse_timestamp(make_event().not_before)
    assert isinstance(due, datetime)
    relay.clock.offset = (
        due - datetime.now(UTC)
    ).total_seconds() - 3600  # a run of tests may have begun long ago
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    text = await page.locator("#summary time").inner_text()
    assert f"{due.astimezone(ZoneInfo('Asia/Kathmandu')):%H:%M:%S} GMT+5:45" in text
    assert (
        "(in 6" in text or "(in 5" in text
    )  # about an hour: 60 minutes, or a few less on a slow machine


async def test_markup_from_others_is_shown_as_text(page: Page, tmp_path: Path) -> None:
    spell = "<img src=x onerror=document.title='caught'><script>document.title='caught'</script>"
    async with run_relay(tmp_path) as relay:
        await relay.observe(make_event(resources=(spell,), description=spell, event_source=spell))
        message = await render_message(relay)
        await opened(page, relay, message.tokens["approve"])
        await expect(page.get_by_role("heading", level=1)).to_contain_text(spell)
        assert await page.locator("img").count() == 0
        assert await page.locator("script").count() == 1
        assert "caught" not in await page.title()


async def test_behind_a_path_of_a_proxy(
    page: Page, relay: RunningRelay, page_server: AiohttpServer
) -> None:
    """``public_url`` may have a path: the page calls what stands beside it."""
    server = await page_server(proxy_application(relay, "/ops", []))
    message = await render_message(relay)
    await page.goto(f"{server.make_url('/ops/approve')}#{message.tokens['hold']}")
    await page.get_by_role("button", name="Hold", exact=True).wait_for()
    await decide(page, key="bearer-test-key-of-alice", button="Hold")
    await heading(page, "Recorded").to_be_focused()


async def test_another_link_in_the_same_tab_replaces_the_first(
    page: Page, relay: RunningRelay
) -> None:
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    await page.get_by_label("Your key or token").fill("bearer-test-key-of-alice")
    await page.goto(url(relay, message.tokens["hold"]))
    await page.get_by_role("button", name="Hold", exact=True).wait_for()
    assert await page.get_by_label("Your key or token").input_value() == ""


async def test_the_browser_console_stays_empty(page: Page, relay: RunningRelay) -> None:
    """There is no error or warning, and the browser requests no missing icon."""
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("requestfailed", lambda request: messages.append(request.url))
    page.on("request", lambda request: requests.append(request.url))
    message = await render_message(relay)
    await opened(page, relay, message.tokens["approve"])
    await decide(page, key="bearer-test-key-of-alice", code=message.code)
    await heading(page, "Recorded").to_be_focused()
    icon = await page.locator("link[rel=icon]").evaluate(SHOW)
    assert icon == "data:,"
    assert messages == []
    assert {URL(address).path for address in requests if address.startswith("http")} == {
        "/approve",
        "/v1/confirmations",
        "/v1/confirmations/look",
        "/v1/session",
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_links_to_the_runbook_in_a_tab_of_its_own(
    page: Page, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    url_of_runbook = "https://wiki.example.com/reboots#maintenance"
    rule = TWO_VOTES | {"runbook": url_of_runbook}
    await page.emulate_media(color_scheme=scheme)
    async with run_relay(
        tmp_path, approvals={"rules": [rule], "groups": APPROVALS["groups"]}
    ) as relay:
        await relay.observe(make_event())
        message = await render_message(relay)
        await opened(page, relay, message.tokens["approve"])
        link = page.get_by_role("link", name="Runbook of rule two")
        assert [await link.get_attribute(name) for name in ("href", "target", "rel")] == [
            url_of_runbook,
            "_blank",
            "noopener noreferrer",
        ]
        contrasts = await page.evaluate(CONTRAST)
        assert min(contrast for text, contrast in contrasts if text.startswith("A ")) >= 4.5
