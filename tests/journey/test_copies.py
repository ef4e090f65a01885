"""One approval that comes two hundred times at once, through every door: one StartRequest."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import orjson
from pamqp.commands import Basic

from tests.eventually import eventually
from tests.journey.bus import KEY as ROUTING_KEY
from tests.journey.bus import define_users, running_system
from tests.journey.relay_process import CLIENT_SECRET, KEY, client, signed_headers
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel
from tests.store.open_store import read_journal

COPIES = 200


async def test_two_hundred_copies_over_http_callbacks_and_amqp_are_one_start_request(
    own_broker: Broker, tmp_path: Path
) -> None:
    """A third over each channel. Each HTTP and AMQP copy has an id of its own: none is a repeat."""
    define_users(own_broker)
    clients = [
        client("drain", amqp_user="drain", secrets=[CLIENT_SECRET]),
        client("watcher", key="another-key-for-tests-only"),
        client("operator", key="a-third-key-for-tests-only"),
    ]
    async with (
        running_system(own_broker, tmp_path, clients=clients) as system,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        RawChannel(own_broker.amqp_url("drain")) as channel,
    ):
        event, decision = await system.schedule_reboot(starts_after=30.0)
        url = f"http://127.0.0.1:{system.running.server.port}/v1"
        body, json = orjson.dumps(decision), {"Content-Type": "application/json"}
        bearer, signed = {"Authorization": f"Bearer {KEY}"}, signed_headers(body)
        statuses: Counter[int] = Counter()

        async def post(path: str, headers: dict[str, str]) -> None:
            async with session.post(f"{url}/{path}", data=body, headers=headers) as answer:
                statuses[answer.status] += 1

        async def publish() -> None:
            for number in range(COPIES // 3):
                properties = Basic.Properties(
                    message_id=f"copy-{number}", user_id="drain", delivery_mode=2
                )
                await channel.publish(system.bus.approvals_exchange, ROUTING_KEY, body, properties)

        async with asyncio.TaskGroup() as group:
            group.create_task(publish())
            for number in range(COPIES // 3 + 1):
                own = {"Idempotency-Key": f"copy-{number}"}
                group.create_task(post("approvals", json | bearer | own))
                group.create_task(post("callbacks/drain", json | signed))
        await system.sim.wait_until_approved(event, within=60)
        await eventually(system.is_idle, every=0.1)
        assert sum(statuses.values()) + COPIES // 3 == COPIES
        # 429: that many at once are too many of one client.
        assert statuses.keys() <= {202, 409, 429}
        assert system.starts(event) == 1
    kinds = Counter(row.kind for row in read_journal(tmp_path / "relay.db"))
    assert (kinds["approval.granted"], kinds["claim"], kinds["startrequest.accepted"]) == (1, 1, 1)
