"""The confirm page and hostile pages: loading, framing, posting or injecting approves nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
from aiohttp import web
from playwright.async_api import Error, Page, Route, expect
from pytest_aiohttp import AiohttpServer

from tests.api.confirmation_links import MessageLinks, proxy_application, render_message
from tests.api.running_relay import EVENT_ID, RunningRelay, make_event, run_relay
from tests.chromium import IN_SESSION_LOOP
from tests.eventually import eventually

pytestmark = IN_SESSION_LOOP


@pytest_asyncio.fixture(loop_scope="session")
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay with the usual clients and rules, whose document holds `make_event()`."""
    async with run_relay(tmp_path) as running_relay:
        await running_relay.observe(make_event())
        yield running_relay


KEPT = """() => JSON.stringify([
  localStorage, sessionStorage, document.cookie, history.state, name, document.referrer,
  document.documentElement.outerHTML])"""
"""Returns everything that a page stores or shows, except its variables."""
ATTACKS = (
    """document.body.appendChild(document.createElement('script'))
      .text = 'document.title = "caught"'""",
    "document.body.innerHTML += '<img src=x onerror=\"document.title = `caught`\">'",
    "document.body.setAttribute('onclick', 'document.title = \"caught\"'); document.body.click()",
    "setTimeout('document.title = \"caught\"', 0)",
    "setTimeout(() => new Function('document.title = \"caught\"')())",
    """document.body.appendChild(document.createElement('script'))
      .src = 'data:text/javascript,document.title=`caught`'""",
)
"""Ways to get a script into a page."""
BY_HASH = ("script-src-elem", "script-src-attr", "script-src")
Elsewhere = Callable[[str], str]
"""Serves a body as a page of another origin, and returns its URL."""


@pytest_asyncio.fixture(loop_scope="session")
async def elsewhere(page_server: AiohttpServer) -> Elsewhere:
    """A server of another origin."""
    bodies: list[str] = []

    async def serve(_: web.Request) -> web.Response:
        return web.Response(
            text=f"<!doctype html><title>Elsewhere</title><body>{bodies[-1]}",
            content_type="text/html",
        )

    application = web.Application()
    application.add_routes([web.get("/", serve)])
    server = await page_server(application)

    def put(body: str) -> str:
        bodies.append(body)
        return str(server.make_url("/"))

    return put


def relay_url(relay: RunningRelay) -> str:
    """Return the URL of the relay."""
    return f"http://127.0.0.1:{relay.server.port}"


async def opened(page: Page, relay: RunningRelay) -> MessageLinks:
    """The page, ready to approve."""
    message = await render_message(relay)
    await page.goto(f"{relay_url(relay)}/approve#{message.tokens['approve']}")
    await page.get_by_role("button", name="Approve", exact=True).wait_for()
    return message


async def nothing_happened(relay: RunningRelay) -> None:
    """No vote, no hold, no refusal, no StartRequest, and no guess that was counted."""
    events = [
        event
        for name in ("approval.recorded", "approval.refused", "approval.granted")
        for event in await relay.recorded_events(name)
    ]
    wrong = await relay.store.read(
        lambda tx: tx._connection.execute(  # noqa: SLF001
            "SELECT sum(wrong) FROM invitation"
        ).fetchone()[0]
    )  # what is kept
    assert (events, relay.azure.started, wrong or 0) == ([], [], 0)


async def test_the_link_leaves_the_address_bar_and_is_stored_nowhere(
    page: Page, relay: RunningRelay
) -> None:
    message = await opened(page, relay)
    token = message.tokens["approve"]
    assert page.url == f"{relay_url(relay)}/approve"
    await page.get_by_label("Your key or token").fill("bearer-test-key-of-alice")
    kept = await page.evaluate(KEPT)
    assert token not in kept
    assert "bearer-test-key-of-alice" not in kept
    assert await page.context.cookies() == []
    await page.reload()
    await expect(page.get_by_role("heading", name="No link")).to_be_visible()
    assert await page.get_by_label("Your key or token").input_value() == ""
    await page.go_back()
    assert page.url == "about:blank"


