"""The page behind the links in messages, among other pages: what loads it, frames it, posts to it or gets into it approves nothing."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest
from aiohttp import web
from playwright.async_api import Error, Page, Route, expect
from pytest_aiohttp import AiohttpServer

from tests.api.confirmation_links import Message, message, proxy
from tests.api.running_relay import EVENT_ID, Running, event, until

KEPT = """() => JSON.stringify([
  localStorage, sessionStorage, document.cookie, history.state, name, document.referrer, document.documentElement.outerHTML])"""
"""All that a page keeps or shows, but for its variables."""
ATTACKS = (
    "document.body.appendChild(document.createElement('script')).text = 'document.title = \"caught\"'",
    "document.body.innerHTML += '<img src=x onerror=\"document.title = `caught`\">'",
    "document.body.setAttribute('onclick', 'document.title = \"caught\"'); document.body.click()",
    "setTimeout('document.title = \"caught\"', 0)",
    "setTimeout(() => new Function('document.title = \"caught\"')())",
    "document.body.appendChild(document.createElement('script')).src = 'data:text/javascript,document.title=`caught`'",
)
"""Ways to get a script into a page."""
BY_HASH = ("script-src-elem", "script-src-attr", "script-src")
Elsewhere = Callable[[str], str]
"""Makes a page of another origin from its body."""


@pytest.fixture
async def elsewhere(aiohttp_server: AiohttpServer) -> Elsewhere:
    """A server of other pages."""
    bodies: list[str] = []

    async def serve(_: web.Request) -> web.Response:
        return web.Response(
            text=f"<!doctype html><title>Elsewhere</title><body>{bodies[-1]}",
            content_type="text/html",
        )

    application = web.Application()
    application.add_routes([web.get("/", serve)])
    server = await aiohttp_server(application)

    def put(body: str) -> str:
        bodies.append(body)
        return str(server.make_url("/"))

    return put


def here(relay: Running) -> str:
    """Where the relay is."""
    return f"http://127.0.0.1:{relay.server.port}"


async def opened(page: Page, relay: Running) -> Message:
    """The page, ready to approve."""
    sent = await message(relay)
    await page.goto(f"{here(relay)}/approve#{sent.tokens['approve']}")
    await page.get_by_role("button", name="Approve", exact=True).wait_for()
    return sent


async def nothing_happened(relay: Running) -> None:
    """No vote, no hold, no refusal, no StartRequest, and no guess that was counted."""
    said = [
        one
        for name in ("approval.recorded", "approval.refused", "approval.granted")
        for one in await relay.said(name)
    ]
    wrong = await relay.store.read(
        lambda tx: tx._connection.execute("SELECT sum(wrong) FROM invitation").fetchone()[0]
    )  # noqa: SLF001  # what is kept
    assert (said, relay.azure.started, wrong or 0) == ([], [], 0)


async def test_the_link_is_gone_from_the_address_bar_and_kept_nowhere(
    page: Page, relay: Running
) -> None:
    sent = await opened(page, relay)
    token = sent.tokens["approve"]
    assert page.url == f"{here(relay)}/approve"
    await page.get_by_label("Your key or token").fill("key-of-alice")
    found = await page.evaluate(KEPT)
    assert token not in found
    assert "key-of-alice" not in found
    assert await page.context.cookies() == []
    await page.reload()
    await expect(page.get_by_role("heading", name="No link")).to_be_visible()
    assert await page.get_by_label("Your key or token").input_value() == ""
    await page.go_back()
    assert page.url == "about:blank"


async def test_the_link_is_in_no_address_and_no_header_and_nothing_comes_from_anywhere_else(
    page: Page, relay: Running, aiohttp_server: AiohttpServer
) -> None:
    """As a proxy on the way sees it."""
    seen: list[web.Request] = []
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    server = await aiohttp_server(proxy(relay, "", seen))
    sent = await message(relay)
    token = sent.tokens["approve"]
    await page.goto(f"{server.make_url('/approve')}#{token}")
    await page.get_by_label("Code in the message").fill(sent.code)
    await page.get_by_label("Your key or token").fill("key-of-alice")
    await page.get_by_role("button", name="Approve", exact=True).click()
    await expect(page.get_by_role("heading", name="Recorded")).to_be_visible()
    assert [one.raw_path for one in seen] == [
        "/approve",
        "/v1/confirmations/look",
        "/v1/confirmations",
        "/v1/confirmations/look",
    ]
    assert len(asked) == len(seen)
    for one in seen:
        assert "Referer" not in one.headers
        assert token not in str(one.raw_headers)
        assert ("Authorization" in one.headers) == (one.path == "/v1/confirmations")


async def test_a_script_that_gets_into_the_page_does_not_run(page: Page, relay: Running) -> None:
    """What this test itself runs comes from the debugger, which no policy stops; what that puts into the page is stopped."""
    sent = await message(relay)
    for attack in ATTACKS:
        assert await _stopped(page, relay, sent, attack) in (
            *BY_HASH,
            "require-trusted-types-for",
        ), attack


async def test_nor_does_it_in_a_browser_that_knows_no_trusted_types(
    page: Page, relay: Running
) -> None:
    """The page's script is known by its hash, and no other runs; even one that is in the page from the beginning."""

    async def older(route: Route) -> None:
        answer = await route.fetch()
        policy = answer.headers["content-security-policy"].partition("; require-trusted-types-for")[
            0
        ]
        body = (await answer.text()).replace(
            "</main>", "<script>document.title = 'caught'</script></main>"
        )
        await route.fulfill(
            body=body, headers={**answer.headers, "content-security-policy": policy}
        )

    await page.route("**/approve", older)
    sent = await message(relay)
    for attack in ATTACKS:
        assert await _stopped(page, relay, sent, attack) in BY_HASH, attack


