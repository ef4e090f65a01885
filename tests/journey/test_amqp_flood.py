"""One client floods the queue of approvals: nobody else waits, and little is written.

`make chaos-tests` sends 20,000 messages, `make test` 2,000.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp
import pytest
from yarl import URL

from relay.amqp.approval_consumer import (
    MAX_WAITING,
    URGENT_AT_ONCE,
    VOTES_AT_ONCE,
    ApprovalConsumer,
    ApprovalHandler,
)
from relay.amqp.fair_queue import ReceivedDecision
from relay.amqp.message_verification import UnparsedApprovalMessage
from relay.amqp.topology import (
    MAX_APPROVALS,
    approvals_topology,
    declare_topology,
    describe_approvals_queue_of_scope,
)
from relay.clock import SystemClock
from relay.rate_limits import CALLER_BURST, CALLER_RATE
from tests import documented
from tests.background_tasks import BackgroundTasks
from tests.depth import depth
from tests.eventually import eventually
from tests.journey.bus import SCOPE, Bus, System, define_users, running_system, unused_exchange
from tests.rabbitmq import Broker
from tests.store.open_store import read_column

MESSAGES = depth(20_000, 2_000)


@pytest.fixture(scope="module")
def node(_node: Broker) -> Broker:
    """A broker with the users of these tests."""
    _node.heal()
    define_users(_node)
    return _node


def refused(system: System) -> int:
    """How many messages the relay has refused, also without an event."""
    query = "SELECT count(*) FROM journal WHERE kind = 'approval.refused'"
    (recorded,) = read_column(system.config.store.path, query)
    return int(recorded) + system.running.relay.gate.engine.unrecorded_refusals.total()


@pytest.mark.timeout(300)
async def test_a_hold_behind_a_flood_of_another_client_is_decided_before_the_flood(
    node: Broker, tmp_path: Path
) -> None:
    """The flood is limited as over HTTP: what is over the limit is dead-lettered, and not told."""
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
        excess = MESSAGES - full - MAX_WAITING - refused(system)
        await eventually(lambda: len(system.bus.dead_letters) >= excess)
        assert refused(system) <= allowed_since(began)


def consumer_of(node: Broker, bus: Bus, handler: ApprovalHandler) -> ApprovalConsumer:
    """A consumer without a relay around it."""
    return ApprovalConsumer(
        urls=lambda: [URL(node.amqp_url())],
        declare=True,
        queue=describe_approvals_queue_of_scope(bus.exchange, SCOPE),
        relay="vm-0",
        handler=handler,
        on_unusable=lambda *_: None,
        clock=SystemClock(),
    )


@dataclass(slots=True)
class SlowHandler:
    """Decides nothing before all messages were read; counts the decisions under way."""

    messages: int
    decision: Literal["approve", "hold", "release"]
    read_messages: int = 0
    submitted: list[str] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    decided: int = 0

    async def blocking_reason(self) -> str | None:
        return None

    def read(self, message: UnparsedApprovalMessage) -> ReceivedDecision:
        self.read_messages += 1

        async def decide() -> bool:
            self.submitted.append(message.message_id)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            await eventually(lambda: self.read_messages == self.messages)
            await asyncio.sleep(0)
            self.under_way -= 1
            self.decided += 1
            return True

        return ReceivedDecision(
            user=message.user, decision=self.decision, scope=None, event_id="e", decide=decide
        )


@pytest.mark.parametrize(
    ("decision", "most"), [("hold", URGENT_AT_ONCE), ("approve", VOTES_AT_ONCE)]
)
async def test_messages_that_wait_together_are_submitted_together_and_in_order(
    node: Broker, decision: Literal["approve", "hold", "release"], most: int
) -> None:
    """Otherwise a hold waits for a commit of each hold and each release before it."""
    bus, ids = Bus(node, unused_exchange()), [f"message {number}" for number in range(80)]
    async with bus.connection() as connection:
        await declare_topology(connection, approvals_topology(bus.exchange, SCOPE), True)
    half = len(ids) // 2  # no client is over its rate
    await bus.send_all({"eventId": "e"}, ids[:half], user="holder")
    await bus.send_all({"eventId": "e"}, ids[half:], user="drain")
    handler = SlowHandler(len(ids), decision)
    async with BackgroundTasks(consumer_of(node, bus, handler).run()):
        await eventually(lambda: handler.decided == len(ids))
    if decision == "approve":  # the clients take turns
        assert sorted(handler.submitted) == sorted(ids)
    else:
        assert handler.submitted == ids
    assert handler.most_under_way == most


def allowed_since(began: float) -> float:
    """How many messages a client may have had decided."""
    return CALLER_BURST + CALLER_RATE * (time.monotonic() - began) + 1


async def test_what_waits_for_the_rate_of_its_client_returns_and_is_decided_once(
    node: Broker, tmp_path: Path
) -> None:
    """Approvals are turned off while messages wait in the relay: the broker gets them back."""
    async with running_system(node, tmp_path) as system:
        _, vote = await system.schedule_reboot()
        ids = [f"waits {number}" for number in range(CALLER_BURST + 60)]
        assert not await system.bus.send_all({**vote, "revision": "old"}, ids, user="drain")
        await eventually(lambda: refused(system) >= CALLER_BURST // 2, every=0.01)
        await system.running.relay.gate.set_approval_mode("off", "local:tester")
        await eventually(system.is_not_consuming, every=0.05)
        returned, _ = await system.bus.waiting()
        assert 0 < returned < len(ids)
        await system.running.relay.gate.set_approval_mode("on", "local:tester")
        await eventually(system.is_idle, every=0.1)
        await eventually(lambda: refused(system) >= len(ids))
        assert refused(system) == len(ids)
        assert not system.bus.dead_letters


@pytest.mark.parametrize(
    "limited", [True, False], ids=["by its arguments", "by the documented policy"]
)
async def test_the_broker_refuses_more_than_the_queue_may_hold(
    node: Broker, *, limited: bool
) -> None:
    """The policy takes effect on a queue that exists. What the broker took is not lost."""
    bus = Bus(node, unused_exchange("azure.scheduledevents"))
    async with bus.connection() as connection:
        parts = approvals_topology(bus.exchange, SCOPE, limited=limited)
        await declare_topology(connection, parts, True)
    if not limited:
        command = documented.block("docs/rabbitmq.md", "sh", "A queue without limits")
        pattern = re.escape(bus.exchange)
        command = command.replace("azure\\.scheduledevents", pattern).replace(" -p prod ", " ")
        command = command.replace("\\\n", "")
        _, *arguments = shlex.split(command)
        await asyncio.to_thread(node.ctl, *arguments)
    ids = [f"waits {number}" for number in range(MAX_APPROVALS + 500)]
    refused_by_broker = await bus.send_all({"eventId": "none"}, ids, user="drain")
    assert 0 < refused_by_broker <= 500
    waiting, _ = await bus.waiting()
    assert waiting == len(ids) - refused_by_broker


async def rejected(system: System) -> float:
    """How many calls and messages the relay has rejected without an event."""
    url = f"http://127.0.0.1:{system.running.api_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        lines = (await response.text()).splitlines()
    return next(
        float(line.split()[1])
        for line in lines
        if line.startswith("imds_relay_rejected_calls_total ")
    )
