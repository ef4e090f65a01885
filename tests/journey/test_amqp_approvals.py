"""Approvals over a healthy RabbitMQ, from publish to StartRequest, and refused ones."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from pamqp.common import Arguments

from relay.amqp.approval_consumer import PREFETCH
from relay.amqp.connection import MAX_BODY_BYTES
from relay.simulator import Event
from tests.eventually import eventually
from tests.journey.bus import KEY, SCOPE, System, define_users, running_system
from tests.journey.relay_process import name_of
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel, RefusedError, property_bytes, table

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(_node: Broker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """One relay and broker for all tests of this module, which use different events and ids."""
    _node.heal()
    define_users(_node)
    async with running_system(_node, tmp_path_factory.mktemp("relay")) as system:
        await system.schedule_reboots(16)
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def coming(system: System) -> tuple[Event, dict[str, Any]]:
    """A reboot that no test of this module starts, and the decision that approves it."""
    return await system.schedule_reboot()


async def test_a_message_of_the_right_user_starts_the_event_and_is_answered(system: System) -> None:
    """Its answers name it as their cause, down to what Azure said; nothing is left in the queue."""
    event, decision = await system.schedule_reboot()
    await system.bus.send({**decision, "reason": "drained", "ticket": "CHG-7"}, "right")
    await system.sim.wait_until_approved(event, within=60)
    await system.bus.wait_for_event("startrequest.accepted", event)
    for name in ("approval.recorded", "approval.granted", "startrequest.accepted"):
        assert [event["causationid"] for event in system.bus.events_of_type(name, event)] == [
            "right"
        ]
    data = system.bus.events_of_type("approval.recorded", event)[0]["data"]
    said = [data[name] for name in ("principal", "channel", "reason", "ticket")]
    assert said == ["client:drain", "amqp", "drained", "CHG-7"]
    assert (await system.bus.waiting())[0] == 0


async def test_a_repeat_gets_no_second_event_and_starts_nothing_again(system: System) -> None:
    """Bare or as the data of a CloudEvent; of what was accepted, and of what was refused.

    What is refused to a known client is told and acknowledged. Every resource must be the client's.
    """
    event, decision = await system.schedule_reboot()
    cloud = {"specversion": "1.0", "id": "1", "type": "drained", "source": "/db", "data": decision}
    foreign, other = await system.schedule_reboot(resources=("vm-0", "db-7"))
    dead_letter_count = len(system.bus.dead_letters)
    for _ in range(3):
        await system.bus.send(cloud, "again")
        await system.bus.send(other, "again, refused")
    await system.sim.wait_until_approved(event, within=60)
    await system.wait_until_earlier_are_decided()
    for name in ("approval.recorded", "approval.granted"):
        assert len(system.bus.events_of_type(name, event)) == 1
    refusals = system.bus.events_of_type("approval.refused", foreign, "again, refused")
    assert len(refusals) == 3  # each is judged again
    assert "you may not decide for db-7" in refusals[0]["data"]["refusal"]
    assert (system.starts(event), system.starts(foreign)) == (1, 0)
    assert ((await system.bus.waiting())[0], len(system.bus.dead_letters)) == (0, dead_letter_count)


_HEADERS = 13  # a bit of the flags (AMQP 0-9-1, class basic)
_NESTED: bytes = functools.reduce(lambda inner, _: b"\x01nF" + table(inner), range(1500), b"")


async def test_what_cannot_be_used_is_dead_lettered_and_is_no_event(
    system: System, coming: tuple[Event, dict[str, Any]]
) -> None:
    """It starts nothing, is told to nobody, and stops nobody behind it.

    Back in the queue, the last would end each next connection: nobody could approve.
    """
    event, decision = coming
    dead_letter_count, event_count = len(system.bus.dead_letters), len(system.bus.events)
    await system.bus.send(decision, user="watcher")
    await system.bus.send(b"no json")
    await system.bus.send(b" " * (MAX_BODY_BYTES + 1))
    async with RawChannel(system.bus.broker.amqp_url("drain")) as channel:
        await channel.publish(
            system.bus.approvals_exchange, KEY, b"{}", property_bytes(_HEADERS, table(_NESTED))
        )
    await eventually(lambda: len(system.bus.dead_letters) == dead_letter_count + 4)
    await system.wait_until_earlier_are_decided()
    told = [name_of(each) for each in system.bus.events[event_count:]]
    assert [name for name in told if name.startswith("approval.")] == [
        "approval.refused"  # of the mark
    ]
    assert not system.starts(event)
    assert len(system.bus.dead_letters) == dead_letter_count + 4


async def test_whoever_may_pretend_to_be_anybody_speaks_for_anybody(system: System) -> None:
    """The tag `impersonator` lets a user set any user_id, so no user may have it."""
    event, decision = await system.schedule_reboot()
    await system.bus.send(decision, "pretended", user="pretender", user_id="drain")
    recorded = await system.bus.wait_for_event("approval.recorded", event)
    assert recorded["data"]["principal"] == "client:drain"


# --- hold and release


async def test_a_hold_keeps_votes_back_until_its_release_which_is_the_cause(system: System) -> None:
    event, decision = await system.schedule_reboot()
    for message_id, kind in (("held", "hold"), ("voted", "approve")):
        await system.bus.send({**decision, "decision": kind}, message_id)
        await system.bus.wait_for_event("approval.recorded", event, message_id)
    assert not system.bus.events_of_type("approval.granted", event)
    await system.bus.send({**decision, "decision": "release"}, "released")
    for name in ("approval.recorded", "approval.granted"):
        await system.bus.wait_for_event(name, event, "released")


# --- how it consumes


async def test_it_comes_on_a_connection_of_its_own_with_a_limit_and_alone(system: System) -> None:
    """A memory alarm blocks connections that publish. It would block a consumer that publishes."""
    columns = ("queue_name", "consumer_tag", "ack_required", "prefetch_count", "active")
    consumers = await asyncio.to_thread(system.bus.broker.ctl, "list_consumers", *columns)
    (consumer,) = [
        line.split("\t")
        for line in consumers.splitlines()
        if line.startswith(system.bus.queue + "\t")
    ]
    assert consumer == [system.bus.queue, "imds-relay vm-0", "true", str(PREFETCH), "true"]
    names = await asyncio.to_thread(system.bus.broker.ctl, "list_connections", "client_properties")
    assert names.count('"imds-relay approvals of journey at vm-0"') == 1
    assert names.count('"imds-relay bus"') == 1


# --- what somebody tries who knows RabbitMQ well


REFUSED_TOPIC = re.compile("403 ACCESS_REFUSED - (write )?access to topic 'approve.")


async def is_buried(system: System, message_id: str) -> None:
    await eventually(
        lambda: [item.message_id for item in system.bus.dead_letters].count(message_id) == 1
    )


async def leads_to_nothing(system: System, event: Event) -> None:
    """It starts nothing and is told to nobody."""
    await system.wait_until_earlier_are_decided()
    assert not [
        item
        for item in system.bus.events
        if item["subject"] == event.event_id and name_of(item).startswith("approval.")
    ]
    assert not system.starts(event)


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
        await system.bus.send(decision, "by dead letter", exchange="", key=trap)
        await is_buried(system, "by dead letter")
        await channel.queue_delete(trap)
    await leads_to_nothing(system, event)


async def test_a_topic_permission_for_another_scope_gives_no_way_here(system: System) -> None:
    """The broker refuses the key, but some versions accept it in a CC header. The relay never."""
    event, decision = await system.schedule_reboot()
    node, approvals = system.bus.broker, system.bus.approvals_exchange
    await asyncio.to_thread(
        node.ctl, "set_topic_permissions", "drain", approvals, "^approve\\.elsewhere$", "^$"
    )
    try:
        try:
            await system.bus.send(
                decision, "by CC", key="approve.elsewhere", headers={"CC": [f"approve.{SCOPE}"]}
            )
        except RefusedError as error:
            assert REFUSED_TOPIC.match(str(error))  # noqa: PT017  # accepting the key is as good
        else:
            await is_buried(system, "by CC")
        with pytest.raises(RefusedError, match=REFUSED_TOPIC):
            await system.bus.send(decision, "by its key")
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
        hold = {**decision, "decision": "hold"}
        for number, reply_to in enumerate((replies.name, "amq.rabbitmq.reply-to.crafted")):
            place = {"reply_to": reply_to, "correlation_id": "x"}
            await system.bus.send(hold, f"reply {number}", **place)
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
