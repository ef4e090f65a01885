"""What every sink must do: the cases, and what a sink provides to be tested by them.

`test_conformance` runs each case with each sink. A new sink adds its receiver there, as
docs/adding-a-sink.md shows.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from relay.errors import Deferred, DeliveryError
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt, Sink
from tests.builders import cloudevent
from tests.delivery.running_dispatcher import RunningDispatcher, running_dispatcher
from tests.eventually import eventually

PATIENCE = 60.0
"""Seconds within which what must happen happens, on a slow machine."""


class ReceiverControl(Protocol):
    """The real receiver of a sink, as a test controls it."""

    secrets_in_settings: tuple[str, ...]
    """Texts in the sink's settings that no error and no log may hold."""

    def sink(self, *, unwanted: bool = False) -> AbstractAsyncContextManager[Sink]:
        """A sink for this receiver. With ``unwanted``, all events are refused for good."""

    async def disconnect(self) -> None:
        """From now on connections are cut and refused."""

    async def reconnect(self) -> None:
        """It accepts connections again, at the same address."""

    async def hang(self) -> None:
        """From now on it reads everything and answers nothing."""

    async def received(self) -> list[CloudEvent]:
        """Return every event that it has received, in order."""


@dataclass(slots=True)
class Watched:
    """A sink, retried at once, and what came of it: how many were under way, and every error.

    While ``gate`` is clear, deliveries wait at it and do not reach the sink.
    """

    sink: Sink
    concurrency: int = 0
    longest_pause: float = 0.2  # the cases are about the sink, and not about the plan
    give_up_after: float = 3600.0
    under_way: int = 0
    most: int = 0
    errors: list[BaseException] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.concurrency = self.sink.concurrency
        self.gate.set()

    async def deliver(self, event: CloudEvent) -> Receipt:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.gate.wait()
            return await self.sink.deliver(event)
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self.under_way -= 1


Log = pytest.LogCaptureFixture
Case = Callable[[ReceiverControl, Path, Log], Awaitable[None]]


async def delivers_once(receiver: ReceiverControl, folder: Path, _: Log) -> None:
    """What was taken is not sent again, and it is the event, byte for byte."""
    async with receiver.sink() as sink, running_dispatcher(folder, {"sink": sink}) as relay:
        expected = [await relay.record_event(f"E-{number}") for number in range(5)]
        await eventually(lambda: _settled(relay, 5, "delivered"))
        assert sorted(event.id for event in await receiver.received()) == expected
        event = cloudevent(subject="by hand")
        assert isinstance(await sink.deliver(event), Receipt)
        assert (await receiver.received())[-1].body == event.body


async def defers_while_the_receiver_refuses_connections(
    receiver: ReceiverControl, folder: Path, _: Log
) -> None:
    """Each try ends within its timeout. What waited arrives in order when the receiver is back."""
    await receiver.disconnect()
    async with receiver.sink() as sink:
        with pytest.raises(Deferred) as caught:
            await asyncio.wait_for(sink.deliver(cloudevent(subject="by hand")), PATIENCE)
        assert caught.value.failure == "transient"
        watched = Watched(sink)
        async with running_dispatcher(folder, {"sink": watched}) as relay:
            names = ("event.scheduled", "event.updated", "event.started")
            expected = (await relay.record_events(1, *names))["E-0"]
            await eventually(lambda: bool(watched.errors))
            assert all(isinstance(error, Deferred) for error in watched.errors)
            await receiver.reconnect()
            await eventually(lambda: _settled(relay, 3, "delivered"))
            taken = [event for event in await receiver.received() if event.subject == "E-0"]
            assert [event.id for event in taken] == expected


async def gives_up_on_a_permanent_refusal(receiver: ReceiverControl, folder: Path, _: Log) -> None:
    """With no NotBefore ahead it becomes a dead letter with a useful reason, and blocks nothing."""
    async with (
        receiver.sink(unwanted=True) as sink,
        running_dispatcher(folder, {"sink": Watched(sink)}) as relay,
    ):
        await relay.record_event("E-1", "event.started")
        await relay.record_event("E-1", "event.ended")
        await eventually(lambda: _settled(relay, 2, "parked"))
        for parked in await relay.deliveries("sink"):
            assert len(parked["reason"] or "") > 20
        assert await receiver.received() == []


