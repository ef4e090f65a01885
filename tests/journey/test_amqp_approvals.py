"""Approvals that come over RabbitMQ, from publish to StartRequest, and those that must not; the broker is well."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
import pytest_asyncio
from pamqp.common import Arguments

from relay.amqp.approval_consumer import PREFETCH
from relay.amqp.frames import MAX_BODY_BYTES
from relay.simulator import Event
from tests.journey.bus import SCOPE, Stage, define_users, stage
from tests.journey.relay_process import eventually, name_of
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel, RefusedError, property_bytes, table

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there(
    _private_node: Broker, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    """One relay and one broker for all tests of this module: each has events and message ids of its own."""
    _private_node.heal()
    define_users(_private_node)
    async with stage(_private_node, tmp_path_factory.mktemp("relay")) as here:
        await here.prepare(12)
        yield here


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def coming(there: Stage) -> tuple[Event, dict[str, Any]]:
    """A reboot that no test of this module starts, and the wish to approve it."""
    return await there.wish()


async def test_a_message_of_the_right_user_starts_the_event_and_is_answered(there: Stage) -> None:
    """Its answers name it as their cause, down to what Azure said; nothing is left in the queue."""
    event, wish = await there.wish()
    await there.bus.send({**wish, "reason": "drained"}, "right")
    await there.sim.approved(event, within=60)
    await there.bus.hears("startrequest.accepted", event)
    for name in ("approval.recorded", "approval.granted", "startrequest.accepted"):
        assert [one["causationid"] for one in there.bus.told(name, event)] == ["right"]
    data = there.bus.told("approval.recorded", event)[0]["data"]
    assert (data["principal"], data["channel"], data["reason"]) == (
        "client:drain",
        "amqp",
        "drained",
    )
    assert (await there.bus.waiting())[0] == 0


async def test_a_repeat_gets_no_second_event_and_starts_nothing_again(there: Stage) -> None:
    """Bare or as the data of a CloudEvent; of what was accepted and of what was refused."""
    event, wish = await there.wish()
    cloud = {"specversion": "1.0", "id": "1", "type": "drained", "source": "/db", "data": wish}
    foreign, other = await there.wish(resources=("db-7",))
    for _ in range(3):
        await there.bus.send(cloud, "again")
        await there.bus.send(other, "again, refused")
    await there.sim.approved(event, within=60)
    await _all_before_is_decided(there)
    assert (
        len(there.bus.told("approval.recorded", event))
        == len(there.bus.told("approval.granted", event))
        == 1
    )
    assert len(there.bus.told("approval.refused", foreign)) == 1
    assert (there.starts(event), there.starts(foreign)) == (1, 0)


async def _all_before_is_decided(there: Stage) -> None:
    """The queue is first in, first out: once this one is answered, all that came before it has been decided."""
    mark = f"mark {len(there.bus.said)}"
    await there.bus.send({"eventId": "none", "decision": "approve", "revision": "none"}, mark)
    await there.bus.hears("approval.refused", cause=mark)


_TIMESTAMP, _MESSAGE_ID, _HEADERS = 6, 7, 13  # bits of the flags (AMQP 0-9-1, class basic)
_NESTED: bytes = functools.reduce(lambda inner, _: b"\x01nF" + table(inner), range(1500), b"")


@pytest.mark.parametrize(
    ("body", "properties"),
    [
        (None, {"user_id": None}),
        (None, {"user": "stranger"}),
        (None, {"message_id": None}),
        (None, {"message_id": "line\nfeed"}),
        (None, {"key": "approve.elsewhere", "headers": {"CC": [f"approve.{SCOPE}"]}}),
        (None, {"key": "approve.elsewhere", "headers": {"BCC": [f"approve.{SCOPE}"]}}),
        (b"", {}),
        (b"no json", {}),
        (b"[]", {}),
        (b'{"eventId": "x", "decision": "approve"}', {}),
        (b'{"specversion": "1.0", "id": "1", "type": "t", "source": "s"}', {}),
        (b'{"eventId": "x", "decision": "deny", "revision": "r"}', {}),
        (b" " * (MAX_BODY_BYTES + 1), {}),
        (b"\x1f\x8b\x08\x00", {"content_encoding": "gzip"}),
    ],
    ids=[
        "no user_id",
        "a user who is no client",
        "no message_id",
        "a message_id that no answer could name",
        "routed by CC",
        "routed by BCC",
        "no body",
        "not JSON",
        "no object",
        "no revision",
        "a CloudEvent without data",
        "no such decision",
        "too large",
        "compressed",
    ],
)
async def test_what_cannot_be_used_is_dead_lettered_and_is_no_event(
    there: Stage,
    coming: tuple[Event, dict[str, Any]],
    body: bytes | None,
    properties: dict[str, Any],
) -> None:
    """It starts nothing, is told to nobody, and stops nobody behind it."""
    event, wish = coming
    dead, said = len(there.bus.dead), len(there.bus.said)
    await there.bus.send(
        orjson.dumps(wish) if body is None else body, **{"message_id": "unusable", **properties}
    )
    await eventually(lambda: len(there.bus.dead) == dead + 1)
    await _all_before_is_decided(there)
    told = [name_of(one) for one in there.bus.said[said:] if name_of(one).startswith("approval.")]
    assert told == ["approval.refused"]  # of the mark
    assert not there.starts(event)
    assert len(there.bus.dead) == dead + 1


@pytest.mark.parametrize(
    "properties",
    [
        property_bytes(_TIMESTAMP, b"\x7f" + b"\xff" * 7),
        property_bytes(_MESSAGE_ID, b"\x02\xff\xfe"),
        property_bytes(_HEADERS, table(b"\x01tT" + b"\x7f" + b"\xff" * 7)),
        property_bytes(_HEADERS, table(b"\x01\xffI\0\0\0\1")),
        property_bytes(_HEADERS, table(_NESTED)),
    ],
    ids=[
        "a time beyond all calendars",
        "an id that is not UTF-8",
        "such a time in a header",
        "such a name",
        "nested without end",
    ],
)
async def test_properties_that_no_decoder_likes_do_not_end_the_connection(
    there: Stage, properties: bytes
) -> None:
    """Given back with the connection, such a message would end the next one too, and so on: nobody could approve any more."""
    dead = len(there.bus.dead)
    async with RawChannel(there.bus.broker.amqp_url("drain")) as channel:
        await channel.publish(
            f"{there.bus.exchange}.approvals", f"approve.{SCOPE}", b"{}", properties
        )
    await eventually(lambda: len(there.bus.dead) == dead + 1)
    await _all_before_is_decided(there)


async def test_a_name_that_is_not_ones_own_is_refused_by_the_broker(
    there: Stage, coming: tuple[Event, dict[str, Any]]
) -> None:
    """What makes the user_id worth something."""
    _, wish = coming
    with pytest.raises(
        RefusedError,
        match="406 PRECONDITION_FAILED - user_id property set to 'drain' but authenticated user was 'stranger'",
    ):
        await there.bus.send(wish, user="stranger", user_id="drain")


async def test_whoever_may_pretend_to_be_anybody_speaks_for_anybody(there: Stage) -> None:
    """The tag `impersonator` takes the user_id's worth away: the broker vouches, and nobody can know. Give it to no one."""
    event, wish = await there.wish()
    await there.bus.send(wish, "pretended", user="pretender", user_id="drain")
    recorded = await there.bus.hears("approval.recorded", event)
    assert recorded["data"]["principal"] == "client:drain"


