"""Approvals over RabbitMQ under failures: kills, full disks, broker outages, missing rights."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aio_pika.abc import AbstractIncomingMessage

from relay.amqp import approval_consumer
from relay.approvals.engine import ApprovalEngine
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.errors import StoreUnavailable
from relay.store.transaction import Transaction
from tests.approvals.builders import write_damaged_row
from tests.eventually import eventually
from tests.journey.bus import SCOPE, Bus, System, define_users, running_system, unused_exchange
from tests.journey.relay_process import after_polls
from tests.rabbitmq import Broker
from tests.store.conftest import LimitedDisk


@pytest.fixture(scope="module")
def _with_users(_node: Broker) -> None:
    _node.heal()
    define_users(_node)


@pytest.fixture
def node(_with_users: None, own_broker: Broker) -> Broker:
    """A broker to mistreat, with the users of these tests."""
    return own_broker


async def approve(system: System, message_id: str) -> None:
    """A reboot comes, a message approves it: all is well."""
    event, decision = await system.schedule_reboot()
    await system.bus.send(decision, message_id)
    await system.bus.wait_for_event("approval.granted", event, message_id)


def log_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage().removeprefix("approvals over AMQP: ")
        for record in caplog.records
        if record.name == "relay.amqp.approval_consumer"
    ]


def buried(system: System) -> list[str | None]:
    return [message.message_id for message in system.bus.dead_letters]


# --- it cannot decide


async def test_while_the_state_file_cannot_be_written_messages_wait_in_the_queue(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue with a delivery limit would bury them (docs/protocol.md#requeuing-in-a-loop)."""
    caplog.set_level(logging.INFO, "relay.amqp.approval_consumer")
    async with running_system(node, tmp_path) as system:
        event, decision = await system.schedule_reboot()
        disk = LimitedDisk(tmp_path)
        disk.fill()
        try:
            await system.bus.send(decision, "waited")
            waits = "messages wait: the state file cannot be written"
            await eventually(lambda: log_of(caplog)[-1].endswith(waits))
            for _ in range(3):
                await after_polls(system.sim)
                assert await system.is_not_consuming()
            assert await _deliveries(system.bus) <= 1
            assert not system.bus.events_of_type("approval.recorded")
        finally:
            disk.free()
        await system.bus.wait_for_event("approval.granted", event, "waited")
        assert len(system.bus.events_of_type("approval.recorded")) == 1
        assert not system.bus.dead_letters