async def _stopped(page: Page, relay: Running, sent: Message, attack: str) -> object:
    """The directive of the policy that an attack ran into."""
    await page.goto("about:blank")
    await page.goto(f"{here(relay)}/approve#{sent.tokens['approve']}")
    directive = await page.evaluate(f"""() => new Promise(done => {{
      addEventListener('securitypolicyviolation', event => done(event.effectiveDirective));
      try {{ {attack} }} catch {{ }}
    }})""")
    await page.evaluate("() => new Promise(done => setTimeout(done))")
    assert "caught" not in await page.title(), attack
    return directive


async def test_the_page_can_call_nobody_else(
    page: Page, relay: Running, elsewhere: Elsewhere
) -> None:
    await opened(page, relay)
    there = elsewhere("")
    with pytest.raises(Error, match="Failed to fetch"):
        await page.evaluate(
            "there => fetch(there, {method: 'POST', mode: 'no-cors', body: 'x'})", there
        )
    with pytest.raises(Error, match="stopped"):
        await page.evaluate(
            "there => new Promise((_, stopped) => Object.assign(new Image(), {onerror: () => stopped('stopped'), src: there}))",
            there,
        )
    form = """where => new Promise(done => {
      addEventListener('securitypolicyviolation', event => done(event.effectiveDirective));
      Object.assign(document.body.appendChild(document.createElement('form')), {action: where, method: 'POST'}).submit();
    })"""
    for where in (there, ""):
        assert await page.evaluate(form, where) == "form-action"
    assert page.url == f"{here(relay)}/approve"


async def test_no_other_page_frames_it(page: Page, relay: Running, elsewhere: Elsewhere) -> None:
    """Nor one of the relay's own origin, were there any."""
    sent = await message(relay)
    link = f"{here(relay)}/approve#{sent.tokens['hold']}"
    refused: list[str] = []
    page.on("console", lambda said: refused.append(said.text))
    await page.goto(
        elsewhere(
            f"<iframe src='{link}'></iframe><object data='{link}'></object><embed src='{link}'>"
        )
    )
    await until(
        lambda: page.evaluate("1"), lambda _: sum("frame-ancestors" in one for one in refused) >= 1
    )
    for frame in page.frames[1:]:
        assert await frame.locator("form").count() == 0
    await nothing_happened(relay)


