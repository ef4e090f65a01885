"""What becomes of a delivery that fails, of a sink that does, and who is told."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from relay.errors import Deferred, Rejected, Superseded
from relay.events.cloudevent import CloudEvent, event_name
from relay.sinks import Receipt
from tests.clocks import ManualClock
from tests.delivery.running_dispatcher import (
    Answer,
    RunningDispatcher,
    ScriptedSink,
    accepts,
    gives,
    hangs,
    refuses,
    running_dispatcher,
)
from tests.eventually import eventually


def about(far: ScriptedSink, name: str) -> list[tuple[str | None, int]]:
    """The ``relay.*`` events of a kind that a sink took: the sink meant, and the count."""
    return [(event.subject, event.data["count"]) for event in far.delivered if event.name == name]


async def test_what_was_deferred_is_tried_with_the_same_id_until_it_arrives(tmp_path: Path) -> None:
    busy = Deferred("busy", status=503, answer="come back later")
    far = ScriptedSink(gives(busy, busy, Receipt(200, "thanks")))
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        told = await relay.record_event("E-1")
        await eventually(lambda: len(far.delivered) == 1)
        await relay.settle()
        assert [event.id for _, event in far.attempts] == [told] * 3
        assert await relay.attempts("bus") == [
            (1, "deferred", 503, "busy"),
            (1, "deferred", 503, "busy"),
            (1, "delivered", 200, None),
        ]
        (shown,) = await relay.deliveries("bus")
        wanted = {"state": "delivered", "attempts": 3, "lastStatus": 200}
        assert shown.items() >= (wanted | {"reason": None, "nextAttempt": None}).items()


async def test_a_dead_letter_is_told_to_the_others(tmp_path: Path) -> None:
    far, other = ScriptedSink(gives(Rejected("too big"))), ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": far, "chat": other}) as relay:
        await relay.record_event("E-1")
        await eventually(lambda: len(about(other, "relay.dead-lettered")) == 1)
        await relay.record_event("E-2")
        await eventually(lambda: len(about(other, "relay.dead-lettered")) == 2)
        assert about(other, "relay.dead-lettered") == [("bus", 1), ("bus", 2)]
        told = [event for event in other.delivered if event.name == "relay.dead-lettered"]
        reasons = [f"event.scheduled (entry {entry_id}): too big" for entry_id in (1, 4)]
        assert [event.data["reason"] for event in told] == reasons
        assert len(far.attempts) == 2


async def test_what_the_relay_says_of_itself_never_becomes_a_dead_letter(tmp_path: Path) -> None:
    """Two sinks that reject everything would tell each other of it for ever."""
    first, second = ScriptedSink(gives(Rejected("no"))), ScriptedSink(gives(Rejected("no")))
    async with running_dispatcher(tmp_path, {"one": first, "two": second}) as relay:
        await relay.record_event("E-1")
        await eventually(lambda: len(first.attempts) + len(second.attempts) == 4)
        await relay.settle()
        for sink, other in (("one", "two"), ("two", "one")):
            parked, news = await relay.deliveries(sink)
            assert (event_name(parked["type"]), parked["state"]) == ("event.scheduled", "parked")
            assert event_name(news["type"]) == "relay.dead-lettered", other
            assert (news["state"], news["reason"]) == ("superseded", "dropped: no")
        assert len(first.attempts) + len(second.attempts) == 4


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(ValueError("secret"), id="ValueError"),
        pytest.param(None, id="no receipt"),
        Receipt(response=b"bytes"),  # type: ignore[arg-type]  # that is the mistake
        Deferred("later", after=math.nan),
        Rejected("no", answer=b"bytes"),  # type: ignore[arg-type]  # that is the mistake
    ],
    ids=repr,
)
async def test_an_error_in_a_sinks_own_code_is_tried_five_times_with_one_traceback(
    tmp_path: Path, mistake: Receipt | Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Its neighbours never notice, though their deliveries are recorded in the same statement.

    What the error says of itself is not repeated where others read.
    """
    broken = gives(mistake, to=lambda event: event.subject == "E-1")  # type: ignore[arg-type]  # it can be None
    far, other = ScriptedSink(broken), ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": far, "chat": other}) as relay:
        await relay.record_event("E-1")
        await relay.record_event("E-2")
        await eventually(lambda: bool(about(other, "relay.dead-lettered")))
        await relay.settle()
        parked, delivered = await relay.deliveries("bus")
        states = parked["state"], parked["attempts"], delivered["state"]
        assert states == ("parked", 5, "delivered")
        reason = "the sink's own code failed 5 times; last: the sink's own code failed: "
        assert (parked["reason"] or "").startswith(reason)
        tries = [outcome for entry, outcome, *_ in await relay.attempts("bus") if entry == 1]
        assert tries == ["error"] * 5
        scheduled = {each.subject for each in other.delivered if each.name == "event.scheduled"}
        assert scheduled == {"E-1", "E-2"}
        assert {delivery["state"] for delivery in await relay.deliveries("chat")} == {"delivered"}
        assert "secret" not in str([event.data for event in other.delivered])
        assert not relay.task.done()
    assert len([record for record in caplog.records if record.exc_info is not None]) == 1


