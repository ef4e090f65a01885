"""The browser that tests are given is a real one, and shows what a test asks it to be."""

from __future__ import annotations

from pathlib import Path

import playwright
import pytest
from aiohttp import web
from playwright.async_api import Browser, Page
from pytest_aiohttp import AiohttpServer

from tests.chromium import driver

DARK = "() => matchMedia('(prefers-color-scheme: dark)').matches"


async def test_a_page_runs_scripts_and_talks_to_a_server(
    page: Page, aiohttp_server: AiohttpServer
) -> None:
    async def home(_: web.Request) -> web.Response:
        script = (
            "fetch('/word').then(answer => answer.text()).then(word => "
            "document.querySelector('h1').textContent = word)"
        )
        return web.Response(
            text=f"<!doctype html><title>Home</title><h1></h1><script>{script}</script>",
            content_type="text/html",
        )

    async def word(_: web.Request) -> web.Response:
        return web.Response(text="fetched")

    application = web.Application()
    application.add_routes([web.get("/", home), web.get("/word", word)])
    server = await aiohttp_server(application)
    await page.goto(str(server.make_url("/")))
    await page.get_by_role("heading", name="fetched").wait_for()
    assert await page.title() == "Home"


@pytest.mark.parametrize(
    "page",
    [{"color_scheme": "dark", "viewport": {"width": 320, "height": 568}}],
    ids=["dark phone"],
    indirect=True,
)
async def test_a_page_is_as_wide_and_dark_as_was_asked(page: Page) -> None:
    assert await page.evaluate(DARK) is True
    assert await page.evaluate("() => innerWidth") == 320


async def test_contexts_share_no_cookies(browser: Browser) -> None:
    first, second = await browser.new_context(), await browser.new_context()
    await first.add_cookies([{"name": "seen", "value": "1", "url": "http://127.0.0.1"}])
    assert await first.cookies()
    assert not await second.cookies()


def test_a_driver_whose_loader_is_missing_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "driver" / "node"
    node.parent.mkdir()
    node.write_text(f"#!{tmp_path}/loader\n")
    node.chmod(0o755)
    monkeypatch.setattr(playwright, "__file__", str(tmp_path / "__init__.py"))
    assert driver() is None
