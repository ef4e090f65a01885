"""One client floods the queue of approvals: nobody else waits for long, and little is written.

`make chaos-tests` sends 20,000 messages, `make test` 2,000.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from yarl import URL

from relay.amqp import approval_consumer
from relay.amqp.approval_consumer import (
    CLIENT_BURST,
    MESSAGES_AT_ONCE,
    ApprovalConsumer,
    ApprovalHandler,
    ReceivedDecision,
    UnparsedApprovalMessage,
)
from relay.amqp.topology import MAX_APPROVALS, approvals_queue
from relay.clock import CALLER_RATE, SystemClock
from tests.background_tasks import BackgroundTasks
from tests.depth import depth
from tests.eventually import eventually
from tests.journey.bus import SCOPE, Bus, System, define_users, running_system, unused_exchange
from tests.rabbitmq import Broker
from tests.store.open_store import read_column

MESSAGES = depth(20_000, 2_000)


@pytest.fixture(scope="module")
def node(_node: Broker) -> Broker:
    _node.heal()
    define_users(_node)
    return _node


def refused(system: System) -> int:
    """How many messages the relay has refused, also without an event."""
    query = "SELECT count(*) FROM journal WHERE kind = 'approval.refused'"
    (recorded,) = read_column(system.config.store.path, query)
    return int(recorded) + system.running.relay.gate.engine.unrecorded_refusals.total()


@pytest.mark.timeout(300)
async def test_a_hold_behind_a_flood_of_others_is_decided(node: Broker, tmp_path: Path) -> None:
    """What is over the limit of its client is dead-lettered, and not told."""
    async with running_system(node, tmp_path) as system:
        _, vote = await system.schedule_reboot()
        event, decision = await system.schedule_reboot(resources=("vm-1",))
        began = time.monotonic()
        flood = (f"flood {number}" for number in range(MESSAGES))
        full = await system.bus.send_all({**vote, "revision": "of yesterday"}, flood, user="drain")
        hold = {**decision, "decision": "hold"}

        async def is_taken() -> bool:
            return not await system.bus.send_all(hold, ["held"], user="holder")

        await eventually(is_taken, every=0.02)
        await system.bus.wait_for_event("approval.recorded", event, "held")
        assert refused(system) <= allowed_since(began)
        await eventually(lambda: len(system.bus.dead_letters) >= MESSAGES - full - refused(system))
        assert refused(system) <= allowed_since(began)


def consumer_of(
    node: Broker, bus: Bus, handler: ApprovalHandler, unusable: list[str]
) -> ApprovalConsumer:
    """A consumer without a relay around it."""
    return ApprovalConsumer(
        urls=lambda: [URL(node.amqp_url())],
        declare=True,
        queue=approvals_queue(bus.exchange, SCOPE),
        relay="vm-0",
        handler=handler,
        on_unusable=lambda _, reason: unusable.append(reason),
        clock=SystemClock(),
    )


async def bus_with_queue(node: Broker) -> Bus:
    """Exchanges and queues without a relay."""
    bus = Bus(node, unused_exchange())
    await bus.make()
    return bus


@dataclass(slots=True)
class Handler:
    """Reads the decision in the first word of the message_id. Records what runs together."""

    may_decide: asyncio.Event = field(default_factory=asyncio.Event)
    blocked: str | None = None
    is_writable: bool = True
    submitted: list[str] = field(default_factory=list)
    under_way: list[str] = field(default_factory=list)
    together: list[list[str]] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)

    async def blocking_reason(self) -> str | None:
        return self.blocked

    def read(self, message: UnparsedApprovalMessage) -> ReceivedDecision:
        decision = message.message_id.split()[0]

        async def decide() -> bool:
            self.submitted.append(message.message_id)
            self.under_way.append(decision)
            await self.may_decide.wait()
            await asyncio.sleep(0)  # what is submitted together is under way now
            if self.under_way:
                self.together.append(self.under_way)
                self.under_way = []
            if self.is_writable:
                self.decided.append(message.message_id)
            return self.is_writable

        return ReceivedDecision(
            user=message.user,
            decision=decision,  # type: ignore[arg-type]  # the tests name decisions
            decide=decide,
        )


async def test_messages_that_wait_are_submitted_together_in_order_and_by_kind(node: Broker) -> None:
    """Otherwise a hold waits for a commit of each hold and each release before it.

    If some cannot be recorded at first, no release may end a newer hold.
    """
    bus = await bus_with_queue(node)
    kinds = (*["approve"] * 100, *["hold"] * 3, "release", "hold", *["approve"] * 40)
    ids = [f"{kind} {number}" for number, kind in enumerate(kinds)]
    await bus.send_all({"eventId": "e"}, ids[:70], user="holder")
    await bus.send_all({"eventId": "e"}, ids[70:], user="drain")
    handler = Handler()
    async with BackgroundTasks(consumer_of(node, bus, handler, []).run()):

        async def is_taken() -> bool:
            return (await bus.waiting())[0] == 0

        await eventually(is_taken)
        handler.may_decide.set()
        await eventually(lambda: len(handler.decided) == len(ids))
    assert handler.submitted == ids
    assert all(len(set(kinds)) == 1 for kinds in handler.together)
    assert 1 < max(map(len, handler.together)) <= MESSAGES_AT_ONCE


async def test_a_hold_behind_a_backlog_of_votes_of_its_own_client_is_decided(node: Broker) -> None:
    """More votes waited, while approvals were off, than the client may have decided at once."""
    bus, unusable = await bus_with_queue(node), list[str]()
    votes = [f"approve {number}" for number in range(CLIENT_BURST + 100)]
    await bus.send_all({"eventId": "e"}, [*votes, "hold it"], user="drain")
    handler = Handler()
    handler.may_decide.set()
    async with BackgroundTasks(consumer_of(node, bus, handler, unusable).run()):
        await eventually(lambda: "hold it" in handler.decided)
    assert unusable


async def test_what_returned_to_the_queue_is_decided_within_the_rate_that_it_paid(
    node: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be recorded while messages wait in the relay: the broker gets them back."""
    bus, unusable = await bus_with_queue(node), list[str]()
    ids = [f"approve {number}" for number in range(CLIENT_BURST)]
    await bus.send_all({"eventId": "e"}, ids, user="drain")
    handler = Handler(is_writable=False)
    handler.may_decide.set()
    consumer = consumer_of(node, bus, handler, unusable)
    monkeypatch.setattr(approval_consumer, "POLL_INTERVAL", 0.05)
    async with BackgroundTasks(consumer.run()):
        await eventually(lambda: len(handler.submitted) >= MESSAGES_AT_ONCE)
        handler.blocked = "the state file cannot be written"

        async def has_returned() -> bool:
            return (await bus.waiting())[0] == len(ids)

        await eventually(has_returned)
        handler.blocked, handler.is_writable = None, True
        await eventually(lambda: len(handler.decided) >= len(ids))
    assert handler.decided == ids
    assert not unusable


def allowed_since(began: float) -> float:
    return CLIENT_BURST + CALLER_RATE * (time.monotonic() - began) + 1


async def test_the_broker_refuses_more_than_the_queue_may_hold(node: Broker) -> None:
    """What the broker took is not lost."""
    bus = await bus_with_queue(node)
    ids = [f"waits {number}" for number in range(MAX_APPROVALS + 500)]
    refused_by_broker = await bus.send_all({"eventId": "none"}, ids, user="drain")
    assert 0 < refused_by_broker <= 500
    waiting, _ = await bus.waiting()
    assert waiting == len(ids) - refused_by_broker