async def test_a_cancellation_that_nobody_asked_for_is_a_lost_connection(tmp_path: Path) -> None:
    """A library cancels its publishers (docs/protocol.md#a-library-cancels-publishers)."""
    lost = asyncio.CancelledError()
    far = ScriptedSink(gives(lost, lost, Receipt()))
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await relay.record_event("E-1")
        await eventually(lambda: len(far.delivered) == 1)
        await relay.settle()
        tries = [(outcome, reason) for _, outcome, _, reason in await relay.attempts("bus")]
        assert tries == [("deferred", "the connection was lost")] * 2 + [("delivered", None)]
        assert not relay.task.done()


async def test_while_it_fails_one_is_tried_then_the_backlog_goes_in_order(tmp_path: Path) -> None:
    """No entry waits for its own long pause (docs/protocol.md#a-backlog-goes-out-at-once)."""
    far, other = ScriptedSink(refuses, longest_pause=0.3), ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": far, "chat": other}) as relay:
        names = ("event.scheduled", "event.updated", "event.started")
        expected = await relay.record_events(100, *names)
        await eventually(lambda: relay.dispatcher.workers[0].failing)
        await eventually(lambda: far.in_flight == 0)
        far.max_in_flight, may_answer = 0, asyncio.Event()

        async def refuses_late(event: CloudEvent) -> Receipt:
            await may_answer.wait()
            return await refuses(event)

        far.answer = refuses_late
        await eventually(lambda: far.in_flight > 0)
        await relay.record_event("E-100")  # a new entry is tried, too, when its turn comes
        assert far.max_in_flight == 1
        far.answer = accepts
        may_answer.set()
        await eventually(lambda: bool(far.delivered))
        began = asyncio.get_running_loop().time()
        await eventually(lambda: len(far.delivered) == 301)
        took = asyncio.get_running_loop().time() - began
        assert took < 0.1 * 300  # a third of what the pauses would take
        assert {subject: far.ids(subject) for subject in expected} == expected


async def test_a_receiver_that_is_gone_disables_the_sink_until_it_resumes(tmp_path: Path) -> None:
    """410 is told once, however many were under way (docs/protocol.md#410-ends-a-subscription)."""
    all_there = asyncio.Event()

    async def gone(_: CloudEvent) -> Receipt:
        await all_there.wait()
        raise Deferred("it answered 410", failure="disabled", status=410)

    far, other = ScriptedSink(gone), ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": far, "chat": other}) as relay:
        ids = [await relay.record_event(f"E-{number}") for number in range(10)]
        await eventually(lambda: far.in_flight == 10)
        all_there.set()
        await eventually(lambda: bool(about(other, "relay.sink-disabled")))
        ids.append(await relay.record_event("E-10"))
        await relay.settle()
        assert about(other, "relay.sink-disabled") == [("bus", 11 - 1)]
        assert [delivery["state"] for delivery in await relay.deliveries("bus")] == ["waiting"] * 11
        status = relay.dispatcher.workers[0]
        assert (status.state, status.failing) == ("disabled", True)
        assert status.reason == "it answered 410"
    far.answer = accepts
    async with running_dispatcher(tmp_path, {"bus": far, "chat": other}) as relay:
        assert relay.dispatcher.workers[0].state == "disabled"
        await relay.record_event("E-11")
        await relay.settle()
        assert not far.delivered
        await relay.dispatcher.set_state("bus", "on", None)
        await eventually(lambda: len(far.delivered) == 12)
        assert set(far.ids()) > set(ids)
        await eventually(lambda: bool(about(other, "relay.sink-recovered")))


async def test_a_paused_sink_keeps_what_comes_and_resumes_in_order(tmp_path: Path) -> None:
    far = ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await relay.dispatcher.set_state("bus", "paused", "by local:ada")
        ids = [await relay.record_event(f"E-{number}") for number in range(5)]
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        (worker,) = relay.dispatcher.workers
        assert (worker.state, worker.reason) == ("paused", "by local:ada")
        await relay.settle()
        assert not far.attempts
        await relay.dispatcher.set_state("bus", "on", None)
        await eventually(lambda: len(far.delivered) == 5)
        assert far.ids() == ids
        with pytest.raises(KeyError):
            await relay.dispatcher.set_state("nobody", "paused", None)