async def test_the_link_is_in_no_url_and_no_header_and_only_the_relay_is_called(
    page: Page, relay: RunningRelay, page_server: AiohttpServer
) -> None:
    """As a proxy on the way sees it."""
    seen: list[web.Request] = []
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    server = await page_server(proxy_application(relay, "", seen))
    message = await render_message(relay)
    token = message.tokens["approve"]
    await page.goto(f"{server.make_url('/approve')}#{token}")
    await page.get_by_label("Code in the message").fill(message.code)
    await page.get_by_label("Your key or token").fill("bearer-test-key-of-alice")
    await page.get_by_role("button", name="Approve", exact=True).click()
    await expect(page.get_by_role("heading", name="Recorded")).to_be_visible()
    paths = [request.raw_path for request in seen]
    assert (paths[0], {*paths[1:3]}, paths[3:]) == (
        "/approve",
        {"/v1/confirmations/look", "/v1/session"},
        ["/v1/confirmations", "/v1/confirmations/look"],
    )
    assert len(asked) == len(seen)
    for request in seen:
        assert "Referer" not in request.headers
        assert token not in str(request.raw_headers)
        assert ("Authorization" in request.headers) == (request.path == "/v1/confirmations")


async def test_an_injected_script_does_not_run(page: Page, relay: RunningRelay) -> None:
    """The policy does not stop the test's own script, but what that inserts into the page."""
    message = await render_message(relay)
    for attack in ATTACKS:
        assert await _stopped(page, relay, message, attack) in (
            *BY_HASH,
            "require-trusted-types-for",
        ), attack


async def test_an_injected_script_does_not_run_in_a_browser_without_trusted_types(
    page: Page, relay: RunningRelay
) -> None:
    """Only the script with the known hash runs, even if the page arrives with another one."""

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
    message = await render_message(relay)
    for attack in ATTACKS:
        assert await _stopped(page, relay, message, attack) in BY_HASH, attack


async def _stopped(page: Page, relay: RunningRelay, message: MessageLinks, attack: str) -> object:
    """The directive of the policy that stopped the script of an attack.

    An attack by an image also breaks ``img-src``: before that or after, as the browser likes.
    """
    await page.goto("about:blank")
    await page.goto(f"{relay_url(relay)}/approve#{message.tokens['approve']}")
    directive = await page.evaluate(f"""() => new Promise(done => {{
      addEventListener('securitypolicyviolation', event => {{
        if (event.effectiveDirective !== 'img-src') done(event.effectiveDirective);
      }});
      try {{ {attack} }} catch {{ }}
    }})""")
    await page.evaluate("() => new Promise(done => setTimeout(done))")
    assert "caught" not in await page.title(), attack
    return directive


async def test_the_page_can_call_only_the_relay(
    page: Page, relay: RunningRelay, elsewhere: Elsewhere
) -> None:
    await opened(page, relay)
    foreign_url = elsewhere("")
    with pytest.raises(Error, match="Failed to fetch"):
        await page.evaluate(
            "url => fetch(url, {method: 'POST', mode: 'no-cors', body: 'x'})", foreign_url
        )
    with pytest.raises(Error, match="stopped"):
        await page.evaluate(
            "url => new Promise((_, stopped) => "
            "Object.assign(new Image(), {onerror: () => stopped('stopped'), src: url}))",
            foreign_url,
        )
    form = """where => new Promise(done => {
      addEventListener('securitypolicyviolation', event => {{
        if (event.effectiveDirective !== 'img-src') done(event.effectiveDirective);
      }});
      const form = document.body.appendChild(document.createElement('form'));
      Object.assign(form, {action: where, method: 'POST'}).submit();
    })"""
    for where in (foreign_url, ""):
        assert await page.evaluate(form, where) == "form-action"
    assert page.url == f"{relay_url(relay)}/approve"


async def test_no_other_page_can_frame_the_page(
    page: Page, relay: RunningRelay, elsewhere: Elsewhere
) -> None:
    """Nor one of the relay's own origin, were there any."""
    message = await render_message(relay)
    link = f"{relay_url(relay)}/approve#{message.tokens['hold']}"
    refused: list[str] = []
    page.on("console", lambda logged: refused.append(logged.text))
    await page.goto(
        elsewhere(
            f"<iframe src='{link}'></iframe><object data='{link}'></object><embed src='{link}'>"
        )
    )
    await eventually(
        lambda: page.evaluate("1"),
        lambda _: sum("frame-ancestors" in message for message in refused) >= 1,
    )
    for frame in page.frames[1:]:
        assert await frame.locator("form").count() == 0
    await nothing_happened(relay)


