"""A worker through minutes and days, by a clock that a test moves: what the plan promises, kept."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from relay.errors import Deferred
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt
from tests.clocks import ManualClock
from tests.delivery.running_dispatcher import (
    Answer,
    ScriptedSink,
    accepts,
    gives,
    refuses,
    running_dispatcher,
)

DAY = 86400.0


def gaps(moments: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(moments)]


def patient_sink(
    clock: ManualClock, answer: Answer = accepts, *, give_up_after: float = DAY
) -> ScriptedSink:
    return ScriptedSink(answer, clock=clock, longest_pause=300.0, give_up_after=give_up_after)


@pytest.mark.parametrize("others", [0, 3])
async def test_a_receiver_that_is_down_is_tried_every_8_s_before_notbefore_with_a_last_call(
    tmp_path: Path, others: int
) -> None:
    """Also when several events wait, and the probes take turns."""
    clock = ManualClock()
    down = patient_sink(clock, refuses)
    async with running_dispatcher(tmp_path, {"drain": down}, clock=clock) as relay:
        await relay.record_events(1 + others, not_before=600)
        await relay.forward(599)
        tried = sorted(moment for moment, _ in down.attempts)
        assert tried[0] == 0
        assert down.times("E-0")[1] <= 2
        assert max(gaps(tried)) <= 8
        assert 596 <= tried[-1] < 600


async def test_an_entry_for_a_sink_long_down_is_tried_at_once_and_in_time(tmp_path: Path) -> None:
    """The pause was fitted to what waited before, five minutes by then."""
    clock = ManualClock()
    drain = patient_sink(clock, refuses)
    async with running_dispatcher(tmp_path, {"drain": drain}, clock=clock) as relay:
        await relay.record_event("old")
        await relay.forward(3600)
        assert max(gaps(drain.times("old"))) > 250
        began = clock.monotonic()
        await relay.record_event("E-1", not_before=60)
        await relay.forward(60)
        tried = [moment - began for moment, _ in drain.attempts if moment >= began]
        assert drain.times("E-1")[0] == began
        assert tried[1] <= 2
        assert max(gaps(tried)) <= 8
        assert tried[-1] >= 56


async def test_an_event_that_is_never_taken_holds_back_no_other_ever(tmp_path: Path) -> None:
    """Alone it makes the sink look dead; the next event is tried all the same, and at once."""
    clock = ManualClock()
    error = Deferred("it answered 500", status=500)
    drain = patient_sink(clock, gives(error, to=lambda event: event.subject == "poison"))
    async with running_dispatcher(tmp_path, {"drain": drain}, clock=clock) as relay:
        await relay.record_event("poison")
        for number in range(3):
            await relay.forward(1800)
            assert relay.dispatcher.workers[0].failing
            await relay.record_event(f"E-{number}", "event.started")
            await relay.forward(0)
            assert drain.delivered[-1].subject == f"E-{number}"
            assert not relay.dispatcher.workers[0].failing
        assert len(drain.times("poison")) < 100


async def test_a_retry_after_rests_the_whole_sink_and_no_other(tmp_path: Path) -> None:
    clock = ManualClock()
    busy = gives(
        Deferred("busy", after=120.0, status=429),
        to=lambda event: event.subject == "E-0" and clock.monotonic() < 120,
    )
    drain, other = patient_sink(clock, busy), patient_sink(clock)
    async with running_dispatcher(tmp_path, {"drain": drain, "other": other}, clock=clock) as relay:
        await relay.record_event("E-0", not_before=300)
        await relay.forward(1)
        for number in range(1, 4):
            await relay.record_event(f"E-{number}", not_before=300)
        await relay.forward(118)
        assert len(drain.attempts) == 1
        everything = [f"E-{number}" for number in range(4)]
        assert sorted(other.subjects("event.scheduled")) == everything
        assert other.subjects("relay.sink-failing") == ["drain"], "it got nothing for a minute"
        await relay.forward(15)
        assert sorted(drain.subjects("event.scheduled")) == everything
        assert min(moment for moment, _ in drain.attempts[1:]) >= 120


async def test_what_was_refused_is_tried_slowly_and_parked_after_notbefore(tmp_path: Path) -> None:
    clock = ManualClock()
    refused = Deferred("it answered 401", failure="slow", status=401)
    drain = patient_sink(clock, gives(refused, to=lambda event: event.subject == "E-0"))
    async with running_dispatcher(tmp_path, {"drain": drain}, clock=clock) as relay:
        await relay.record_event("E-0", not_before=600)
        for number in range(1, 10):
            await relay.forward(20)
            await relay.record_event(f"E-{number}")
        await relay.forward(0)
        assert len(drain.delivered) == 9
        await relay.forward(600)
        moments = drain.times("E-0")
        assert all(45 <= gap <= 60 for gap in gaps(moments)[:-2])
        assert 11 <= len(moments) <= 14
        assert any(597 <= moment < 600 for moment in moments), "a last call"
        parked = (await relay.deliveries("drain"))[0]
        assert (parked["state"], parked["lastStatus"]) == ("parked", 401)


async def test_what_is_never_taken_is_given_up_after_its_time_and_told(tmp_path: Path) -> None:
    clock = ManualClock()
    down, other = patient_sink(clock, refuses), patient_sink(clock)
    async with running_dispatcher(tmp_path, {"drain": down, "chat": other}, clock=clock) as relay:
        await relay.record_event("E-1", "event.ended")
        await relay.forward(DAY - 1)
        assert [delivery["state"] for delivery in await relay.deliveries("drain")] == ["waiting"]
        await relay.forward(400)
        (parked,) = await relay.deliveries("drain")
        reason = "given up after 86400 s; last: it refused the connection"
        assert (parked["state"], parked["reason"]) == ("parked", reason)
        assert other.names() == ["event.ended", "relay.sink-failing", "relay.dead-lettered"]
        assert max(gaps(down.times("E-1"))) <= 330


async def test_a_redelivery_goes_out_at_once_to_a_sink_that_is_failing(tmp_path: Path) -> None:
    """The operator has mended it, and does not wait for a pause of five minutes."""
    clock = ManualClock()
    drain = patient_sink(clock, refuses, give_up_after=600.0)
    async with running_dispatcher(tmp_path, {"drain": drain}, clock=clock) as relay:
        await relay.record_event("E-0")
        await relay.forward(1200)
        await relay.record_event("E-1")
        await relay.forward(300)
        parked, waiting = await relay.deliveries("drain")
        assert (parked["state"], waiting["state"]) == ("parked", "waiting")
        drain.answer = accepts
        assert await relay.redeliver(parked["id"], clock.now())
        await relay.forward(0)
        assert [event.subject for event in drain.delivered] == ["E-0", "E-1"]


async def test_an_event_that_is_refused_rests_alone_while_the_sink_fails(tmp_path: Path) -> None:
    """It is no probe: each refusal would release all other entries to a receiver that is down."""
    clock = ManualClock()

    async def refused_or_down(event: CloudEvent) -> Receipt:
        if event.subject == "E-0":
            raise Deferred("it answered 401", failure="slow", status=401)
        raise Deferred("it answered 503", status=503)

    drain = patient_sink(clock, refused_or_down)
    async with running_dispatcher(tmp_path, {"drain": drain}, clock=clock) as relay:
        await relay.record_events(6, not_before=600)
        await relay.forward(500)
        assert min(gaps(drain.times("E-0"))) >= 45
        assert len(drain.attempts) < 200


async def test_a_sink_gets_no_more_than_its_rate_and_all_in_the_end(tmp_path: Path) -> None:
    clock = ManualClock()
    slow, other = ScriptedSink(clock=clock), ScriptedSink(clock=clock)
    async with running_dispatcher(
        tmp_path, {"slow": slow, "other": other}, clock=clock, slow={"rate": 4}
    ) as relay:
        await relay.record_events(20)
        await relay.forward(0)
        assert (len(slow.delivered), len(other.delivered)) == (1, 20)
        await relay.forward(10)
    moments = [moment for moment, _ in slow.attempts]
    assert len(moments) == 20
    assert min(gaps(moments)) >= 0.25
    assert moments[-1] == pytest.approx(19 * 0.25)


async def test_a_worker_has_few_timers_however_long_something_waits(tmp_path: Path) -> None:
    """Each delivery at a rate sets a near one, and what is refused for days a far one."""
    clock = ManualClock()
    refusing = gives(Deferred("it answered 401", failure="slow"), to=lambda it: it.subject == "bad")
    drain = patient_sink(clock, refusing)
    async with running_dispatcher(
        tmp_path, {"drain": drain}, clock=clock, drain={"rate": 10}
    ) as relay:
        await relay.record_event("bad", not_before=DAY)
        for number in range(100):
            await relay.record_event(f"E-{number}", not_before=DAY)
            await relay.forward(2)
        assert len(drain.delivered) == 100
        assert len(clock.remaining_sleeps) <= 2
