"""A RabbitMQ that is down, goes away, hangs or blocks: nothing is lost, and delivery resumes."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import aiormq
import pytest

from relay.amqp import connection
from relay.errors import Deferred
from relay.events.cloudevent import CloudEvent
from relay.sinks.rabbitmq.sink import RabbitMQ
from tests.builders import cloudevent
from tests.eventually import eventually
from tests.rabbitmq import Broker
from tests.sinks.rabbitmq_consumer import bound, channel, deferred, delivered, sink, waiting

QUORUM = {"x-queue-type": "quorum"}


async def consumer(url: str, exchange: str) -> None:
    """A durable queue of the exchange's name that gets everything."""
    async with channel(url) as broker_channel:
        queue = await bound(broker_channel, exchange, name=exchange, arguments=QUORUM)
        await queue.purge()


async def stored(url: str, exchange: str) -> list[bytes]:
    async with channel(url) as broker_channel:
        return await waiting(await broker_channel.get_queue(exchange))


async def test_a_broker_that_is_killed_in_the_middle_loses_nothing(own_broker: Broker) -> None:
    """Each event is tried with the same id until it is confirmed. Then all are in the queue."""
    events = [cloudevent(data={"n": n}) for n in range(640)]
    errors: list[Deferred] = []
    halfway = asyncio.Event()

    async def send(bus: RabbitMQ, share: list[CloudEvent]) -> None:
        for event in share:
            if event is events[200]:
                halfway.set()
            while True:
                try:
                    await bus.deliver(event)
                    break
                except Deferred as error:
                    errors.append(error)
                    await asyncio.sleep(0.05)

    async with sink(own_broker.amqp_url(), "killed") as bus:
        await delivered(bus, cloudevent("relay.ping"))
        await consumer(own_broker.amqp_url(), "killed")
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            for worker in range(bus.concurrency):
                tasks.create_task(send(bus, events[worker :: bus.concurrency]))
            await halfway.wait()
            own_broker.kill()  # blocks, so that what is in flight stays in flight
            await asyncio.to_thread(own_broker.start)
        assert {error.failure for error in errors} == {"transient"}
        assert any("sent again with the same id" in error.reason for error in errors)
        wanted = {event.body for event in events}
        assert set(await stored(own_broker.amqp_url(), "killed")) == wanted


