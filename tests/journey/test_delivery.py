"""From Azure's document to queue and webhook, through kills and outages."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from relay.simulator import VM, Plan, Setup, Simulator
from tests.depth import depth
from tests.eventually import eventually
from tests.journey.bus import consumed
from tests.journey.relay_process import Inbox, inbox, name_of, rabbitmq, relay, told_relay, webhook
from tests.ports import reserve
from tests.rabbitmq import Broker

MANY = depth(1000, 150)


async def test_many_events_reach_queue_and_webhook_whole_and_in_order_through_kills(
    broker: Broker, exchange: str, tmp_path: Path
) -> None:
    """Four kills in the middle lose nothing.

    Every signature is valid, and the changes of each event arrive in order.
    """
    queue = Inbox()
    async with (
        inbox() as box,
        Simulator(Setup(vms=(VM("vm-0"),))) as sim,
        consumed(broker.amqp_url(), exchange, queue),
    ):
        sinks = [rabbitmq(broker.amqp_url(), exchange), webhook(box.url)]
        document = {"source": {"url": sim.url, "interval": "500ms"}, "sinks": sinks}
        async with relay(tmp_path / "relay", document) as process:
            await process.start()
            events = [sim.schedule(Plan(resources=("vm-0",), lasts=None)) for _ in range(MANY)]
            chance = random.Random(7)  # noqa: S311  # when to kill
            for goal in (MANY // 10, MANY // 2, MANY * 9 // 10):
                await eventually(lambda goal=goal: len(box.events) >= goal)
                await asyncio.sleep(chance.random() * 0.05)
                await process.kill()
                await process.start(ready=False)
            await eventually(lambda: len(box.by_subject()) == MANY)
            for event in events:
                sim.start(event)
            await eventually(lambda: any(one["type"].endswith("started.v1") for one in box.events))
            await process.kill()
            await process.start(ready=False)
            for event in events:
                sim.end(event)
            wanted = ["event.scheduled", "event.started", "event.ended"]

            for told in (box, queue):

                def is_whole(told: Inbox = told) -> bool:
                    stories = told.by_subject().values()
                    return len(stories) == MANY and all(
                        [name_of(one) for one in story] == wanted for story in stories
                    )

                await eventually(is_whole)
            assert box.forged == 0
            assert await process.stop() == 0
            assert len(process.journal()) >= 3 * MANY


async def test_what_is_down_at_the_start_is_waited_for(own_broker: Broker, tmp_path: Path) -> None:
    """Neither a broker nor a receiver is needed to start; both get everything when they come."""
    own_broker.stop()
    queue = Inbox()
    (port,) = reserve(1)
    async with Simulator(Setup(vms=(VM("vm-0"),))) as sim:
        late_webhook = webhook(f"http://127.0.0.1:{port}/")
        sinks = [rabbitmq(own_broker.amqp_url(), "journey.late"), late_webhook]
        document = {"source": {"url": sim.url}, "sinks": sinks}
        async with relay(tmp_path / "relay", document) as process:
            await process.start()
            event = sim.schedule(Plan(resources=("vm-0",), lasts=None))
            await eventually(lambda: "takes nothing" in process.log)
            own_broker.start()
            async with inbox(port) as late, consumed(own_broker.amqp_url(), "journey.late", queue):
                await eventually(lambda: "event.scheduled" in late.types_of(event.event_id))
                sim.start(event)
                await eventually(lambda: "event.started" in late.types_of(event.event_id))
                await eventually(
                    lambda: any(one["type"].endswith("started.v1") for one in queue.events)
                )
                assert await process.stop() == 0


async def test_what_ended_while_the_relay_was_down_is_told_without_a_guess(tmp_path: Path) -> None:
    """The previous document comes from the store; nobody watched, so the outcome is unknown."""
    async with told_relay(tmp_path) as (box, sim, process):
        event = sim.schedule(Plan(resources=("vm-0",), lasts=None))
        await eventually(lambda: box.types_of(event.event_id) == ["event.scheduled"])
        await process.kill()
        sim.cancel(event)
        await process.start()
        await eventually(lambda: box.types_of(event.event_id) == ["event.scheduled", "event.ended"])
        ended = box.events[-1]["data"]
        assert (ended["outcome"], ended["evidence"]) == ("unknown", "none")


async def test_sigterm_ends_it_within_ten_seconds_though_a_receiver_hangs(tmp_path: Path) -> None:
    """An undelivered event waits in the store. The next start sends it under the same id."""
    async with told_relay(tmp_path) as (box, sim, process):
        box.status = 503
        event = sim.schedule(Plan(resources=("vm-0",), lasts=None))
        await eventually(lambda: "takes nothing" in process.log)
        assert await process.stop() == 0
        box.status = 204
        await process.start()
        await eventually(lambda: box.types_of(event.event_id) == ["event.scheduled"])