async def test_draining_waits_for_what_can_be_sent_and_for_nothing_else(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slowly(event: CloudEvent) -> Receipt:
        if event.subject != "bad":
            await release.wait()
            return Receipt()
        raise Deferred("not this one")

    slow, dead, paused, resting = (
        ScriptedSink(slowly, concurrency=1, longest_pause=300.0),
        ScriptedSink(refuses, longest_pause=300.0),
        ScriptedSink(),
        ScriptedSink(gives(Deferred("busy", after=300.0))),
    )
    async with running_dispatcher(
        tmp_path,
        {"slow": slow, "dead": dead, "paused": paused, "resting": resting},
        slow={"events": ["event.*"]},
    ) as relay:
        await relay.dispatcher.set_state("paused", "paused", None)
        for subject in ("bad", "E-1", "E-2"):
            await relay.record_event(subject)
        await eventually(lambda: slow.in_flight == 1 and relay.dispatcher.workers[1].failing)
        drained = asyncio.create_task(relay.dispatcher.drain())
        for under_way in ("E-1", "E-2"):
            await eventually(lambda under_way=under_way: slow.attempts[-1][1].subject == under_way)
            await asyncio.sleep(0.1)  # it looks fifty times a second
            assert not drained.done()
            release.set()
            release.clear()
        async with asyncio.timeout(60):
            await drained
        assert {event.subject for event in slow.delivered} >= {"E-1", "E-2"}
        assert len(resting.attempts) == 1
        await relay.record_event("E-3")  # the next dispatcher sends it
        await relay.settle()
        assert "E-3" not in [event.subject for _, event in slow.attempts]


# --- a minute in which nothing gets through


def of(relay: RunningDispatcher, sink: str) -> tuple[bool, str | None]:
    worker = relay.dispatcher.get_worker(sink)
    return worker.failing, worker.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (gives(Deferred("no such channel", failure="slow", status=404)), "no such channel"),
        (hangs, "no try has ended for a minute"),
    ],
)
async def test_a_sink_that_delivers_nothing_for_a_minute_is_failing_and_the_others_hear_of_it(
    tmp_path: Path, answer: Answer, reason: str
) -> None:
    """Two tries in a minute, or not even the end of the first, are too few to be three in a row."""
    clock = ManualClock()
    far, other = ScriptedSink(answer, longest_pause=300.0, clock=clock), ScriptedSink(clock=clock)
    async with running_dispatcher(tmp_path, {"bus": far, "chat": other}, clock=clock) as relay:
        await relay.record_event("E-1", not_before=900.0)
        await relay.forward(59.0)
        assert not of(relay, "bus")[0]
        await relay.forward(1.1)
        assert of(relay, "bus") == (True, reason)
        assert of(relay, "chat") == (False, None)
        assert about(other, "relay.sink-failing") == [("bus", 1)]
        far.answer = accepts
        await relay.record_event("E-2")
        await relay.forward(60.0)
        assert of(relay, "bus") == (False, None)
        assert about(other, "relay.sink-recovered")[0][0] == "bus"


async def test_what_is_not_needed_any_more_is_superseded_and_no_failure(tmp_path: Path) -> None:
    """It shows that the sink works, so a sink that was failing has recovered."""
    down = Deferred("down")
    answer = gives(down, down, down, Superseded("it has it"), Receipt(204))
    far, other = ScriptedSink(answer), ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": far, "other": other}) as relay:
        await relay.record_event("E-1")
        await relay.record_event("E-1", "event.started")
        await eventually(lambda: "event.started" in far.names())
        await eventually(lambda: "relay.sink-recovered" in other.names())
        await relay.settle()
        first, second = await relay.deliveries("bus")
        assert (first["state"], first["reason"]) == ("superseded", "it has it")
        assert second["state"] == "delivered"
        (status, _) = relay.dispatcher.workers
        assert (status.failing, status.reason) == (False, None)


@pytest.mark.parametrize("skew", [-1e12, 1e12, math.inf])
async def test_a_clock_that_is_far_off_is_no_error_of_the_sink(tmp_path: Path, skew: float) -> None:
    """The header Date can name the year 9999."""
    far = ScriptedSink(gives(Receipt(204, skew=skew)))
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await relay.record_event("E-1")
        await eventually(lambda: bool(far.delivered))
        await relay.settle()
        (delivery,) = await relay.deliveries("bus")
        assert (delivery["state"], delivery["attempts"]) == ("delivered", 1)


@pytest.mark.parametrize("reported", [Receipt(response="\udc80"), Rejected("\udc80")], ids=ascii)
async def test_a_report_that_cannot_be_encoded_is_recorded_without_those_characters(
    tmp_path: Path, reported: Receipt | Exception
) -> None:
    """Names of files can hold them."""
    far, other = ScriptedSink(gives(reported)), ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": far, "chat": other}) as relay:
        await relay.record_event("E-1")
        await eventually(lambda: bool(far.attempts and other.delivered))
        await relay.settle()
        (attempt,) = await relay.attempts("bus")
        is_rejected = isinstance(reported, Rejected)
        assert attempt[1:] == (("parked", None, "?") if is_rejected else ("delivered", None, None))
        assert {delivery["state"] for delivery in await relay.deliveries("chat")} == {"delivered"}


@pytest.mark.parametrize("how", ["delivered", "deferred", "rejected"])
async def test_a_far_clock_that_differs_is_told_once_each_time(tmp_path: Path, how: str) -> None:
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
        skewed = (event for event in other.delivered if event.name == "relay.clock-skewed")
        return [event.data["reason"] for event in skewed]

    async with running_dispatcher(tmp_path, {"drain": far, "chat": other}) as relay:
        await relay.record_events(3)
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
        assert other.subjects("relay.clock-skewed") == ["drain", "drain"]
        assert "relay.clock-skewed" not in far.names()
