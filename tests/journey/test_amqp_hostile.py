"""Approvals by somebody who knows RabbitMQ well: the ways into a queue, and past a permission, that are no publish to the exchange."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
import pytest
import pytest_asyncio
from aio_pika.abc import AbstractIncomingMessage
from pamqp.commands import Basic
from pamqp.common import Arguments

from relay.simulator import Event, Fault
from tests.journey.bus import SCOPE, Stage, define_users, stage
from tests.journey.relay_process import eventually, name_of
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel, RefusedError

REFUSED_TOPIC = re.compile("403 ACCESS_REFUSED - (write )?access to topic 'approve.")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there(
    _private_node: Broker, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    """One relay and one broker for all tests of this module: each has events and message ids of its own."""
    _private_node.heal()
    define_users(_private_node)
    async with stage(_private_node, tmp_path_factory.mktemp("relay")) as here:
        await here.prepare(8)
        yield here


async def put(
    there: Stage, exchange: str, key: str, wish: dict[str, Any], message_id: str, **more: Any
) -> None:
    """As the user drain, whom the relay knows: publish the wish to any exchange."""
    properties = Basic.Properties(
        **{"message_id": message_id, "user_id": "drain", "delivery_mode": 2, **more}
    )
    async with RawChannel(there.bus.broker.amqp_url("drain")) as channel:
        await channel.publish(exchange, key, orjson.dumps(wish), properties)


async def is_buried(there: Stage, message_id: str, event: Event) -> None:
    """It is dead-lettered, starts nothing and is told to nobody."""
    await eventually(lambda: [one.message_id for one in there.bus.dead].count(message_id) == 1)
    await leads_to_nothing(there, message_id, event)


async def leads_to_nothing(there: Stage, message_id: str, event: Event) -> None:
    """It starts nothing and is told to nobody."""
    mark = f"after {message_id}"
    await there.bus.send({"eventId": "none", "decision": "approve", "revision": "none"}, mark)
    await there.bus.hears("approval.refused", cause=mark)
    assert not [
        one
        for one in there.bus.said
        if one["subject"] == event.event_id and name_of(one).startswith("approval.")
    ]
    assert not there.starts(event)


# --- ways in


async def test_straight_into_the_queue_by_the_default_exchange(there: Stage) -> None:
    """Whoever may write `amq.default` may write every queue, and no topic permission is asked for."""
    event, wish = await there.wish()
    await put(there, "", there.bus.queue, wish, "by the default exchange")
    await is_buried(there, "by the default exchange", event)


async def test_by_way_of_a_queue_that_dead_letters_where_its_owner_likes(there: Stage) -> None:
    """The broker checks the right to write the exchange when such a queue is declared, and topic permissions never.

    With it, the user of another scope could send here, and anybody who may read another's decisions could send them again, later.
    """
    event, wish = await there.wish()
    trap = f"{there.bus.exchange}.trap"
    arguments: Arguments = {
        "x-dead-letter-exchange": f"{there.bus.exchange}.approvals",
        "x-dead-letter-routing-key": f"approve.{SCOPE}",
        "x-message-ttl": 0,
    }
    async with there.bus.channel() as channel:
        await channel.declare_queue(trap, durable=True, arguments=arguments)
        await put(there, "", trap, wish, "by dead letter")
        await is_buried(there, "by dead letter", event)
        await channel.queue_delete(trap)


async def test_by_way_of_an_alternate_exchange_or_a_binding_between_exchanges(there: Stage) -> None:
    event, wish = await there.wish()
    detour, link = f"{there.bus.exchange}.detour", f"{there.bus.exchange}.link"
    approvals = f"{there.bus.exchange}.approvals"
    async with there.bus.channel() as channel:
        await channel.declare_exchange(
            detour, "direct", durable=True, arguments={"alternate-exchange": approvals}
        )
        linked = await channel.declare_exchange(link, "topic", durable=True)
        await (await channel.get_exchange(approvals)).bind(linked, "#")
        for exchange in (detour, link):
            await put(there, exchange, f"approve.{SCOPE}", wish, f"by {exchange}")
            await is_buried(there, f"by {exchange}", event)
            await channel.exchange_delete(exchange)


async def test_a_topic_permission_for_another_scope_gives_no_way_here(there: Stage) -> None:
    """The broker refuses the key itself. Whether it lets the key through in a CC header depends on its version: the relay does not."""
    event, wish = await there.wish()
    node, approvals = there.bus.broker, f"{there.bus.exchange}.approvals"
    await asyncio.to_thread(
        node.ctl, "set_topic_permissions", "drain", approvals, "^approve\\.elsewhere$", "^$"
    )
    try:
        try:
            await put(
                there,
                approvals,
                "approve.elsewhere",
                wish,
                "by CC",
                headers={"CC": [f"approve.{SCOPE}"]},
            )
        except RefusedError as error:
            assert REFUSED_TOPIC.match(str(error))  # noqa: PT017  # a broker that lets it through is as good
        else:
            await eventually(lambda: [one.message_id for one in there.bus.dead].count("by CC") == 1)
        with pytest.raises(RefusedError, match=REFUSED_TOPIC):
            await put(there, approvals, f"approve.{SCOPE}", wish, "by its key")
    finally:
        await asyncio.to_thread(node.ctl, "clear_topic_permissions", "drain", approvals)
    await leads_to_nothing(there, "by CC", event)


# --- what is asked of the answer


async def test_nothing_is_sent_to_where_a_message_asks_for_a_reply(there: Stage) -> None:
    """The relay would write with its own rights wherever a stranger points.

    See docs/protocol.md#no-reply_to.
    """
    event, wish = await there.wish()
    async with there.bus.channel() as channel:
        replies = await channel.declare_queue(exclusive=True)
        for number, reply_to in enumerate((replies.name, "amq.rabbitmq.reply-to.crafted")):
            await there.bus.send(
                {**wish, "decision": "hold"},
                f"reply {number}",
                reply_to=reply_to,
                correlation_id="x",
            )
            await there.bus.hears("approval.recorded", event, f"reply {number}")
        assert await replies.get(fail=False) is None


async def test_a_message_that_another_gave_back_is_decided_like_any(there: Stage) -> None:
    """Redelivered, as its header says; that it was not decided before is known by its id alone."""
    event, wish = await there.wish()
    await there.running.relay.gate.set_mode("off", "local:tester")
    try:
        await eventually(there.is_not_consuming, every=0.1)
        await there.bus.send(wish, "given back")
        async with there.bus.channel() as channel:
            came: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
            await (await channel.get_queue(there.bus.queue)).consume(came.put)
            for redelivered in (False, True):
                async with asyncio.timeout(60):
                    message = await came.get()
                assert message.redelivered is redelivered
                await message.nack(requeue=True)
    finally:
        await there.running.relay.gate.set_mode("on", "local:tester")
    await there.sim.approved(event, within=60)
    assert len(there.bus.told("approval.recorded", event)) == 1


async def test_what_azure_refuses_is_told_as_caused_by_the_message(there: Stage) -> None:
    event, wish = await there.wish()
    there.sim.fault(Fault(on="approval", status=400))
    await there.bus.send(wish, "refused by Azure")
    failed = await there.bus.hears("startrequest.failed", event)
    assert (failed["causationid"], failed["data"]["status"]) == ("refused by Azure", 400)
    assert not there.bus.told("startrequest.accepted", event)


# --- what the broker sees of the relay


async def test_two_connections_with_a_heartbeat_of_ten_seconds_and_one_channel_that_stays(
    there: Stage,
) -> None:
    """A channel for each message would be slow, and an unused one is a leak.

    See docs/protocol.md#channels-are-expensive.
    """
    columns = ("client_properties", "timeout", "channels")
    said = await asyncio.to_thread(there.bus.broker.ctl, "list_connections", *columns)
    ours = [line.split("\t") for line in said.splitlines() if '"imds-relay ' in line]
    named = {
        "approvals" if '"imds-relay approvals of journey at vm-0"' in line else "bus": rest
        for line, *rest in ours
    }
    assert len(ours) == 2
    assert named == {"approvals": ["10", "1"], "bus": ["10", "1"]}


# --- what the log says


async def test_what_cannot_be_used_is_counted_and_logged_once_a_minute_for_each_user(
    there: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can fill the log, nor drown another in it."""
    before, dead = await _strangers(there), len(there.bus.dead)
    for number, user in enumerate(("stranger", "stranger", "stranger", "watcher")):
        await there.bus.send(b"no json", f"counted {number}", user=user)
    await eventually(lambda: len(there.bus.dead) == dead + 4)
    assert await _strangers(there) == before + 4
    logged = [
        record.getMessage()
        for record in caplog.records
        if record.name == "relay.api.auth.rejection_log"
    ]
    assert len(logged) == 2
    assert (
        logged[0]
        == "a message from 'stranger' was dead-lettered: \"its user_id is no client's amqp_user\""
    )
    assert logged[1].startswith("a message from 'watcher' was dead-lettered: ")


