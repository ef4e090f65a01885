"""People sign in on the confirm page in a real browser, and approve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from aiohttp import web
from playwright.async_api import Page, expect
from pytest_aiohttp import AiohttpServer
from yarl import URL

from relay.api.auth.sessions import SESSION_LIFETIME
from tests.api.confirmation_links import MessageLinks, proxy_application, render_message
from tests.api.entra import ANN, BEN, principal
from tests.api.running_relay import RunningRelay, make_event, run_relay
from tests.api.signed_in import SESSION_COOKIE, Desk, run_desk
from tests.api.test_confirm_page import CONTRAST, LABELS
from tests.api.test_confirm_page_hostile import Elsewhere, elsewhere  # noqa: F401  # a fixture
from tests.chromium import IN_SESSION_LOOP
from tests.ports import reserve

pytestmark = IN_SESSION_LOOP

SIGN_IN = "Sign in with Entra ID"
STORED = "() => JSON.stringify([localStorage, sessionStorage, document.cookie])"


@pytest_asyncio.fixture(loop_scope="session")
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """A relay at which people sign in."""
    async with run_desk(tmp_path) as running:
        yield running


async def opened(
    page: Page, desk: Desk, decision: str = "approve", message: MessageLinks | None = None
) -> MessageLinks:
    """Open the page of a link, and wait until it asks who decides."""
    message = message or await render_message(desk.relay)
    await page.goto("about:blank")
    await page.goto(f"{desk.public_url}/approve#{message.tokens[decision]}")
    await page.locator("#decide").wait_for()
    return message


async def sign_in(page: Page, name: str = "Ann Example") -> None:
    """Sign in with the account of this name."""
    await page.get_by_role("button", name=SIGN_IN).click()
    await page.get_by_role("link", name=name).click()


async def votes(relay: RunningRelay) -> list[tuple[str, str]]:
    """Return what was recorded: decision and principal."""
    return [
        (event["data"]["decision"], event["data"]["principal"])
        for event in await relay.recorded_events("approval.recorded")
    ]


async def test_a_person_signs_in_and_approves_without_a_key(page: Page, desk: Desk) -> None:
    """The link survives the way to Entra ID and back, and is sent to nobody but the relay."""
    visited: list[str] = []
    page.on("request", lambda request: visited.append(f"{request.url} {request.post_data}"))
    message = await opened(page, desk)
    token = message.tokens["approve"]
    await sign_in(page)
    await expect(page.locator("#signed-in")).to_contain_text("Ann Example")
    assert page.url == f"{desk.public_url}/approve"
    assert await page.evaluate(STORED) == '[{},{},""]'
    await expect(page.get_by_label("Your key or token")).to_be_hidden()
    await expect(page.get_by_role("button", name=SIGN_IN)).to_be_hidden()
    await page.get_by_label("Code in the message").fill(message.code)
    await page.get_by_role("button", name="Approve", exact=True).click()
    await expect(page.get_by_role("heading", name="Recorded")).to_be_focused()
    assert await votes(desk.relay) == [("approve", principal(ANN))]
    with_token = {each.partition(" ")[0] for each in visited if token in each}
    assert with_token == {
        f"{desk.public_url}/v1/confirmations/look",
        f"{desk.public_url}/v1/confirmations",
    }
    origins = {str(URL(each.partition(" ")[0]).origin()) for each in visited}
    assert origins == {desk.origin, desk.entra.origin}
    for parameters in desk.entra.calls_of("authorize"):
        assert token not in str(parameters)
    (cookie,) = await page.context.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["secure"], cookie["sameSite"]) == (
        SESSION_COOKIE,
        True,
        True,
        "Strict",
    )


async def test_a_person_signs_in_behind_a_proxy_that_serves_the_relay_under_a_path(
    page: Page, tmp_path: Path, page_server: AiohttpServer
) -> None:
    (port,) = reserve(1)
    seen: list[web.Request] = []
    async with run_desk(tmp_path, public_url=f"http://127.0.0.1:{port}/ops/relay") as desk:
        await page_server(proxy_application(desk.relay, "/ops/relay", seen), port=port)
        message = await opened(page, desk)
        await sign_in(page)
        await page.get_by_label("Code in the message").fill(message.code)
        await page.get_by_role("button", name="Approve", exact=True).click()
        await expect(page.get_by_role("heading", name="Recorded")).to_be_focused()
        assert page.url == f"{desk.public_url}/approve"
        assert await votes(desk.relay) == [("approve", principal(ANN))]
        await page.goto(f"{desk.public_url}/approve#{message.tokens['hold']}")
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_role("button", name=SIGN_IN)).to_be_focused()
    assert {request.path.removeprefix("/ops/relay") for request in seen} == {
        "/approve",
        "/v1/confirmations/look",
        "/v1/session",
        "/sign-in",
        "/sign-in/callback",
        "/v1/confirmations",
        "/sign-out",
    }


async def test_another_link_in_the_same_browser_needs_no_new_sign_in_until_signing_out(
    page: Page, desk: Desk
) -> None:
    message = await opened(page, desk)
    await sign_in(page)
    await expect(page.locator("#signed-in")).to_be_visible()
    await opened(page, desk, "hold", message)
    await expect(page.locator("#signed-in")).to_be_visible()
    await page.get_by_role("button", name="Hold", exact=True).click()
    await expect(page.get_by_role("heading", name="Recorded")).to_be_focused()
    assert await votes(desk.relay) == [("hold", principal(ANN))]
    await opened(page, desk, "release")
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_role("button", name=SIGN_IN)).to_be_focused()
    assert await page.context.cookies() == []
    await expect(page.get_by_label("Your key or token")).to_be_visible()
    await page.get_by_role("button", name="Release the hold").click()
    await expect(page.locator("#key-wrong")).to_have_text("Sign in, or enter a key.")
    assert len(await votes(desk.relay)) == 1


async def test_a_session_that_is_over_is_told_and_nothing_is_lost(page: Page, desk: Desk) -> None:
    message = await opened(page, desk)
    await sign_in(page)
    await page.get_by_label("Code in the message").fill(message.code)
    desk.relay.clock.offset = SESSION_LIFETIME
    await page.get_by_role("button", name="Approve", exact=True).click()
    await expect(page.locator("#sign-in-wrong")).to_be_focused()
    await expect(page.locator("#sign-in-wrong")).to_contain_text("Your session has ended")
    assert await votes(desk.relay) == []
    assert await page.context.cookies() == []
    await expect(page.get_by_label("Code in the message")).to_have_value(message.code)
    await sign_in(page)
    await expect(page.locator("#signed-in")).to_be_visible()


async def test_somebody_who_signs_in_in_another_tab_does_not_decide_unseen(
    page: Page, desk: Desk
) -> None:
    message = await opened(page, desk)
    await sign_in(page)
    await page.get_by_label("Code in the message").fill(message.code)
    other = await page.context.new_page()
    await opened(other, desk, message=message)
    await other.get_by_role("button", name="Sign out").click()
    await sign_in(other, "Ben Example")
    await expect(other.locator("#person")).to_have_text("Ben Example")
    await expect(page.locator("#person")).to_have_text("Ann Example")
    await page.get_by_role("button", name="Approve", exact=True).click()
    await expect(page.get_by_role("heading", name="Somebody else has signed in")).to_be_focused()
    await expect(page.locator("#person")).to_have_text("Ben Example")
    assert await votes(desk.relay) == []
    await page.get_by_role("button", name="Approve", exact=True).click()
    await expect(page.get_by_role("heading", name="Recorded")).to_be_focused()
    assert await votes(desk.relay) == [("approve", principal(BEN))]


async def test_who_cancels_at_entra_comes_back_to_the_link(page: Page, desk: Desk) -> None:
    await opened(page, desk)
    await sign_in(page, "Cancel")
    await expect(page.get_by_role("heading", name="You are not signed in")).to_be_visible()
    await expect(page.locator("main")).to_contain_text("access_denied AADSTS65004")
    assert [row for row in await page.evaluate(CONTRAST) if row[1] < 4.5] == []
    await page.get_by_role("link", name="Back to the relay's page").click()
    await expect(page.get_by_role("button", name=SIGN_IN)).to_be_visible()
    await expect(page.locator("#decide")).to_have_text("Approve")


async def test_a_kept_link_gives_way_to_a_newer_one_and_grows_old(page: Page, desk: Desk) -> None:
    message = await opened(page, desk)
    await page.get_by_role("button", name=SIGN_IN).click()
    await page.get_by_role("link", name="Cancel").wait_for()
    await opened(page, desk, "hold", message)
    await expect(page.locator("#decide")).to_have_text("Hold")
    assert await page.evaluate("() => sessionStorage.length") == 0
    await page.reload()
    await expect(page.get_by_role("heading", name="No link")).to_be_visible()
    for kept in ('{"token": "x", "at": 1}', "no JSON", "null", "7"):
        await page.evaluate("kept => sessionStorage.setItem('imds-relay link', kept)", kept)
        await page.reload()
        await expect(page.get_by_role("heading", name="No link")).to_be_visible()
    assert await page.evaluate("() => sessionStorage.length") == 0


async def test_a_person_may_use_a_key_instead(page: Page, desk: Desk) -> None:
    await opened(page, desk, "hold")
    await page.get_by_label("Your key or token").fill("bearer-test-key-of-alice")
    await page.get_by_role("button", name="Hold", exact=True).click()
    await expect(page.get_by_role("heading", name="Recorded")).to_be_focused()
    assert await votes(desk.relay) == [("hold", "client:alice")]


async def test_the_form_with_sign_in_has_contrast_labels_and_large_buttons(
    page: Page, desk: Desk
) -> None:
    message = await render_message(desk.relay)
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        await opened(page, desk, message=message)
        assert [row for row in await page.evaluate(CONTRAST) if row[1] < 4.5] == []
        controls = await page.evaluate(LABELS)
        assert all(each["name"].strip() and each["described"] for each in controls)
        assert all(each["height"] >= 24 for each in controls)
    await sign_in(page)
    await expect(page.locator("#signed-in")).to_be_visible()
    assert [row for row in await page.evaluate(CONTRAST) if row[1] < 4.5] == []
    assert all(each["height"] >= 24 for each in await page.evaluate(LABELS))


async def test_a_page_of_another_site_can_use_no_session(
    page: Page,
    desk: Desk,
    elsewhere: Elsewhere,  # noqa: F811
) -> None:
    """With a form, with fetch, and by a sign-in that the person did not begin."""
    await opened(page, desk)
    await sign_in(page)
    await expect(page.locator("#signed-in")).to_be_visible()
    before = await page.context.cookies()
    target = elsewhere("<a id=begin>").replace("127.0.0.1", "localhost")
    for hostile in (target, target.replace("localhost", "127.0.0.1")):  # another site, and this one
        await page.goto(hostile)
        await page.evaluate(
            """async ([origin, body]) => {
              const calls = [
                ["/v1/approvals", {"Content-Type": "text/plain"}],
                ["/v1/approvals", {"Content-Type": "application/json"}],
                ["/v1/approvals", {"Content-Type": "application/json",
                                   "X-Requested-With": "imds-relay"}],
                ["/sign-out", {}],
                ["/sign-out", {"X-Requested-With": "imds-relay"}],
              ];
              for (const mode of ["cors", "no-cors"]) for (const [path, headers] of calls) {
                const options = { method: "POST", mode, credentials: "include", headers, body };
                await fetch(origin + path, options).catch(() => {});
              }
            }""",
            [desk.origin, '{"eventId": "x", "decision": "hold", "revision": "x"}'],
        )
        await page.evaluate(
            f"""() => {{
              const form = document.createElement("form");
              form.method = "POST"; form.action = "{desk.origin}/sign-out";
              document.body.append(form); form.submit();
            }}"""
        )
        await page.wait_for_url(f"{desk.origin}/sign-out")
        await page.goto(hostile)
        await page.evaluate(f"() => {{ location.href = '{desk.origin}/sign-in?to=/approve'; }}")
        await expect(page.get_by_role("heading", name="You are not signed in")).to_be_visible()
    assert await page.context.cookies() == before
    assert await votes(desk.relay) == []
    assert await desk.relay.recorded_events("approval.refused") == []
    assert (await desk.relay.call("GET", "/v1/events")).status == 200


async def test_without_sign_in_the_page_does_not_speak_of_it(page: Page, tmp_path: Path) -> None:
    async with run_relay(tmp_path) as relay:
        await relay.observe(make_event())
        message = await render_message(relay)
        await page.goto(f"http://127.0.0.1:{relay.server.port}/approve#{message.tokens['approve']}")
        await page.locator("#decide").wait_for()
        assert "sign in" not in (await page.locator("body").inner_text()).lower()
        await page.locator("#decide").click()
        await page.get_by_label("Code in the message").fill(message.code)
        await page.locator("#decide").click()
        await expect(page.locator("#key-wrong")).to_have_text("The key is missing.")