async def is_concurrent_and_keeps_the_order(
    receiver: ReceiverControl, folder: Path, _: Log
) -> None:
    """Many events at once, and about each in order."""
    async with receiver.sink() as sink:
        watched = Watched(sink)
        watched.gate.clear()  # however slowly the events are recorded, several wait at once
        names = ("event.scheduled", *["event.updated"] * 4)
        async with running_dispatcher(folder, {"sink": watched}) as relay:
            expected = await relay.record_events(20, *names)
            await eventually(lambda: watched.under_way > 1)
            watched.gate.set()
            await eventually(lambda: _settled(relay, 100, "delivered"))
        taken: dict[str, list[str]] = defaultdict(list)
        for event in await receiver.received():
            taken[str(event.subject)].append(event.id)
        assert taken == expected
        assert sink.concurrency > 1
        assert 1 < watched.most <= sink.concurrency


async def closes_during_delivery(receiver: ReceiverControl, folder: Path, _: Log) -> None:
    """A relay that stops does not wait for a receiver that hangs. No task and no event is lost."""
    before = asyncio.all_tasks()
    start = asyncio.get_running_loop().time()
    async with receiver.sink() as sink:
        await eventually(lambda: _delivers(sink))
        await receiver.hang()
        watched = Watched(sink)
        async with running_dispatcher(folder, {"sink": watched}) as relay:
            await relay.record_event("E-1")
            await eventually(lambda: watched.under_way == 1)
        assert watched.under_way == 0
    assert asyncio.get_running_loop().time() - start < PATIENCE
    await receiver.reconnect()
    await eventually(lambda: asyncio.all_tasks() <= before | receiver_tasks())
    async with (
        receiver.sink() as sink,
        running_dispatcher(folder, {"sink": Watched(sink)}) as relay,
    ):
        await eventually(lambda: _settled(relay, 1, "delivered"))
    assert "E-1" in {event.subject for event in await receiver.received()}


async def shows_no_secret_in_any_error(
    receiver: ReceiverControl, folder: Path, caplog: Log
) -> None:
    """Whatever goes wrong: gone, hanging up in the middle, and refusing."""
    caplog.set_level(logging.DEBUG, "relay")
    async with receiver.sink() as sink:
        await eventually(lambda: _delivers(sink))
        watched = Watched(sink)
        async with running_dispatcher(folder, {"sink": watched}) as relay:
            await receiver.disconnect()
            await relay.record_event("E-1")
            await eventually(lambda: len(watched.errors) >= 2)
            await receiver.reconnect()
            await eventually(lambda: _settled(relay, 1, "delivered"))
    async with receiver.sink(unwanted=True) as sink:
        refused = Watched(sink)
        async with running_dispatcher(folder, {"unwanted": refused}) as relay:
            await relay.record_event("E-2", "event.started")
            await eventually(lambda: _settled(relay, 1, "parked", "unwanted"))
    errors = [*watched.errors, *refused.errors]
    assert all(isinstance(error, (DeliveryError, asyncio.CancelledError)) for error in errors)
    output = caplog.text
    for error in errors:
        output += "".join(traceback.format_exception(error)) + str(getattr(error, "response", ""))
    assert [secret for secret in receiver.secrets_in_settings if secret in output] == []
    assert receiver.secrets_in_settings


CASES: tuple[Case, ...] = (
    delivers_once,
    defers_while_the_receiver_refuses_connections,
    gives_up_on_a_permanent_refusal,
    is_concurrent_and_keeps_the_order,
    closes_during_delivery,
    shows_no_secret_in_any_error,
)


def receiver_tasks() -> set[asyncio.Task[Any]]:
    """Tasks of the test's own receiver, which may begin at any time."""
    return {task for task in asyncio.all_tasks() if task.get_name().startswith("receiver")}


async def _delivers(sink: Sink) -> bool:
    try:
        await sink.deliver(cloudevent(subject="first"))
    except Deferred:
        return False
    return True


async def _settled(relay: RunningDispatcher, count: int, state: str, sink: str = "sink") -> bool:
    return len(await relay.deliveries(sink, state)) == count