async def test_what_is_sent_while_the_connection_ends_is_sent_again(
    own_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for ten messages, which nobody makes after the connection is lost."""
    is_lost = asyncio.Event()
    notice_loss = aiormq.Connection._on_reader_done  # noqa: SLF001  # the moment is its own

    def tell_loss(of: aiormq.Connection, reader: asyncio.Task[None]) -> None:
        notice_loss(of, reader)
        is_lost.set()

    async def send(bus: RabbitMQ, event: CloudEvent) -> None:
        await is_lost.wait()
        await deferred(bus, event, "closed before")
        await delivered(bus, event)

    monkeypatch.setattr(aiormq.Connection, "_on_reader_done", tell_loss)
    url = own_broker.amqp_url()
    async with sink(url, "ending") as bus:
        await delivered(bus, cloudevent("relay.ping"))
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            for number in range(bus.concurrency):
                tasks.create_task(send(bus, cloudevent(data={"n": number})))
            close = ("close_all_user_connections", "guest", "for the test")
            await asyncio.to_thread(own_broker.ctl, *close)


async def test_a_broker_that_hangs_is_noticed_by_its_missing_heartbeat(
    own_broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See docs/protocol.md#a-library-cancels-publishers: this is a Deferred.

    With a heartbeat of one second the watchdog takes six, with the relay's own of ten it takes 33.
    """
    caplog.set_level(logging.WARNING, "relay.sinks.rabbitmq")
    monkeypatch.setattr(connection, "HEARTBEAT", 1)
    async with sink(own_broker.amqp_url(), "frozen", timeout="30s") as bus:
        await delivered(bus, cloudevent())
        own_broker.freeze()
        start = time.monotonic()
        # So much that the socket is full: some messages wait for a confirm, others to be sent.
        large = [cloudevent(data={"description": "x" * 100_000, "n": n}) for n in range(64)]
        errors = await asyncio.gather(*(deferred(bus, event) for event in large))
        assert 4 < time.monotonic() - start < 25  # before the timeout
        assert {error.failure for error in errors} == {"transient"}
        assert any("heartbeat" in error.reason for error in errors)
        own_broker.thaw()
        await delivered(bus, cloudevent("event.updated"))
    assert "the connection to 127.0.0.1" in caplog.text


async def test_a_late_confirm_is_waited_for_and_nothing_sent_twice(own_broker: Broker) -> None:
    event = cloudevent()
    async with sink(own_broker.amqp_url(), "slow", timeout="100ms") as bus:
        await delivered(bus, cloudevent("relay.ping"))
        await consumer(own_broker.amqp_url(), "slow")
        own_broker.freeze()
        late = asyncio.create_task(bus.deliver(event))
        _, pending = await asyncio.wait({late}, timeout=1)
        assert pending
        own_broker.thaw()
        await late
        assert await stored(own_broker.amqp_url(), "slow") == [event.body]


async def test_a_broker_under_memory_alarm_defers_and_takes_everything_when_it_is_over(
    own_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in flight stays so, what comes later is not sent, and closing does not wait.

    The broker tells a connection of the alarm once something was published on it.
    """
    before, later = cloudevent(), cloudevent("event.updated")
    url = own_broker.amqp_url()
    async with sink(url, "alarmed", timeout="500ms") as bus:
        await delivered(bus, cloudevent("relay.ping"))
        await consumer(url, "alarmed")
        await asyncio.to_thread(own_broker.alarm, on=True)
        async with sink(url, "alarmed", timeout="500ms") as leaving:
            left = asyncio.create_task(deferred(leaving, cloudevent("event.started"), "closed"))
            await eventually(lambda: caplog.text.count("was blocked by") == 1)
            await deferred(leaving, later, "did not let anybody publish")
            start = time.monotonic()
        assert time.monotonic() - start < connection.CLOSE_TIMEOUT + 10
        assert "sent again with the same id" in (await left).reason
        in_flight = asyncio.create_task(bus.deliver(before))
        await eventually(lambda: caplog.text.count("was blocked by") == 2)
        error = await deferred(bus, later, "did not let anybody publish")
        assert (error.failure, in_flight.done()) == ("transient", False)
        await asyncio.to_thread(own_broker.alarm, on=False)
        await in_flight
        await delivered(bus, later)
        broker_channel = await stored(url, "alarmed")
    assert {before.body, later.body} <= set(broker_channel)


async def test_a_changed_url_file_is_used_for_the_next_connection_and_no_password_is_ever_told(
    own_broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rotated password needs no restart. No log of any level contains a password."""
    caplog.set_level(logging.DEBUG)
    await asyncio.to_thread(own_broker.add_user, "rotated", "hunter2")
    file = tmp_path / "url"
    file.write_text(own_broker.amqp_url("rotated"))
    async with sink(None, "rotated", url_file=file) as bus:
        await delivered(bus, cloudevent())
        await asyncio.to_thread(own_broker.add_user, "rotated", "hunter3")
        close = ("close_all_user_connections", "rotated", "for rotation")
        await asyncio.to_thread(own_broker.ctl, *close)
        error = await deferred(bus, cloudevent(), "refused user, password or certificate")
        file.write_text(own_broker.amqp_url("rotated").replace("hunter2", "hunter3"))
        await delivered(bus, cloudevent())
    named = [(record.name, record.getMessage()) for record in caplog.records]
    ours = [text for name, text in named if name == "relay.sinks.rabbitmq"]
    place = f"127.0.0.1:{own_broker.port}"
    assert [line.partition(" to ")[0] for line in ours] == [
        "sink bus: connected",
        "sink bus: the connection",
        "sink bus: no connection",
        "sink bus: connected",
    ]
    assert all(place in line for line in ours)
    assert "for rotation" in ours[1]
    assert error.reason in ours[2]
    assert "hunter" not in f"{caplog.text}{error!r}{error.__cause__!r}{error.__context__!r}"