# --- refused to a known client: acknowledged, told, and nothing else


async def refusal(there: Stage, wish: dict[str, Any], message_id: str, **properties: Any) -> str:
    """Send, and return why it was refused; the message is gone then, and not buried."""
    dead = len(there.bus.dead)
    await there.bus.send(wish, message_id, **properties)
    told = await there.bus.hears("approval.refused", cause=message_id)
    await _all_before_is_decided(there)
    assert (await there.bus.waiting())[0] == 0
    assert len(there.bus.dead) == dead
    assert told["subject"] == wish["eventId"]
    return str(told["data"]["refusal"])


async def test_for_a_machine_that_is_not_its_own(there: Stage) -> None:
    """Every resource must be the client's: approving frees all of them."""
    event, wish = await there.wish(resources=("vm-0", "db-7"))
    assert "you may not decide for" in await refusal(there, wish, "foreign")
    assert not there.starts(event)


async def test_without_the_right(there: Stage, coming: tuple[Event, dict[str, Any]]) -> None:
    event, wish = coming
    assert "it is not in your rights" in await refusal(there, wish, "may only read", user="watcher")
    assert not there.starts(event)


async def test_too_late(there: Stage) -> None:
    """NotBefore has passed while the message was on its way."""
    event, wish = await there.wish(notice=1.2, starts_after=600.0)
    await eventually(lambda: datetime.now(UTC) > there.sim.event(event).not_before)
    assert "too late: it closed at" in await refusal(there, wish, "late")
    assert not there.starts(event)


