"""A sink with a rate, and receivers whose clock differs from ours."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from relay.errors import Deferred, Rejected
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt
from tests.clocks import ManualClock
from tests.delivery.running_dispatcher import ScriptedSink, running_dispatcher
from tests.eventually import eventually


async def test_a_sink_with_a_rate_gets_no_more_than_that_in_a_second_and_all_in_the_end(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    slow, other = ScriptedSink(clock=clock), ScriptedSink(clock=clock)
    async with running_dispatcher(
        tmp_path, {"slow": slow, "other": other}, clock=clock, slow={"rate": 4}
    ) as relay:
        for number in range(20):
            await relay.record_event(f"E-{number}")
        await relay.forward(0)
        assert (len(slow.delivered), len(other.delivered)) == (1, 20)
        await relay.forward(10)
    moments = [moment for moment, _ in slow.attempts]
    assert len(moments) == 20
    assert min(later - earlier for earlier, later in pairwise(moments)) >= 0.25
    assert moments[-1] == pytest.approx(19 * 0.25)


@pytest.mark.parametrize("how", ["delivered", "deferred", "rejected"])
async def test_a_far_side_whose_clock_differs_is_told_of_once_and_again_when_it_does_again(
    tmp_path: Path, how: str
) -> None:
    skew = 31.0

    async def drifted(event: CloudEvent) -> Receipt:
        if event.name.startswith("event.") and how == "deferred" and event.id not in tried:
            tried.add(event.id)
            raise Deferred("401", status=401, skew=skew)
        if event.name.startswith("event.") and how == "rejected":
            raise Rejected("no", skew=skew)
        return Receipt(204, skew=skew)

    tried: set[str] = set()
    far, other = ScriptedSink(drifted), ScriptedSink()

    def told() -> list[str]:
        return [
            event.data["reason"] for event in other.delivered if event.name == "relay.clock-skewed"
        ]

    async with running_dispatcher(tmp_path, {"drain": far, "chat": other}) as relay:
        for number in range(3):
            await relay.record_event(f"E-{number}")
        await eventually(lambda: bool(told()))
        skew = -29.0
        await relay.record_event("E-3")
        await eventually(lambda: relay.dispatcher.workers[0].waiting == 0)
        remedy = "check both, because signatures contain the time"
        assert told() == [f"its clock is 31 s ahead of ours: {remedy}"]
        skew = -3600.0
        await relay.record_event("E-4")
        await eventually(lambda: len(told()) == 2)
        assert told()[1] == f"its clock is 3600 s behind ours: {remedy}"
        skewed = [event for event in other.delivered if event.name == "relay.clock-skewed"]
        assert [event.subject for event in skewed] == ["drain", "drain"]
        assert "relay.clock-skewed" not in far.names()
