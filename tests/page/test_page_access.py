"""Who may read the page: keys, and people who sign in."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from playwright.async_api import Page, expect
from pytest_aiohttp import AiohttpServer

from tests.api.running_relay import RunningRelay
from tests.page.scenes import page_url, show

KEPT = "() => JSON.stringify([localStorage, document.cookie, location.href, history.state])"
"""Returns what a page keeps outside of sessionStorage."""


async def enter(page: Page, key: str) -> None:
    """Enter a key."""
    await page.get_by_label("Your key or token").fill(key)
    await page.get_by_role("button", name="Continue").click()


async def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(
    page: Page, relay: RunningRelay
) -> None:
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
    relay.server.suspend_clients(["reader"])
    await expect(page.locator("#key-wrong")).to_contain_text("or it is not valid any more")
    await expect(page.locator("#view")).to_be_hidden()


async def test_people_sign_in_where_that_is_configured(page: Page, relay: RunningRelay) -> None:
    """The session says so; a relay without sign-in does not know the path."""
    session: dict[str, Any] = {"signIn": "/sign-in", "principal": None, "name": None, "can": []}
    await page.route("**/v1/session", lambda route: route.fulfill(body=json.dumps(session)))
    await page.goto(page_url(relay))
    link = page.get_by_role("link", name="Sign in")
    await expect(link).to_be_focused()
    assert await link.get_attribute("href") == "sign-in?to=/"
    await expect(page.get_by_label("Your key or token")).to_be_hidden()
    await page.get_by_text("Use a key instead").click()
    await enter(page, "bearer-test-key-of-alice")
    await expect(page.get_by_role("heading", name="Scheduled now")).to_be_visible()
    await page.get_by_role("button", name="Forget key").click()
    session["principal"] = "entra:t/o"  # a session that the relay does not take any more
    await page.reload()
    await expect(page.get_by_role("alert").first).to_have_text(
        "Your session has ended. Sign in again."
    )


async def test_behind_a_path_of_a_proxy(
    page: Page, relay: RunningRelay, aiohttp_server: AiohttpServer
) -> None:
    async def forward(request: web.Request) -> web.StreamResponse:
        target = f"http://127.0.0.1:{relay.server.port}/{request.match_info['rest']}"
        passed = {
            name: value
            for name, value in request.headers.items()
            if name in ("Authorization", "Last-Event-ID", "Content-Type", "Idempotency-Key")
        }
        async with relay.session.request(
            request.method,
            target,
            params=request.query,
            data=await request.read(),
            headers=passed,
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=answer.headers)
            response.headers.pop("Content-Length", None)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            return response

    application = web.Application()
    application.router.add_route("*", "/ops/{rest:.*}", forward)
    server = await aiohttp_server(application)
    await page.goto(str(server.make_url("/ops/")))
    await enter(page, "bearer-test-key-of-alice")
    await expect(page.locator("#live")).to_have_text("Live")
    await relay.decide("hold", by="bob")
    await expect(page.locator(".event")).to_contain_text("on hold")
    await page.goto("about:blank")
    relay.server.state.detach()  # ends the stream that the proxy still reads
