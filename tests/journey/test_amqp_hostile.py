"""Approvals that bypass the exchange or a permission, by somebody who knows RabbitMQ well."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest
import pytest_asyncio
from pamqp.commands import Basic
from pamqp.common import Arguments

from relay.simulator import Event
from tests.eventually import eventually
from tests.journey.bus import SCOPE, System, define_users, running_system
from tests.journey.relay_process import name_of
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel, RefusedError

REFUSED_TOPIC = re.compile("403 ACCESS_REFUSED - (write )?access to topic 'approve.")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(_node: Broker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """One relay and broker for all tests of this module, which use different events and ids."""
    _node.heal()
    define_users(_node)
    async with running_system(_node, tmp_path_factory.mktemp("relay")) as system:
        await system.schedule_reboots(8)
        yield system


async def put(
    system: System,
    exchange: str,
    key: str,
    decision: dict[str, Any],
    message_id: str,
    **properties: Any,
) -> None:
    """Publish the decision to any exchange, as the known user drain."""
    header = Basic.Properties(
        **{"message_id": message_id, "user_id": "drain", "delivery_mode": 2, **properties}
    )
    async with RawChannel(system.bus.broker.amqp_url("drain")) as channel:
        await channel.publish(exchange, key, orjson.dumps(decision), header)


async def is_buried(system: System, message_id: str, event: Event) -> None:
    """It is dead-lettered, starts nothing and is told to nobody."""
    await eventually(
        lambda: [item.message_id for item in system.bus.dead_letters].count(message_id) == 1
    )
    await leads_to_nothing(system, event)


async def leads_to_nothing(system: System, event: Event) -> None:
    await system.wait_until_earlier_are_decided()
    assert not [
        item
        for item in system.bus.events
        if item["subject"] == event.event_id and name_of(item).startswith("approval.")
    ]
    assert not system.starts(event)


# --- ways in


async def test_by_way_of_a_queue_that_dead_letters_where_its_owner_likes(system: System) -> None:
    """The broker checks the right on the exchange when the queue is declared, but no topics.

    The user of another scope could send here, and whoever reads decisions could repeat them later.
    """
    event, decision = await system.schedule_reboot()
    trap = f"{system.bus.exchange}.trap"
    arguments: Arguments = {
        "x-dead-letter-exchange": f"{system.bus.exchange}.approvals",
        "x-dead-letter-routing-key": f"approve.{SCOPE}",
        "x-message-ttl": 0,
    }
    async with system.bus.channel() as channel:
        await channel.declare_queue(trap, durable=True, arguments=arguments)
        await put(system, "", trap, decision, "by dead letter")
        await is_buried(system, "by dead letter", event)
        await channel.queue_delete(trap)


async def test_a_topic_permission_for_another_scope_gives_no_way_here(system: System) -> None:
    """The broker refuses the key, but some versions accept it in a CC header. The relay never."""
    event, decision = await system.schedule_reboot()
    node, approvals = system.bus.broker, f"{system.bus.exchange}.approvals"
    await asyncio.to_thread(
        node.ctl, "set_topic_permissions", "drain", approvals, "^approve\\.elsewhere$", "^$"
    )
    try:
        try:
            await put(
                system,
                approvals,
                "approve.elsewhere",
                decision,
                "by CC",
                headers={"CC": [f"approve.{SCOPE}"]},
            )
        except RefusedError as error:
            assert REFUSED_TOPIC.match(str(error))  # noqa: PT017  # accepting the key is as good
        else:
            await eventually(
                lambda: [item.message_id for item in system.bus.dead_letters].count("by CC") == 1
            )
        with pytest.raises(RefusedError, match=REFUSED_TOPIC):
            await put(system, approvals, f"approve.{SCOPE}", decision, "by its key")
    finally:
        await asyncio.to_thread(node.ctl, "clear_topic_permissions", "drain", approvals)
    await leads_to_nothing(system, event)


# --- what is asked of the answer


async def test_nothing_is_sent_to_where_a_message_asks_for_a_reply(system: System) -> None:
    """The relay would write with its own rights wherever a stranger points.

    See docs/protocol.md#no-reply_to.
    """
    event, decision = await system.schedule_reboot()
    async with system.bus.channel() as channel:
        replies = await channel.declare_queue(exclusive=True)
        for number, reply_to in enumerate((replies.name, "amq.rabbitmq.reply-to.crafted")):
            await system.bus.send(
                {**decision, "decision": "hold"},
                f"reply {number}",
                reply_to=reply_to,
                correlation_id="x",
            )
            await system.bus.wait_for_event("approval.recorded", event, f"reply {number}")
        assert await replies.get(fail=False) is None


# --- what the log says


async def test_no_password_is_ever_told(
    system: System,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """While the consumer is accepted, disconnected and refused: in no log, file or event."""
    caplog.set_level(logging.DEBUG)
    node, secret = system.bus.broker, "hunter2 %ü@/:"
    await asyncio.to_thread(node.add_user, "rotated", secret)
    async with running_system(node, tmp_path, url=node.amqp_url("rotated")) as rotated:
        event, decision = await rotated.schedule_reboot()
        await rotated.bus.send(decision, "before")
        await rotated.bus.wait_for_event("approval.recorded", event)
        await asyncio.to_thread(node.ctl, "change_password", "rotated", "hunter3")
        await asyncio.to_thread(node.ctl, "close_all_user_connections", "rotated", "for rotation")
        await eventually(lambda: "refused user, password or certificate" in caplog.text)
        stored = await asyncio.to_thread(_all_of, tmp_path)
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err, stored, repr(rotated.bus.events)):
        for trace in ("hunter", quote(secret, safe=""), "%ü@"):
            assert trace not in text


def _all_of(directory: Path) -> str:
    return "".join(
        path.read_bytes().decode(errors="replace")
        for path in directory.rglob("*")
        if path.is_file()
    )
