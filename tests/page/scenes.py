"""Relays in the states that the page shows, and visitors who look at them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from playwright.async_api import BrowserContext, Page

from relay.errors import Deferred, Rejected
from relay.events.model import ScheduledEvent
from relay.events.timestamps import format_rfc3339
from relay.fleet.hub.roster import Agent, Roster
from relay.fleet.messages import Pulse
from relay.fleet.routing import AuthorizedSender
from tests.api.running_relay import RunningRelay, make_event, run_relay
from tests.eventually import eventually

KINDS = {"bus": "rabbitmq", "drain": "webhook", "ops": "slack"}
REBOOT = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
HELD = "3E1F9B07-9A2C-4E0B-8D0D-7B3C0C1F6A55"
FREEZE = "602D9444-D2CD-49C7-8624-8643E7171297"
STARTED = "A11B0B4C-6D1E-4C5B-9B9E-0F2B1C3D4E5F"
WEB, DB = "web-vmss-1f0c33ab", "db-vmss-77aa01c2"
NO_RULE = "9D2E7C11-55AA-4F31-8E0C-3A9B7D6C2F10"


def in_minutes(relay: RunningRelay, minutes: float) -> str:
    return format_rfc3339(relay.clock.now() + timedelta(minutes=minutes))


@dataclass(slots=True)
class Link:
    """The approvals link, as the test says."""

    is_connected: bool = True


def attach_parts(relay: RunningRelay, **parts: Any) -> None:
    """Give the relay further parts, such as an approvals link. Do so before anybody looks."""
    relay.server.state.detach_relay()
    relay.server.state.attach_relay(replace(relay.relay, **parts))


@asynccontextmanager
async def run_page_relay(folder: Path, **settings: Any) -> AsyncIterator[RunningRelay]:
    async with run_relay(folder, **{"sinks": tuple(KINDS), "kinds": KINDS} | settings) as relay:
        relay.azure.read_age, relay.azure.clock_offset = 0.4, 0.1
        attach_parts(relay, approvals_link=Link())
        yield relay


async def all_delivered(relay: RunningRelay) -> None:
    await eventually(lambda: all(not sink.waiting for sink in relay.dispatcher.workers))


def reboot(relay: RunningRelay, minutes: float, **changes: Any) -> ScheduledEvent:
    fields = {
        "event_id": REBOOT,
        "not_before": in_minutes(relay, minutes),
        "description": "Host server is undergoing maintenance.",
        "duration": None,
    }
    return make_event(**fields | changes)


async def make_busy(relay: RunningRelay) -> list[ScheduledEvent]:
    """Let half an hour pass in which much happens. Return the events that are live."""
    relay.clock.offset -= 1800
    old = make_event(event_id="OLD-1", resources=("WestNO_4",), event_type="Redeploy")
    taken_back = make_event(event_id="OLD-2", resources=("WestNO_5",), event_type="Reboot")
    await relay.observe(old, taken_back)
    relay.clock.offset += 240
    await relay.observe(replace(old, event_status="Started", not_before=None))
    relay.clock.offset += 360
    first = reboot(relay, 32)
    await relay.observe(first)
    relay.clock.offset += 120
    held = reboot(relay, 95, event_id=HELD, resources=tuple(f"db-{number}" for number in range(5)))
    await relay.observe(first, held)
    await relay.decide("hold", by="bob", eventId=HELD, revision=held.revision, reason="backup runs")
    relay.clock.offset += 200
    first = replace(first, resources=("WestNO_0", "WestNO_1"), not_before=in_minutes(relay, 24.6))
    await relay.observe(first, held)
    await relay.decide(by="databases", revision=first.revision)
    relay.clock.offset += 260
    started = make_event(
        event_id=STARTED,
        event_type="Preempt",
        event_status="Started",
        not_before=None,
        resources=("spot-19",),
        duration=None,
    )
    await relay.observe(first, held, started)
    await relay.decide(by="alice", revision=first.revision, reason="drained, checked by hand")
    relay.clock.offset += 300
    freeze = make_event(
        event_id=FREEZE, event_type="Freeze", not_before=in_minutes(relay, 14), resources=("web-7",)
    )
    no_rule = make_event(
        event_id=NO_RULE,
        event_type="Terminate",
        not_before=in_minutes(relay, 9.1),
        resources=("web-2",),
        event_source="User",
        description="",
        duration=None,
    )
    await relay.observe(first, held, started, freeze, no_rule)
    await eventually(lambda: bool(relay.azure.started))
    relay.clock.offset += 320
    await all_delivered(relay)
    return [first, held, started, freeze, no_rule]


async def break_sinks(relay: RunningRelay) -> None:
    relay.sinks["drain"].failure = Rejected("the receiver answered 404: no such path", status=404)
    other = make_event(event_id="DEAD-2", resources=("db-9",))
    await relay.observe(make_event(event_id="DEAD-1"), other)
    await eventually(lambda: not relay.dispatcher.get_worker("drain").waiting)
    relay.sinks["bus"].failure = Deferred(
        "the broker does not answer: 10.0.0.4:5671, connection refused", after=0.01
    )
    await relay.call("POST", "/v1/sinks/ops/pause")
    await relay.observe(make_event(event_id="LATER-1", event_type="Redeploy"))
    health = relay.dispatcher.get_worker("bus").health
    # The scenes move the clock, and a timer that was set before waits on. So an operator helps.
    while not health.is_failing:
        await relay.call("POST", "/v1/sinks/bus/resume")


def make_roster(relay: RunningRelay) -> Roster:
    """Return the roster of a hub: one scope is heard, one is silent."""
    now = relay.clock.now()
    facts: dict[str, Any] = {"user": "vmss", "version": "0.1.0", "zone": "2", "poll_age": 0.7}
    silent = [
        Agent(
            scope=scope,
            relay=name,
            name=name,
            first_heard=now - timedelta(hours=30),
            last_pulse=now - timedelta(minutes=minutes),
            clock_offset=offset,
            **facts,
        )
        for scope, name, minutes, offset in (
            (WEB, "web_4", 34, 0.1),
            (DB, "db_0", 66, 4.1),
            (DB, "db_1", 67, 0.2),
        )
    ]
    roster = Roster(silent)
    for seconds in range(240, -1, -30):
        roster.note_listening(now - timedelta(seconds=seconds))
    for number in range(4):
        zone = str(number % 3 + 1)
        pulse = Pulse(version="0.1.0", zone=zone, names=(), live=(), poll_age=0.6, clock_offset=0.2)
        sender = AuthorizedSender(scope=WEB, relay=f"web_{number}", user="vmss")
        roster.note_message(sender, f"web_{number}", now - timedelta(seconds=9 * number), pulse)
    return roster


async def make_scopes(relay: RunningRelay) -> None:
    await relay.observe_in(WEB, reboot(relay, 40, resources=("web_1",)))
    redeploy = reboot(relay, 14, event_id=HELD, event_type="Redeploy", resources=("db_0",))
    await relay.observe_in(DB, redeploy)


async def give_key(tab: BrowserContext | Page, by: str) -> None:
    """Give each page of a tab the key of a client, unless it has forgotten one."""
    await tab.add_init_script(
        "if (location.protocol !== 'about:' && !sessionStorage.seen) {"
        "  sessionStorage.seen = 1;"
        f"  sessionStorage.setItem('imds-relay key', 'bearer-test-key-of-{by}'); }}"
    )


def page_url(relay: RunningRelay, view: str = "") -> str:
    return f"http://127.0.0.1:{relay.server.port}/#/{view}"


async def show(page: Page, relay: RunningRelay, view: str = "", *, by: str = "alice") -> None:
    """Show a view to a client, and wait until it is live."""
    await give_key(page, by)
    await page.goto("about:blank")  # else a new fragment alone would load nothing
    await page.goto(page_url(relay, view))
    await page.locator("#live", has_text="Live").wait_for()


async def look_again(page: Page) -> None:
    """Make the page read everything now, as when somebody comes back to its tab."""
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