async def _strangers(there: Stage) -> float:
    url = f"http://127.0.0.1:{there.running.api_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        lines = (await response.text()).splitlines()
    return next(
        float(line.split()[1])
        for line in lines
        if line.startswith("imds_relay_rejected_calls_total ")
    )


async def test_no_password_is_ever_told(
    there: Stage,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By the consumer, while it is let in, thrown out and refused: in no log of any library, no file and no event."""
    caplog.set_level(logging.DEBUG)
    node, secret = there.bus.broker, "hunter2 %ü@/:"
    await asyncio.to_thread(node.add_user, "rotated", secret)
    async with stage(node, tmp_path, url=node.amqp_url("rotated")) as here:
        event, wish = await here.wish()
        await here.bus.send(wish, "before")
        await here.bus.hears("approval.recorded", event)
        await asyncio.to_thread(node.ctl, "change_password", "rotated", "hunter3")
        await asyncio.to_thread(node.ctl, "close_all_user_connections", "rotated", "for rotation")
        await eventually(lambda: "refused user, password or certificate" in caplog.text)
        told = await asyncio.to_thread(_all_of, tmp_path)
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err, told, repr(here.bus.said)):
        for trace in ("hunter", quote(secret, safe=""), "%ü@"):
            assert trace not in text


def _all_of(directory: Path) -> str:
    """What is in its files."""
    return "".join(
        path.read_bytes().decode(errors="replace")
        for path in directory.rglob("*")
        if path.is_file()
    )
