"""The time that agents give to what they report, and which events they publish."""

from __future__ import annotations

from datetime import timedelta

import pytest

from relay.clock import SystemClock
from relay.errors import Rejected
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.agent.agent import ImdsClock, ReportSink
from tests.builders import DATA, EVENT_ID, cloudevent
from tests.clocks import NOON


@pytest.mark.parametrize(
    "reads",
    [
        # A wrong clock is put right by what IMDS says.
        [(1, None, 1), (2, 600.0, 602), (3, 0.0, 3), (4, -600.0, -596)],
        # A Date has no fraction. Else the hub would take the report of a later read for a repeat.
        [
            (1.0, 600.9, 601.9),
            (1.5, 600.0, 601.900001),
            (1.5, 600.0, 601.900002),
            (3.0, 600.0, 603.0),
            (3.0, 600.0, 603.000001),
        ],
    ],
    ids=["wrong", "no fraction"],
)
def test_a_read_has_the_time_of_imds_and_a_later_read_a_later_time(
    reads: list[tuple[float, float | None, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By seconds after noon on this VM, how far IMDS is ahead of that, and what the clock says."""
    now, skew = 0.0, None
    monkeypatch.setattr(SystemClock, "now", lambda _: NOON + timedelta(seconds=now))
    clock = ImdsClock(lambda: skew)
    for now, skew, expected in reads:  # noqa: B007  # the clocks read them
        assert (clock.now() - NOON).total_seconds() == expected


@pytest.mark.parametrize("name", ["event.scheduled", "event.ended", "relay.source-lost"])
async def test_what_an_agent_recorded_is_published_for_its_scope(name: str) -> None:
    published: list[tuple[str, str]] = []

    async def publish(event: CloudEvent, key: str) -> None:
        published.append((event.name, key))

    data = DATA if name.startswith("event.") else {"sink": None, "reason": "?", "count": 1}
    sink = ReportSink(publish, Origin("vmss-a", "VM-0"))
    await sink.deliver(cloudevent(name, EVENT_ID if data is DATA else None, data))
    # A relay without a fleet recorded this for a sink named hub, before it was an agent. The broker
    # would refuse it and close the channel, again and again.
    with pytest.raises(Rejected):
        await sink.deliver(cloudevent("approval.recorded", EVENT_ID, DATA))
    ((told, key),) = published
    assert told == name
    assert key.endswith(".vmss-a.vm-0")