async def test_of_a_state_that_has_changed(there: Stage) -> None:
    event, wish = await there.wish()
    there.sim.update(event, resources=("vm-0", "vm-1"))
    updated = await there.bus.hears("event.updated", event)
    assert updated["data"]["revision"] in await refusal(there, wish, "outdated")
    assert not there.starts(event)


async def test_of_an_event_that_nobody_knows_or_of_another_scope(
    there: Stage, coming: tuple[Event, dict[str, Any]]
) -> None:
    _, wish = coming
    assert "no such event" in await refusal(there, {**wish, "eventId": "never heard of"}, "unknown")
    assert "no such event" in await refusal(there, {**wish, "scope": "elsewhere"}, "another scope")


async def test_under_an_id_that_came_with_another_body(there: Stage) -> None:
    event, wish = await there.wish()
    other, another = await there.wish()
    await there.bus.send(wish, "twice")
    await there.bus.hears("approval.recorded", event, "twice")
    assert "this id came before with another body" in await refusal(there, another, "twice")
    assert not there.starts(other)
    assert not there.bus.told("approval.recorded", other)


# --- hold and release


async def test_a_hold_keeps_a_vote_back_until_its_release_which_is_then_the_cause(
    there: Stage,
) -> None:
    event, wish = await there.wish()
    for message_id, decision in (("held", "hold"), ("voted", "approve")):
        await there.bus.send({**wish, "decision": decision}, message_id)
        await there.bus.hears("approval.recorded", event, message_id)
    assert not there.bus.told("approval.granted", event)
    await there.bus.send({**wish, "decision": "release"}, "released")
    for name in ("approval.recorded", "approval.granted"):
        await there.bus.hears(name, event, "released")


# --- how it consumes


async def test_it_comes_on_a_connection_of_its_own_with_a_limit_and_alone(there: Stage) -> None:
    """A memory alarm blocks connections that publish; a consumer that publishes would be blocked with them."""
    columns = ("queue_name", "consumer_tag", "ack_required", "prefetch_count", "active")
    said = await asyncio.to_thread(there.bus.broker.ctl, "list_consumers", *columns)
    (consumer,) = [
        line.split("\t") for line in said.splitlines() if line.startswith(there.bus.queue + "\t")
    ]
    assert consumer == [there.bus.queue, "imds-relay vm-0", "true", str(PREFETCH), "true"]
    names = await asyncio.to_thread(there.bus.broker.ctl, "list_connections", "client_properties")
    assert names.count('"imds-relay approvals of journey at vm-0"') == 1
    assert names.count('"imds-relay bus"') == 1
    waiting: Arguments = {
        "x-queue-type": "quorum",
        "x-single-active-consumer": True,
        "x-dead-letter-exchange": f"{there.bus.exchange}.dlx",
    }
    async with (
        there.bus.channel() as channel
    ):  # declaring the same once more is allowed with equal arguments alone
        await channel.declare_queue(there.bus.queue, durable=True, arguments=waiting)
        await channel.declare_exchange(f"{there.bus.exchange}.approvals", "topic", durable=True)
        await channel.declare_exchange(f"{there.bus.exchange}.dlx", "topic", durable=True)
        dead: Arguments = {"x-queue-type": "quorum", "x-max-length": 10_000}
        await channel.declare_queue(f"{there.bus.exchange}.dead", durable=True, arguments=dead)


async def test_while_approvals_are_off_messages_wait_in_the_queue(there: Stage) -> None:
    """Another relay, which is on, may have them meanwhile: this one does not consume. Then the waiting one counts, once."""
    event, wish = await there.wish()
    await there.running.relay.gate.set_mode("off", "local:tester")
    await eventually(there.is_not_consuming, every=0.1)
    await there.bus.send(wish, "early")
    await there.running.relay.gate.set_mode("on", "local:tester")
    await there.bus.hears("approval.granted", event, "early")
    assert len(there.bus.told("approval.recorded", event)) == 1
    assert (await there.bus.waiting())[0] == 0


async def test_in_a_dry_run_everything_happens_but_the_start(there: Stage) -> None:
    event, wish = await there.wish()
    await there.running.relay.gate.set_mode("dry-run", "local:tester")
    try:
        await there.bus.send(wish, "dry")
        granted = await there.bus.hears("approval.granted", event, "dry")
        assert granted["data"]["dryRun"] is True
    finally:
        await there.running.relay.gate.set_mode("on", "local:tester")
    await _all_before_is_decided(there)
    assert not there.starts(event)