async def test_loading_or_prefetching_a_link_approves_nothing(
    page: Page, relay: RunningRelay, elsewhere: Elsewhere
) -> None:
    message = await render_message(relay)
    link = f"{relay_url(relay)}/approve#{message.tokens['hold']}"
    seen: list[str] = []
    page.on("requestfinished", lambda request: seen.append(request.url))
    page.on("requestfailed", lambda request: seen.append(request.url))
    rules = orjson.dumps({"prerender": [{"urls": [link]}], "prefetch": [{"urls": [link]}]}).decode()
    body = (
        f"<link rel=prefetch href='{link}'><img src='{link}'><script src='{link}'></script>"
        f"<script type=speculationrules>{rules}</script>"
    )
    await page.goto(elsewhere(body))
    await eventually(
        lambda: page.evaluate("1"), lambda _: sum(relay_url(relay) in url for url in seen) >= 2
    )
    await nothing_happened(relay)


async def test_a_scanner_that_runs_scripts_and_presses_every_button_approves_nothing(
    page: Page, relay: RunningRelay
) -> None:
    """It has neither code nor key. Its guesses do not use up the link for others."""
    await opened(page, relay)
    press = """() => [...document.querySelectorAll('form, button')]
      .filter(node => node.checkVisibility())
      .forEach(node => node.requestSubmit ? node.requestSubmit() : node.click())"""
    await page.evaluate(press)
    await expect(page.locator("#code-wrong")).to_contain_text("The code is missing")
    await page.evaluate(
        "() => document.querySelectorAll('input, textarea')"
        ".forEach(node => { node.value = '123456' })"
    )
    async with page.expect_response("**/v1/confirmations") as answered:
        await page.evaluate(press)
    assert (await answered.value).status == 401
    await page.evaluate("() => document.querySelector('form').submit()")
    assert page.url == f"{relay_url(relay)}/approve"
    await nothing_happened(relay)


async def test_a_form_of_another_page_decides_nothing(
    page: Page, relay: RunningRelay, elsewhere: Elsewhere
) -> None:
    message = await render_message(relay)
    body = orjson.dumps({"token": message.tokens["hold"], "reason": "x"}).decode()[:-2]
    for encoding in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        form = (
            f"<form method=post enctype='{encoding}' action='{relay_url(relay)}/v1/confirmations'>"
            f"<input name='{body}' value='\"}}'></form>"
        )
        async with page.expect_response("**/v1/confirmations") as answered:
            await page.goto(elsewhere(f"{form}<script>document.forms[0].submit()</script>"))
        assert (await answered.value).status == 415, encoding
    await nothing_happened(relay)


async def test_a_script_of_another_page_is_blocked(
    page: Page, relay: RunningRelay, elsewhere: Elsewhere
) -> None:
    """It may not send JSON or a key, and may not read an answer."""
    message = await render_message(relay)
    await page.goto(elsewhere(""))
    body = {
        "token": message.tokens["hold"],
        "eventId": EVENT_ID,
        "decision": "hold",
        "revision": make_event().revision,
    }
    call = """([to, body, kind, mode]) => fetch(to, {
      method: 'POST', mode, credentials: 'include', body: JSON.stringify(body),
      headers: {
        'Content-Type': kind,
        ...(mode === 'cors' && {Authorization: 'Bearer bearer-test-key-of-alice'}),
      },
    }).then(answer => answer.type, () => 'stopped')"""
    for path in ("/v1/confirmations", "/v1/confirmations/look", "/v1/approvals"):
        answers = [
            await page.evaluate(call, [relay_url(relay) + path, body, kind, mode])
            for kind, mode in (
                ("application/json", "cors"),
                ("text/plain", "cors"),
                ("text/plain", "no-cors"),
            )
        ]
        assert answers == ["stopped", "stopped", "opaque"], path
    await nothing_happened(relay)
