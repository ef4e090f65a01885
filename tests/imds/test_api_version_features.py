"""Every version of the Scheduled Events API, against the simulator, which serves them all."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from relay.clock import SystemClock
from relay.events.match import Match
from relay.events.model import ScheduledEvent
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.document import API_VERSIONS, find_impossible_conditions, parse_document
from relay.simulator import VM, Plan, Setup, Simulator
from relay.simulator.event import EventType

SINCE = {"Freeze": "", "Reboot": "", "Redeploy": "", "Preempt": "2017-11", "Terminate": "2019-01"}
"""The version that was the first to know a type."""
SETUP = Setup(vms=(VM("web_0"), VM("web_1")), rate_limit=None)


async def read(url: str, api_version: str) -> tuple[ScheduledEvent, ...]:
    settings = SourceSettings(url=url, api_version=api_version)
    async with ImdsClient(settings, SystemClock()) as client:
        return parse_document((await client.read_document()).body, api_version).events


@pytest.mark.parametrize("api_version", API_VERSIONS)
async def test_each_version_shows_what_it_knows_and_the_rest_is_unknown(api_version: str) -> None:
    async with Simulator(SETUP) as sim:
        for kind in get_args(EventType):
            sim.schedule(
                Plan(type=kind, resources=("web_0", "web_1"), source="User", duration=7, id=kind)
            )
        sim.schedule(Plan(type="Reboot", id="started", started=True))
        newest = {event.event_id: event for event in await read(sim.url, "2020-07-01")}
        events = {event.event_id: event for event in await read(sim.url, api_version)}
    types = {name for name, since in SINCE.items() if api_version >= since}
    assert set(events) == types | {"started"}
    for name, event in events.items():
        same = newest[name]
        resources = ("web_0",) if name == "started" else ("web_0", "web_1")
        assert event.resources == same.resources == resources
        assert (event.not_before, event.event_status) == (same.not_before, same.event_status)
        assert (event.not_before is None) is (name == "started")
        assert event.description == (same.description if api_version >= "2019-04" else None)
        assert event.event_source == (same.event_source if api_version >= "2019-08" else None)
        assert event.duration == (same.duration if api_version >= "2020-07" else None)
    assert newest["Reboot"].event_source == "User"
    assert newest["Reboot"].duration == 7
    assert newest["Reboot"].description


@pytest.mark.parametrize(
    ("match", "since"),
    [
        ({"event_source": ["User"]}, "2019-08-01"),
        ({"duration": {"max": "8s"}}, "2020-07-01"),
        ({"event_type": ["terminate"]}, "2019-01-01"),
        ({"event_type": ["Preempt"]}, "2017-11-01"),
        ({"event_type": ["Terminate", "PREEMPT"]}, "2017-11-01"),
        ({"event_type": ["Terminate", "Reboot"]}, ""),
        ({"event_type": ["SomethingNew"]}, ""),
        ({"resources": ["web_*"]}, ""),
        ({}, ""),
    ],
)
def test_a_condition_that_no_version_can_meet_is_named(match: dict[str, Any], since: str) -> None:
    conditions = Match.model_validate(match)
    for api_version in API_VERSIONS:
        reasons = list(find_impossible_conditions(conditions, api_version))
        assert len(reasons) == (api_version < since)
        assert all(since in reason and next(iter(match)) in reason for reason in reasons)