async def test_who_loads_or_prefetches_a_link_approves_nothing(
    page: Page, relay: Running, elsewhere: Elsewhere
) -> None:
    sent = await message(relay)
    link = f"{here(relay)}/approve#{sent.tokens['hold']}"
    seen: list[str] = []
    page.on("requestfinished", lambda request: seen.append(request.url))
    page.on("requestfailed", lambda request: seen.append(request.url))
    rules = orjson.dumps({"prerender": [{"urls": [link]}], "prefetch": [{"urls": [link]}]}).decode()
    body = f"<link rel=prefetch href='{link}'><img src='{link}'><script src='{link}'></script><script type=speculationrules>{rules}</script>"
    await page.goto(elsewhere(body))
    await until(lambda: page.evaluate("1"), lambda _: sum(here(relay) in one for one in seen) >= 2)
    await nothing_happened(relay)


async def test_a_scanner_that_runs_scripts_and_presses_every_button_approves_nothing(
    page: Page, relay: Running
) -> None:
    """It has no code and no key, and what it guesses is no key: nothing is used up for those who have both."""
    await opened(page, relay)
    press = """() => [...document.querySelectorAll('form, button')].filter(one => one.checkVisibility())
      .forEach(one => one.requestSubmit ? one.requestSubmit() : one.click())"""
    await page.evaluate(press)
    await expect(page.locator("#code-wrong")).to_contain_text("The code is missing")
    await page.evaluate(
        "() => document.querySelectorAll('input, textarea').forEach(one => { one.value = '123456' })"
    )
    async with page.expect_response("**/v1/confirmations") as answered:
        await page.evaluate(press)
    assert (await answered.value).status == 401
    await page.evaluate("() => document.querySelector('form').submit()")
    assert page.url == f"{here(relay)}/approve"
    await nothing_happened(relay)


async def test_a_form_of_another_page_decides_nothing(
    page: Page, relay: Running, elsewhere: Elsewhere
) -> None:
    sent = await message(relay)
    wish = orjson.dumps({"token": sent.tokens["hold"], "reason": "x"}).decode()[:-2]
    for encoding in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        form = f"<form method=post enctype='{encoding}' action='{here(relay)}/v1/confirmations'><input name='{wish}' value='\"}}'></form>"
        async with page.expect_response("**/v1/confirmations") as answered:
            await page.goto(elsewhere(f"{form}<script>document.forms[0].submit()</script>"))
        assert (await answered.value).status == 415, encoding
    await nothing_happened(relay)


async def test_a_script_of_another_page_is_not_let_through(
    page: Page, relay: Running, elsewhere: Elsewhere
) -> None:
    """It may not send JSON or a key, and may not read an answer."""
    sent = await message(relay)
    await page.goto(elsewhere(""))
    wish = {
        "token": sent.tokens["hold"],
        "eventId": EVENT_ID,
        "decision": "hold",
        "revision": event().revision,
    }
    call = """([to, wish, kind, mode]) => fetch(to, {
      method: 'POST', mode, credentials: 'include', body: JSON.stringify(wish),
      headers: {'Content-Type': kind, ...(mode === 'cors' && {Authorization: 'Bearer key-of-alice'})},
    }).then(answer => answer.type, () => 'stopped')"""
    for path in ("/v1/confirmations", "/v1/confirmations/look", "/v1/approvals"):
        answers = [
            await page.evaluate(call, [here(relay) + path, wish, kind, mode])
            for kind, mode in (
                ("application/json", "cors"),
                ("text/plain", "cors"),
                ("text/plain", "no-cors"),
            )
        ]
        assert answers == ["stopped", "stopped", "opaque"], path
    await nothing_happened(relay)
