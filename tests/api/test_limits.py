"""What the API says about events that wait for a limit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.approvals.limits import LIMIT_NOTICE
from relay.events.model import ScheduledEvent
from tests.api.running_relay import EVENT_ID, RunningRelay, make_event, run_relay

BUSY = make_event(event_id="E-2", event_status="Started", not_before=None, resources=("db-2",))
WAIT = {"limit": "one", "max": 1, "machines": ["db-2"], "behind": None, "until": None}
VOTE = {"name": "all", "approve": {"votes": 1, "from": ["group:oncall"]}}


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay with one slot, which an event that Azure started takes."""
    limits = [{"name": "one", "max": 1}]
    async with run_relay(tmp_path, approvals={"rules": [VOTE], "limits": limits}) as relay:
        await relay.observe(BUSY, _reboot())
        yield relay


def _reboot() -> ScheduledEvent:
    return make_event(resources=("db-1",))


async def test_answers_lists_and_the_rule_show_the_limit_and_who_takes_its_slots(
    relay: RunningRelay,
) -> None:
    answer = (await relay.decide(revision=_reboot().revision)).json
    assert (answer["state"], answer["waitingFor"]) == ("waiting", [WAIT])
    recorded = (await relay.recorded_events("approval.recorded"))[-1]
    assert recorded["data"]["waitingFor"] == [WAIT]
    items = (await relay.call("GET", "/v1/events")).json["items"]
    by_id = {item["eventId"]: item["approval"] for item in items}
    assert (by_id[EVENT_ID]["state"], by_id[EVENT_ID]["waitingFor"]) == ("waiting", [WAIT])
    assert (by_id[EVENT_ID]["missing"], by_id["E-2"]["waitingFor"]) == (0, [])
    explanation = (await relay.call("GET", f"/v1/events/{EVENT_ID}/rule")).json
    assert (explanation["state"], explanation["waitingFor"]) == ("waiting", [WAIT])
    assert explanation["limitMeans"] == LIMIT_NOTICE
