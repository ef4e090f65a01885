"""The page and hostile text, hostile pages, and paths that nobody should get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.async_api import Page, expect

from relay.errors import Deferred, Rejected
from relay.fleet.hub.roster import Agent, Roster
from tests.api.running_relay import SCOPE, RunningRelay, make_event
from tests.chromium import IN_SESSION_LOOP
from tests.eventually import eventually
from tests.page.scenes import attach_parts, page_url, run_page_relay, show

pytestmark = IN_SESSION_LOOP

SPELL = (
    "<img src=x onerror=\"document.title='caught'\"><script>document.title='caught'</script>"
    "<svg onload=\"document.title='caught'\">"
)
COUNT = """() => ({
  images: document.querySelectorAll('img').length,
  scripts: document.querySelectorAll('script').length,
  handlers: [...document.querySelectorAll('*')].flatMap(node => [...node.attributes])
    .filter(attribute => /^on/i.test(attribute.name)).length,
  title: document.title.startsWith('caught'),
})"""
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
CLEAN = {"images": 0, "scripts": 1, "handlers": 0, "title": False}


async def test_text_from_azure_and_people_is_never_markup(page: Page, quiet: RunningRelay) -> None:
    """Every field that others write holds markup, in every view."""
    fields = dict.fromkeys(("description", "event_source", "resource_type"), SPELL)
    event = make_event(resources=(SPELL,), **fields)
    quiet.sinks["drain"].failure = Rejected(SPELL, status=400)
    quiet.sinks["bus"].failure = Deferred(SPELL, after=0.01)
    odd_id, odd_type = make_event(event_id=SPELL), make_event(event_id="E-3", event_type=SPELL)
    await quiet.observe(event, odd_id, odd_type)
    await quiet.decide("hold", by="bob", revision=event.revision, reason=SPELL)
    await quiet.decide(by="reader", revision=event.revision, reason=SPELL)
    changed = replace(event, description=f"again {SPELL}", event_status="Scheduled")
    await quiet.observe(changed, odd_id, odd_type)
    bus = quiet.dispatcher.get_worker("bus").health
    await eventually(lambda: bus.is_failing)
    await eventually(lambda: not quiet.dispatcher.get_worker("drain").waiting)
    await show(page, quiet)
    for view, ready in (
        ("", ".event"),
        (f"event/{SCOPE}/{event.event_id}", "#history li"),
        ("log", "#log li"),
        ("sinks", "#dead tr"),
    ):
        await page.goto(page_url(quiet, view))
        await page.locator(ready).first.wait_for()
        await expect(page.locator("#view")).to_contain_text("<img src=x onerror=")
        assert await page.evaluate(COUNT) == CLEAN, view
    await page.goto(page_url(quiet))
    await page.get_by_role("button", name=f"Approve: Reboot of {SPELL}").click()
    await expect(page.get_by_role("dialog")).to_contain_text("<img src=x onerror=")
    assert await page.evaluate(COUNT) == CLEAN
    await page.get_by_role("button", name="Cancel").click()
    await page.locator(".event h2 a", has_text=SPELL).first.click()
    await page.locator("#history li").first.wait_for()
    assert await page.evaluate(COUNT) == CLEAN


async def test_names_of_javascript_objects_hide_no_event(page: Page, relay: RunningRelay) -> None:
    """Azure and, on a hub, each agent can write any type and source."""
    odd = [
        make_event(event_id=f"E-{name}", event_type=name, event_source=name)
        for name in ("constructor", "__proto__")
    ]
    await relay.observe(make_event(), *odd)
    await show(page, relay)
    await expect(page.locator(".event")).to_have_count(3)
    for event in odd:
        card = page.locator(".event", has_text=f"{event.event_type} of ")
        await expect(card).to_contain_text(f"by {event.event_source}")
        await expect(card).to_contain_text(f"{event.description}")


async def test_text_of_agents_is_never_markup(page: Page, tmp_path: Path) -> None:
    async with run_page_relay(tmp_path, is_hub=True) as relay:
        said: dict[str, Any] = dict.fromkeys(("name", "user", "version", "zone"), SPELL)
        agent = Agent(scope="s-1", relay="web_1", first_heard=relay.clock.now(), **said)
        attach_parts(relay, roster=Roster([agent]))
        await show(page, relay, "fleet")
        await expect(page.locator("#scopes")).to_contain_text("<img src=x onerror=")
        assert await page.evaluate(COUNT) == CLEAN


async def test_an_answer_that_has_markup_is_shown_as_text(page: Page, relay: RunningRelay) -> None:
    """A proxy can answer anything."""
    await page.route(
        "**/v1/approvals",
        lambda route: route.fulfill(status=409, json={"detail": SPELL, "revision": SPELL}),
    )
    await show(page, relay)
    await page.get_by_role("button", name="Hold").click()
    await page.get_by_role("dialog").get_by_role("button", name="Hold").click()
    await expect(page.locator("#decide-wrong")).to_contain_text("<img src=x")
    assert await page.evaluate(COUNT) == CLEAN


async def test_injected_scripts_do_not_run(page: Page, relay: RunningRelay) -> None:
    """Even if a script of the page could be tricked, the policy stops it."""
    await show(page, relay)
    for attack in ATTACKS:
        stopped = await page.evaluate(f"""() => new Promise(done => {{
          addEventListener('securitypolicyviolation', event => done(event.effectiveDirective),
            {{ once: true }});
          try {{ {attack} }} catch {{ }}
        }})""")
        assert stopped in ("require-trusted-types-for", "script-src-elem", "script-src"), attack
        assert "caught" not in await page.title(), attack


async def test_a_page_without_a_key_shows_nothing(page: Page, relay: RunningRelay) -> None:
    await relay.observe(make_event(resources=("a-secret-machine",)))
    await page.goto(page_url(relay))
    await expect(page.get_by_label("Your key or token")).to_be_visible()
    assert "a-secret-machine" not in await page.content()


async def test_every_file_has_the_policy_and_no_other_file_is_served(relay: RunningRelay) -> None:
    index = await relay.call("GET", "/", by=None)
    text = index.body.decode()
    files = {part.split('"')[0] for part in text.split("page/")[1:]}
    assert {"main.js", "style.css", "store.js"} <= files
    for path in ("/", *(f"/page/{name}" for name in sorted(files))):
        answer = await relay.call("GET", path, by=None)
        policy = answer.headers["Content-Security-Policy"]
        assert answer.status == 200, path
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "trusted-types 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert b"http://" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in answer.body
    for name in ("missing.js", "..%2fsettings.py", "%2e%2e%2fsettings.py", "main.js%00", ".."):
        assert (await relay.call("GET", f"/page/{name}", by=None)).status == 404, name


async def test_another_page_cannot_frame_it(page: Page, relay: RunningRelay) -> None:
    async with page.expect_console_message(lambda message: "frame-ancestors" in message.text):
        await page.set_content(f'<iframe src="{page_url(relay)}"></iframe>')
    assert "Your key" not in await page.frames[-1].content()
