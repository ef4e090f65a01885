"""Who may read the page: keys, and people who sign in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from aiohttp import web
from playwright.async_api import Page, expect

from relay.api.sessions import SESSION_LIFETIME
from tests.api.entra import ANN, BEN, principal
from tests.api.message_links import message_links
from tests.api.running_relay import RunningRelay, make_event
from tests.api.signed_in import Desk, run_desk
from tests.chromium import IN_SESSION_LOOP
from tests.cli.command import serve_handler
from tests.page.scenes import page_url, show

pytestmark = IN_SESSION_LOOP


@pytest_asyncio.fixture(loop_scope="session")
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with run_desk(tmp_path) as desk:
        yield desk


KEPT = "() => JSON.stringify([localStorage, document.cookie, location.href, history.state])"
"""Returns what a page keeps outside of sessionStorage."""


async def enter(page: Page, key: str) -> None:
    await page.get_by_label("Your key or token").fill(key)
    await page.get_by_role("button", name="Continue").click()


async def sign_in_as_ann(page: Page, url: str) -> None:
    await page.goto(url)
    await page.get_by_role("link", name="Sign in with Entra ID").click()
    await page.get_by_role("link", name="Ann Example").click()


async def test_a_key_is_asked_for_kept_and_forgotten(page: Page, relay: RunningRelay) -> None:
    await page.goto(page_url(relay, "log"))
    await expect(page.get_by_label("Your key or token")).to_be_focused()
    await enter(page, "bearer-test-key-of-alice")
    await expect(page.get_by_role("heading", name="Log")).to_be_visible()
    await expect(page.locator("#principal")).to_have_text("client:alice")
    assert "bearer" not in await page.evaluate(KEPT)
    assert await page.locator("#key").input_value() == ""
    await page.reload()
    await expect(page.get_by_role("heading", name="Log")).to_be_visible()
    await page.get_by_role("button", name="Forget key").click()
    await expect(page.get_by_label("Your key or token")).to_be_focused()
    await expect(page.locator("#view")).to_be_hidden()
    assert "bearer" not in await page.evaluate("() => JSON.stringify(sessionStorage)")
    await page.reload()
    await expect(page.get_by_label("Your key or token")).to_be_visible()


async def test_a_wrong_key_is_explained_and_not_kept(page: Page, relay: RunningRelay) -> None:
    await page.goto(page_url(relay))
    field = page.get_by_label("Your key or token")
    for key, problem in (
        ("", "The key is missing."),
        ("schlüssel von alice", "This cannot be a key"),
        ("bearer-test-key-of-nobody", "The relay does not know this key"),
        ("bearer-test-key-of-mute", "You may not read here: client:mute may not read"),
    ):
        await enter(page, key)
        await expect(page.get_by_role("alert").filter(has_text=problem)).to_be_visible()
        await expect(field).to_be_focused()
        await expect(field).to_have_attribute("aria-invalid", "true")
        assert await page.evaluate("() => sessionStorage.length") == 0, key


async def test_a_key_that_is_withdrawn_ends_the_visit(page: Page, relay: RunningRelay) -> None:
    await show(page, relay, by="reader")
    settings = relay.server.state.callers.settings
    relay.server.prepare_reload(settings.model_copy(update={"clients": ()}))()
    await expect(page.locator("#key-wrong")).to_contain_text("or it is not valid any more")
    await expect(page.locator("#view")).to_be_hidden()


async def test_people_sign_in_with_entra_id_decide_and_sign_out(page: Page, desk: Desk) -> None:
    await page.goto(f"{desk.public_url}/#/log")
    link = page.get_by_role("link", name="Sign in with Entra ID")
    await expect(link).to_be_focused()
    await expect(page.get_by_label("Your key or token")).to_be_hidden()
    await link.click()
    await page.get_by_role("link", name="Ann Example").click()
    await expect(page.get_by_role("heading", name="Log")).to_be_visible()  # where she was
    await expect(page.locator("#principal")).to_have_text("Ann Example")
    await page.get_by_role("link", name="Now").click()
    await page.get_by_role("button", name="Approve").click()
    await page.get_by_role("dialog").get_by_role("button", name="Approve").click()
    await expect(page.get_by_role("heading", name="Recorded")).to_be_focused()
    (vote,) = await desk.relay.recorded_events("approval.recorded")
    assert vote["data"]["principal"] == principal(ANN)
    await page.get_by_role("button", name="Close").click()
    await page.get_by_role("button", name="Sign out").click()
    await expect(link).to_be_focused()
    assert (await desk.relay.call("GET", "/v1/events", by=None)).status == 401
    await page.get_by_text("Use a key instead").click()
    await enter(page, "bearer-test-key-of-alice")
    await expect(page.get_by_role("heading", name="Scheduled now")).to_be_visible()


async def test_who_signs_in_in_another_tab_does_not_decide_unseen(page: Page, desk: Desk) -> None:
    await sign_in_as_ann(page, f"{desk.public_url}/")
    await expect(page.locator("#principal")).to_have_text("Ann Example")
    await page.get_by_role("button", name="Hold").click()
    other = await page.context.new_page()
    await other.goto(f"{desk.public_url}/sign-in")
    await other.get_by_role("link", name="Ben Example").click()
    await expect(other.locator("#principal")).to_have_text("Ben Example")
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Hold").click()
    await expect(dialog.locator("#decide-wrong")).to_contain_text("Somebody else has signed in")
    await expect(page.locator("#principal")).to_have_text(principal(BEN))
    assert await desk.relay.recorded_events("approval.recorded") == []
    await dialog.get_by_role("button", name="Cancel").click()
    await page.get_by_role("button", name="Hold").click()
    await dialog.get_by_role("button", name="Hold").click()
    await expect(page.get_by_role("heading", name="Recorded")).to_be_visible()
    (hold,) = await desk.relay.recorded_events("approval.recorded")
    assert hold["data"]["principal"] == principal(BEN)


async def test_a_session_that_ends_asks_to_sign_in_again(page: Page, desk: Desk) -> None:
    await sign_in_as_ann(page, f"{desk.public_url}/")
    await expect(page.get_by_role("heading", name="Scheduled now")).to_be_visible()
    desk.relay.clock.offset += SESSION_LIFETIME + 1
    alert = page.get_by_role("alert").first
    await expect(alert).to_have_text("Your session has ended. Sign in again.")


async def test_a_link_asks_who_decides_and_leads_to_its_decision(page: Page, desk: Desk) -> None:
    """It survives the way to Entra ID and back, counts for what the message showed, and once."""
    links = await message_links(desk.relay)
    await sign_in_as_ann(page, links["approve"])
    dialog = page.get_by_role("dialog", name="Approve?")
    await expect(dialog).to_contain_text(make_event().revision)
    assert await desk.relay.recorded_events("approval.recorded") == []
    await dialog.get_by_role("button", name="Approve").click()
    await expect(page.get_by_role("heading", name="Recorded")).to_be_focused()
    (vote,) = await desk.relay.recorded_events("approval.recorded")
    assert vote["data"]["principal"] == principal(ANN)
    await page.reload()
    await expect(page.locator("#history li").first).to_be_visible()
    await expect(page.get_by_role("dialog")).to_be_hidden()
    # She has voted, so the same link has nothing to ask.
    await page.goto("about:blank")
    await page.goto(links["approve"])
    await expect(page.locator(".toast")).to_contain_text("is not possible for you now")


async def test_a_page_of_another_site_can_use_no_session(page: Page, tmp_path: Path) -> None:
    """With a form, with fetch, and by a sign-in that the person did not begin."""

    async def serve(_: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><body>", content_type="text/html")

    async with serve_handler(serve) as hostile, run_desk(tmp_path) as desk:
        await sign_in_as_ann(page, f"{desk.public_url}/")
        await expect(page.locator("#principal")).to_have_text("Ann Example")
        before = await page.context.cookies()
        for url in (hostile.replace("127.0.0.1", "localhost"), hostile):
            await page.goto(url)
            await page.evaluate(
                """async ([origin, body]) => {
                  const json = {"Content-Type": "application/json"};
                  const own = {"X-Requested-With": "imds-relay"};
                  for (const mode of ["cors", "no-cors"])
                    for (const path of ["/v1/approvals", "/sign-out"])
                      for (const headers of [{"Content-Type": "text/plain"}, {...json, ...own}])
                        await fetch(origin + path,
                          {method: "POST", mode, credentials: "include", headers, body}
                        ).catch(() => {});
                }""",
                [desk.origin, '{"eventId": "x", "decision": "hold", "revision": "x"}'],
            )
            await page.evaluate(f"() => {{ location.href = '{desk.origin}/sign-in'; }}")
            await expect(page.get_by_role("heading", name="You are not signed in")).to_be_visible()
        assert await page.context.cookies() == before
        assert await desk.relay.recorded_events("approval.recorded") == []
        assert await desk.relay.recorded_events("approval.refused") == []


async def test_behind_a_path_of_a_proxy(page: Page, relay: RunningRelay) -> None:
    async def forward(request: web.Request) -> web.StreamResponse:
        target = f"http://127.0.0.1:{relay.server.port}/{request.path.removeprefix('/ops/')}"
        passed = {
            name: value
            for name, value in request.headers.items()
            if name in ("Authorization", "Last-Event-ID", "Content-Type", "Idempotency-Key")
        }
        async with relay.session.request(
            request.method, target, params=request.query, data=await request.read(), headers=passed
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=answer.headers)
            response.headers.pop("Content-Length", None)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            return response

    async with serve_handler(forward) as url:
        await page.goto(f"{url}/ops/")
        await enter(page, "bearer-test-key-of-alice")
        await expect(page.locator("#live")).to_have_text("Live")
        await relay.decide("hold", by="bob")
        await expect(page.locator(".event")).to_contain_text("on hold")
        await page.goto("about:blank")
        relay.server.state.detach_relay()  # ends the stream that the proxy still reads
