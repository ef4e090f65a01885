"""Approvals that come over RabbitMQ, from publish to StartRequest, and those that must not; the broker is well."""

from __future__ import annotations

import functools
import struct
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
import pytest_asyncio

from relay.amqp.frames import LARGEST
from tests.journey.bus import SCOPE, Stage, define_users, stage
from tests.journey.process import eventually, name_of
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel, RefusedError, property_bytes, table

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there(_private_node: Broker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """One relay and one broker for all tests of this module: each has events and message ids of its own."""
    _private_node.heal()
    define_users(_private_node)
    async with stage(_private_node, tmp_path_factory.mktemp("relay")) as here:
        yield here


async def test_a_message_of_the_right_user_starts_the_event_and_is_answered(there: Stage) -> None:
    """Its answers name it as their cause, down to what Azure said; nothing is left in the queue."""
    event, wish = await there.wish()
    await there.bus.send({**wish, "reason": "drained"}, "right")
    await there.sim.approved(event, within=10)
    await there.bus.hears("startrequest.accepted", event)
    for name in ("approval.recorded", "approval.granted", "startrequest.accepted"):
        assert [one["causationid"] for one in there.bus.told(name, event)] == ["right"]
    data = there.bus.told("approval.recorded", event)[0]["data"]
    assert (data["principal"], data["channel"], data["reason"]) == ("client:drain", "amqp", "drained")
    assert (await there.bus.waiting())[0] == 0


async def test_a_repeat_gets_no_second_event_and_starts_nothing_again(there: Stage) -> None:
    """Bare or as the data of a CloudEvent; of what was accepted and of what was refused."""
    event, wish = await there.wish()
    cloud = {"specversion": "1.0", "id": "1", "type": "drained", "source": "/db", "data": wish}
    foreign, other = await there.wish(resources=("db-7",))
    for _ in range(3):
        await there.bus.send(cloud, "again")
        await there.bus.send(other, "again, refused")
    await there.sim.approved(event, within=10)
    await _all_before_is_decided(there)
    assert len(there.bus.told("approval.recorded", event)) == len(there.bus.told("approval.granted", event)) == 1
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
        (b" " * (LARGEST + 1), {}),
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
async def test_what_cannot_be_used_is_dead_lettered_and_is_no_event(there: Stage, body: bytes | None, properties: dict[str, Any]) -> None:
    """It starts nothing, is told to nobody, and stops nobody behind it."""
    event, wish = await there.wish()
    dead, said = len(there.bus.dead), len(there.bus.said)
    await there.bus.send(orjson.dumps(wish) if body is None else body, **{"message_id": "unusable", **properties})
    await eventually(lambda: len(there.bus.dead) == dead + 1)
    await _all_before_is_decided(there)
    assert [name_of(one) for one in there.bus.said[said:]] == ["approval.refused"]  # of the mark
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
    ids=["a time beyond all calendars", "an id that is not UTF-8", "such a time in a header", "such a name", "nested without end"],
)
async def test_properties_that_no_decoder_likes_do_not_end_the_connection(there: Stage, properties: bytes) -> None:
    """Given back with the connection, such a message would end the next one too, and so on: nobody could approve any more."""
    dead = len(there.bus.dead)
    async with RawChannel(there.bus.broker.amqp_url("drain")) as channel:
        await channel.publish(f"{there.bus.exchange}.approvals", f"approve.{SCOPE}", b"{}", properties)
    await eventually(lambda: len(there.bus.dead) == dead + 1)
    await _all_before_is_decided(there)


async def test_a_name_that_is_not_ones_own_is_refused_by_the_broker(there: Stage) -> None:
    """What makes the user_id worth something."""
    _, wish = await there.wish()
    with pytest.raises(
        RefusedError, match="406 PRECONDITION_FAILED - user_id property set to 'drain' but authenticated user was 'stranger'"
    ):
        await there.bus.send(wish, user="stranger", user_id="drain")