async def test_while_approvals_are_off_from_the_start_there_is_a_queue_to_wait_in(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay makes the queue when it connects, so no message is lost while approvals are off."""
    caplog.set_level(logging.INFO, "relay.amqp")
    exchange = unused_exchange()
    off = running_system(node, tmp_path, exchange, wait=False, approvals={"enabled": False})
    async with off as system:
        # It is bound when this is logged. A message that comes before that has no queue.
        await eventually(lambda: "messages wait" in caplog.text, every=0.1)
        assert await system.bus.waiting() == (0, 0)
        await system.bus.send({"eventId": "x", "decision": "approve", "revision": "r"}, "early")
        await eventually(system.bus.waiting, lambda waiting: waiting == (1, 0), every=0.1)
    async with running_system(node, tmp_path, exchange, wait=False) as system:
        await eventually(system.is_idle, every=0.1)


async def _deliveries(bus: Bus) -> int:
    """How often the message that waits has been delivered in vain."""
    async with bus.channel() as channel:
        queue = await channel.get_queue(bus.queue)
        messages: list[AbstractIncomingMessage] = []

        async def note(message: AbstractIncomingMessage) -> None:
            messages.append(message)

        await queue.consume(note)
        await eventually(lambda: bool(messages))
        count = messages[0].headers.get("x-delivery-count", 0)
        assert isinstance(count, int)
        return count


async def test_decisions_that_cannot_be_recorded_change_neither_the_order_nor_the_delivery_count(
    node: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full again and again. An older release must not end a newer hold."""
    decide = ApprovalEngine.decide
    asked: list[str | None] = []

    def refuse_often(
        self: ApprovalEngine, tx: Transaction, request: DecisionRequest
    ) -> DecisionAnswer:
        asked.append(request.message_id)
        if len(asked) % 4:
            raise StoreUnavailable("no room")
        return decide(self, tx, request)

    monkeypatch.setattr(approval_consumer, "POLL_INTERVAL", 0.05)
    sent = ["hold", "release", "hold again"]
    async with running_system(node, tmp_path) as system:
        event, decision = await system.schedule_reboot()
        monkeypatch.setattr(ApprovalEngine, "decide", refuse_often)
        await system.running.relay.gate.set_approval_mode("off", "local:tester")
        await eventually(system.is_not_consuming, every=0.05)
        for name in sent:
            await system.bus.send({**decision, "decision": name.split()[0]}, name, user="holder")
        await system.running.relay.gate.set_approval_mode("on", "local:tester")
        await system.bus.wait_for_event("approval.recorded", event, sent[-1])
        recorded = system.bus.events_of_type("approval.recorded", event)
    assert [told["causationid"] for told in recorded] == sent
    assert asked == [name for name in sent for _ in range(4)]


async def test_what_nobody_can_decide_buries_the_message_that_met_it_and_no_other(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in our own code, which the log has with its traceback, and rows that are damaged.

    Back in the queue, the message would block the others.
    """
    async with running_system(node, tmp_path) as system:
        _, damaged = await system.schedule_reboot()
        with monkeypatch.context() as broken:
            broken.setattr(ApprovalEngine, "decide", lambda *_: 1 / 0)
            await system.bus.send(damaged, "cursed")
            await eventually(lambda: buried(system) == ["cursed"])
        await system.bus.send({**damaged, "decision": "hold"}, "held", user="holder")
        await system.bus.wait_for_event("approval.recorded", cause="held")
        key = damaged["eventId"].lower()
        await system.running.relay.store.transact(
            lambda tx: write_damaged_row(tx, "approval.recorded", key)
        )
        await system.bus.send(damaged, "about the damaged one")
        await approve(system, "blessed")
        await eventually(lambda: buried(system) == ["cursed", "about the damaged one"])
    assert "ZeroDivisionError" in caplog.text
    assert 'was dead-lettered: "journal: the row at position' in caplog.text


# --- the broker


async def test_a_broker_that_is_killed_costs_no_approval(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay reconnects to its queue, which still has all confirmed messages."""
    caplog.set_level(logging.INFO, "relay.amqp.approval_consumer")
    async with running_system(node, tmp_path) as system:
        event, decision = await system.schedule_reboot()
        await system.running.relay.gate.set_approval_mode("off", "local:tester")
        await eventually(system.is_not_consuming, every=0.1)
        await system.bus.send(decision, "survived")
        link = system.running.relay.approvals_link
        assert link is not None
        assert link.is_connected
        await asyncio.to_thread(node.kill)
        await eventually(lambda: "no connection to" in log_of(caplog)[-1])
        assert not link.is_connected
        await asyncio.to_thread(node.start)
        await eventually(lambda: log_of(caplog)[-1].endswith("messages wait: approvals are off"))
        assert link.is_connected
        await system.running.relay.gate.set_approval_mode("on", "local:tester")
        await system.sim.wait_until_approved(event, within=60)


async def test_a_relay_ends_in_time_while_the_broker_hangs(node: Broker, tmp_path: Path) -> None:
    """Neither the sink nor the consumer waits for a farewell."""
    async with running_system(node, tmp_path, wait=False) as system:
        await eventually(system.is_consuming, every=0.1)
        node.freeze()
        began = time.monotonic()
    assert time.monotonic() - began < 25  # not until heartbeats are missed
    node.thaw()


async def test_under_alarm_approvals_count_and_are_told_later(node: Broker, tmp_path: Path) -> None:
    """An alarm blocks those who publish; this connection only consumes.

    See docs/protocol.md#an-alarm-blocks-publishers.
    """
    async with running_system(node, tmp_path) as system:
        event, decision = await system.schedule_reboot()
        await system.running.relay.gate.set_approval_mode("off", "local:tester")
        await eventually(system.is_not_consuming, every=0.1)
        await system.bus.send(decision, "alarmed")
        await asyncio.to_thread(node.alarm, on=True)
        await system.running.relay.gate.set_approval_mode("on", "local:tester")
        await system.sim.wait_until_approved(event, within=60)
        assert not system.bus.events_of_type("approval.recorded")
        await asyncio.to_thread(node.alarm, on=False)
        await system.bus.wait_for_event("approval.granted", event, "alarmed")


# --- rights, and what must exist


async def test_passive_names_what_it_sees_is_missing_and_needs_no_right_but_to_read_the_queue(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`configure: ^$`, `write: ^$`: the consumer writes nothing, and the broker moves dead letters.

    RabbitMQ from 4.2.6 lets it look at the queue alone.
    """
    caplog.set_level(logging.INFO, "relay.amqp.approval_consumer")
    exchange = unused_exchange("least")
    rights = {
        "configure": "^$",
        "write": "^$",
        "read": f"^{re.escape(exchange)}.approvals.{SCOPE}$",
    }
    await asyncio.to_thread(node.add_user, "least", "least", **rights)
    others = (
        f"exchange {exchange}.dlx, no queue {exchange}.dead, no exchange {exchange}.approvals, no "
    )
    queue = re.escape(f"{exchange}.approvals.{SCOPE}")
    missing = rf"the broker has no ({re.escape(others)})?queue {queue}: make what is missing"
    async with running_system(
        node, tmp_path, exchange, wait=False, url=node.amqp_url("least"), declare="passive"
    ) as system:
        await eventually(lambda: bool(log_of(caplog)))
        assert re.match(missing, log_of(caplog)[0])
        (tmp_path / "maker").mkdir()
        async with running_system(node, tmp_path / "maker", exchange):
            pass
        await eventually(system.is_consuming, every=0.1)
        async with AsyncExitStack() as stack:
            await system.bus.listen(stack)
            await approve(system, "least")
            await system.bus.send(b"no json", "buried")
            await eventually(lambda: buried(system) == ["buried"])
