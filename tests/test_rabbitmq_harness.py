"""The private RabbitMQ does to its clients what its methods say."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import AMQPConnectionError, ProbableAuthenticationError
from aiormq.exceptions import ChannelAccessRefused

from tests.rabbitmq import Broker, Reachable


async def durable_queue(channel: AbstractChannel, name: str) -> aio_pika.abc.AbstractQueue:
    """Declare the kind of queue that docs/rabbitmq.md names."""
    return await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})


async def put(url: str, queue: str, body: bytes) -> None:
    """Publish one persistent message and wait until the broker confirms it."""
    async with await aio_pika.connect(url) as connection, connection.channel() as channel:
        await durable_queue(channel, queue)
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, routing_key=queue, timeout=60)


async def take(url: str, queue: str) -> bytes:
    """Take one message out of a queue."""
    async with await aio_pika.connect(url) as connection, connection.channel() as channel:
        message = await (await durable_queue(channel, queue)).get(timeout=60)
        await message.ack()
        return message.body


async def test_a_shared_broker_takes_and_gives_a_message(broker: Reachable, exchange: str) -> None:
    async with (
        await aio_pika.connect(broker.amqp_url()) as connection,
        connection.channel() as channel,
    ):
        there = await channel.declare_exchange(exchange, "topic", durable=True)
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(there, "#")
        await there.publish(aio_pika.Message(b"hello"), "a.b", timeout=60)
        message = await queue.get(timeout=60)
        await message.ack()
        assert message.body == b"hello"


async def test_a_killed_broker_comes_back_with_its_durable_data(own_broker: Broker) -> None:
    """Connections break, the port refuses, and confirmed messages survive the restart."""
    url = own_broker.amqp_url()
    await put(url, "kept", b"confirmed")
    connection = await aio_pika.connect(url)
    broken = asyncio.Event()
    connection.close_callbacks.add(lambda *_: broken.set())

    await asyncio.to_thread(own_broker.kill)

    assert not own_broker.running
    async with asyncio.timeout(60):
        await broken.wait()
    with pytest.raises(AMQPConnectionError):
        await aio_pika.connect(url, timeout=60)
    await asyncio.to_thread(own_broker.start)
    assert await take(url, "kept") == b"confirmed"


async def test_a_restart_in_order_keeps_data_and_port(own_broker: Broker) -> None:
    url = own_broker.amqp_url()
    await put(url, "kept", b"over the restart")
    await asyncio.to_thread(own_broker.restart)
    assert own_broker.amqp_url() == url
    assert await take(url, "kept") == b"over the restart"


async def test_a_frozen_broker_is_silent_and_goes_on_when_thawed(own_broker: Broker) -> None:
    """The connection stays open and nothing is refused; only answers fail to come."""
    async with (
        await aio_pika.connect(own_broker.amqp_url()) as connection,
        connection.channel() as channel,
    ):
        await durable_queue(channel, "frozen")
        own_broker.freeze()
        assert own_broker.running
        assert not own_broker.answers()
        waiting = asyncio.ensure_future(
            channel.default_exchange.publish(aio_pika.Message(b"late"), "frozen")
        )
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        own_broker.thaw()
        async with asyncio.timeout(60):
            await waiting
    assert await take(own_broker.amqp_url(), "frozen") == b"late"


async def test_an_alarm_blocks_publishers_until_it_ends(own_broker: Broker) -> None:
    async with (
        await aio_pika.connect(own_broker.amqp_url()) as connection,
        connection.channel() as channel,
    ):
        await durable_queue(channel, "alarmed")
        await asyncio.to_thread(own_broker.alarm, on=True)
        waiting = asyncio.ensure_future(
            channel.default_exchange.publish(aio_pika.Message(b"blocked"), "alarmed")
        )
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        await asyncio.to_thread(own_broker.alarm, on=False)
        async with asyncio.timeout(60):
            await waiting


async def test_a_user_has_the_rights_that_were_given(own_broker: Broker) -> None:
    await asyncio.to_thread(own_broker.add_user, "reader", "p@ss/word", configure="^$", write="^$")
    await put(own_broker.amqp_url(), "readable", b"x")
    async with await aio_pika.connect(own_broker.amqp_url("reader")) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("readable", passive=True)
        await (await queue.get(timeout=60)).ack()
        with pytest.raises(ChannelAccessRefused):
            await channel.declare_queue(
                "made-by-reader", durable=True, arguments={"x-queue-type": "quorum"}
            )


async def test_a_wrong_password_is_refused(own_broker: Broker) -> None:
    wrong = own_broker.amqp_url().replace("guest:guest", "guest:wrong")
    with pytest.raises(ProbableAuthenticationError):
        await aio_pika.connect(wrong, timeout=60)


def test_healing_undoes_what_a_test_did(own_broker: Broker) -> None:
    own_broker.alarm(on=True)
    own_broker.freeze()
    own_broker.heal()
    assert own_broker.answers(within=60)
    assert not own_broker.alarmed()
    own_broker.stop()
    own_broker.heal()
    assert own_broker.answers(within=60)


def test_the_node_ends_when_the_tests_are_killed(tmp_path: Path) -> None:
    """A test run that is killed leaves no RabbitMQ behind, not even a frozen one."""
    program = (
        "import os, pathlib, signal, sys; from tests.rabbitmq import Broker\n"
        "node = Broker(pathlib.Path(sys.argv[1])); node.start(); print(node.port, flush=True)\n"
        "node.freeze(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    port = int(run.stdout)
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)
