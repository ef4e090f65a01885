"""A client that is refused hundreds of times: what the journal and a receiver get of it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp

from relay.simulator import VM, Setup, Simulator
from relay.store.file import open_for_reading
from tests.journey.relay_process import KEY, client, inbox, name_of, relay, webhook

REFUSALS = 40


async def test_an_orderly_stop_records_and_delivers_the_counted_refusals(tmp_path: Path) -> None:
    body = {"eventId": "none", "decision": "approve", "revision": "x"}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with Simulator(Setup(vms=(VM("vm-0"),))) as sim, inbox() as box:
        document = {
            "source": {"url": sim.url},
            "sinks": [webhook(box.url)],
            "api": {"clients": [client()]},
        }
        async with relay(tmp_path, document) as process:
            await process.start()
            async with aiohttp.ClientSession(headers=headers) as session:

                async def refuse() -> int:
                    url = f"{process.url}/v1/approvals"
                    async with session.post(url, json=body) as response:
                        return response.status

                answers = await asyncio.gather(*(refuse() for _ in range(REFUSALS)))
            assert set(answers) == {404}
            assert await process.stop() == 0
        refused = [event for event in box.events if name_of(event) == "approval.refused"]
        counts = {event["id"]: event["data"].get("count") for event in refused}
        assert list(counts.values()) == [None] * 10 + [REFUSALS - 10]
    with contextlib.closing(open_for_reading(process.store)) as reader:
        query = "SELECT count(*) FROM journal WHERE kind = 'approval.refused'"
        assert reader.execute(query).fetchone() == (11,)
