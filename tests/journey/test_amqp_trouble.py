"""Approvals over RabbitMQ while something is wrong: kills, locks, a broker that goes, hangs, lacks a queue or gives no rights."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import ChannelNotFoundEntity

from relay.amqp import approval_consumer as amqp
from relay.amqp.approval_consumer import ApprovalConsumer
from relay.api.auth.rejection_log import RejectionLog
from relay.app import started
from relay.approvals.service import ApprovalService
from relay.clock import SystemClock
from relay.config import Config
from relay.errors import StoreUnavailable
from relay.simulator import VM, Setup, Simulator
from tests.journey.bus import SCOPE, Bus, Stage, define_users, section, stage, unused
from tests.journey.held_connection import way_to
from tests.journey.relay_process import eventually, relay
from tests.outbox.conftest import LimitedDisk
from tests.rabbitmq import Broker


@pytest.fixture(scope="module")
def _with_users(_private_node: Broker) -> None:
    _private_node.heal()
    define_users(_private_node)


@pytest.fixture
def node(_with_users: None, own_broker: Broker) -> Broker:
    """A broker to mistreat, with the users of these tests."""
    return own_broker


async def approve(there: Stage, message_id: str) -> None:
    """A reboot comes, a message approves it: all is well."""
    event, wish = await there.wish()
    await there.bus.send(wish, message_id)
    await there.bus.hears("approval.granted", event, message_id)


def log_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the relay said of its approvals over AMQP."""
    return [
        record.getMessage().removeprefix("approvals over AMQP: ")
        for record in caplog.records
        if record.name == "relay.amqp.approval_consumer"
    ]


# --- the relay dies


async def test_killed_between_decision_and_acknowledgement_it_decides_once(
    node: Broker, tmp_path: Path
) -> None:
    """The broker gives the message to the next life, which knows that it has been decided: no second event, and it is gone."""
    bus = Bus(node, unused())
    async with AsyncExitStack() as stack:
        way = await stack.enter_async_context(way_to(node))
        sim = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
        document = section(node, bus.exchange, url=way.url) | {"source": {"url": sim.url}}
        document["api"] = {"clients": document["api"]["clients"]}
        process = await stack.enter_async_context(relay(tmp_path / "relay", document))
        await process.start()
        await eventually(lambda: "messages are taken" in process.log)
        await bus.listen(stack)
        there = Stage(sim, bus)
        event, wish = await there.wish()
        way.there.clear()
        await bus.send(wish, "once")
        await bus.hears("approval.recorded", event, "once")
        await process.kill()
        await way.cut()
        await eventually(bus.holds_one, every=0.1)
        way.there.set()
        await process.start()
        await eventually(there.is_idle, every=0.1)
        foreign, other = await there.wish(resources=("db-7",))
        await bus.send(other, "next")
        await bus.hears("approval.refused", foreign, "next")
        for name in ("approval.recorded", "approval.granted"):
            assert len({one["id"] for one in bus.told(name, event)}) == 1, (
                "what was told and not marked so is told again"
            )
        assert not bus.dead


async def test_of_two_relays_one_decides_and_the_other_takes_over_when_it_dies(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are connected and subscribed; the broker gives messages to one alone."""
    caplog.set_level(logging.INFO, "relay.amqp.approval_consumer")
    async with Simulator(Setup(vms=(VM("vm-1"),))) as sim, AsyncExitStack() as stack:
        exchange = unused()
        document = section(node, exchange) | {"relay": "first", "source": {"url": sim.url}}
        document["api"] = {"clients": document["api"]["clients"]}
        first = await stack.enter_async_context(relay(tmp_path / "first", document))
        await first.start()
        await eventually(lambda: "messages are taken" in first.log)
        there = await stack.enter_async_context(stage(node, tmp_path, exchange))
        await eventually(lambda: "messages are taken" in caplog.text)
        for number in range(4):
            await there.bus.send(
                {"eventId": f"{number}", "decision": "approve", "revision": "none"}, f"m{number}"
            )
        for number in range(4):
            assert (await there.bus.hears("approval.refused", cause=f"m{number}"))[
                "relay"
            ] == "first"
        await first.kill()
        await there.bus.send({"eventId": "4", "decision": "approve", "revision": "none"}, "m4")
        assert (await there.bus.hears("approval.refused", cause="m4"))["relay"] == "vm-0"
        assert len(there.bus.told("approval.refused")) == 5


# --- it cannot decide


async def test_while_the_state_file_cannot_be_written_messages_wait_and_are_not_taken_again_and_again(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue with a delivery limit would bury them (docs/protocol.md#requeuing-in-a-loop)."""
    caplog.set_level(logging.INFO, "relay.amqp.approval_consumer")
    async with stage(node, tmp_path) as there:
        event, wish = await there.wish()
        disk = LimitedDisk(tmp_path)
        disk.fill()
        try:
            await there.bus.send(wish, "waited")
            await eventually(
                lambda: log_of(caplog)[-1].endswith(
                    "messages wait: the state file cannot be written"
                )
            )
            for _ in range(3):
                await asyncio.sleep(0.5)  # nothing happens: there is no sign to wait for
                assert await there.is_not_consuming()
            assert await _deliveries(there.bus) <= 1
            assert not there.bus.told("approval.recorded")
        finally:
            disk.free()
        await there.bus.hears("approval.granted", event, "waited")
        assert len(there.bus.told("approval.recorded")) == 1
        assert not there.bus.dead


async def test_while_approvals_are_off_from_the_start_there_is_a_queue_to_wait_in(
    node: Broker, tmp_path: Path
) -> None:
    """It is made as soon as the relay has connected: else what is sent before the switch is turned would be lost."""
    exchange = unused()
    bus = Bus(node, exchange)
    async with Simulator(Setup(vms=(VM("vm-0"),))) as sim:
        document = section(node, exchange) | {
            "source": {"url": sim.url},
            "store": {"path": str(tmp_path / "relay.db")},
        }
        document["approvals"]["enabled"] = False
        async with started(Config.model_validate(document), SystemClock()):
            await eventually(lambda: _is_there(bus), every=0.1)
            await bus.send({"eventId": "x", "decision": "approve", "revision": "r"}, "early")
            await eventually(bus.holds_one, every=0.1)
            assert await bus.waiting() == (1, 0)
    async with stage(node, tmp_path, exchange, wait=False) as there, AsyncExitStack() as stack:
        await there.bus.listen(stack)
        await eventually(there.is_idle, every=0.1)


async def _is_there(bus: Bus) -> bool:
    try:
        return await bus.waiting() == (0, 0)
    except ChannelNotFoundEntity:
        return False


async def _deliveries(bus: Bus) -> int:
    """How often the message that waits has been delivered in vain."""
    async with bus.channel() as channel:
        queue = await channel.get_queue(bus.queue)
        found: list[AbstractIncomingMessage] = []

        async def note(message: AbstractIncomingMessage) -> None:
            found.append(message)

        await queue.consume(note)
        await eventually(lambda: bool(found))
        count = found[0].headers.get("x-delivery-count", 0)
        assert isinstance(count, int)
        return count


async def test_where_nothing_can_be_recorded_though_all_seems_well_it_asks_ever_more_seldom(
    node: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk with room for next to nothing. Each time counts towards the queue's delivery limit."""
    asked = 0

    def refuse(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise StoreUnavailable("no room")

    async with stage(node, tmp_path) as there:
        with monkeypatch.context() as broken:
            broken.setattr(amqp, "LOOK", 0.05)
            broken.setattr(ApprovalService, "submit", refuse)
            await there.bus.send(
                {"eventId": "x", "decision": "approve", "revision": "r"}, "asked for"
            )
            await eventually(lambda: asked >= 2)
            await asyncio.sleep(2)  # nothing happens: there is no sign to wait for
        assert asked <= 8
        await there.bus.hears("approval.refused", cause="asked for")
        assert not there.bus.dead


async def test_an_error_in_our_own_code_buries_the_message_that_met_it_and_no_other(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come again at once, and nobody else would be heard; nothing was decided, and the log has the traceback."""
    async with stage(node, tmp_path) as there:
        with monkeypatch.context() as broken:
            broken.setattr(ApprovalService, "submit", lambda *_: 1 / 0)
            await there.bus.send({"eventId": "x", "decision": "approve", "revision": "r"}, "cursed")
            await eventually(lambda: [one.message_id for one in there.bus.dead] == ["cursed"])
        await approve(there, "blessed")
    assert "ZeroDivisionError" in caplog.text


# --- the broker


async def test_a_broker_that_is_killed_costs_no_approval(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay comes back to its queue by itself, though it takes nothing just now, and what had been confirmed is in it."""
    caplog.set_level(logging.INFO, "relay.amqp.approval_consumer")
    async with stage(node, tmp_path) as there:
        event, wish = await there.wish()
        await there.running.relay.gate.set_mode("off", "local:tester")
        await eventually(there.is_not_consuming, every=0.1)
        await there.bus.send(wish, "survived")
        await asyncio.to_thread(node.kill)
        await eventually(lambda: "no connection to" in log_of(caplog)[-1])
        await asyncio.to_thread(node.start)
        await eventually(lambda: log_of(caplog)[-1].endswith("messages wait: approvals are off"))
        await there.running.relay.gate.set_mode("on", "local:tester")
        await there.sim.approved(event, within=60)


async def test_a_broker_that_hangs_is_noticed_and_come_back_to(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a heartbeat of one second it takes six, with the relay's own of ten 33."""
    caplog.set_level(logging.INFO, "relay.amqp.approval_consumer")
    async with stage(node, tmp_path) as there:
        caplog.clear()
        async with _second_door(there, heartbeat=1):
            taken = f"connected to 127.0.0.1:{node.port}; messages are taken from {there.bus.queue}"
            await eventually(lambda: log_of(caplog)[-1:] == [taken])
            node.freeze()
            began = time.monotonic()
            await eventually(
                lambda: (
                    log_of(caplog)[-1]
                    == "the channel was closed: nothing was heard from the broker for three heartbeats"
                )
            )
            assert 3 < time.monotonic() - began < 25
            node.thaw()
            await eventually(lambda: log_of(caplog)[-1] == taken)
        await approve(there, "after")


async def test_a_relay_that_is_stopped_while_the_broker_hangs_ends_in_time(
    node: Broker, tmp_path: Path
) -> None:
    """Neither the sink nor the consumer waits for a farewell."""
    async with stage(node, tmp_path, wait=False) as there:
        await eventually(there.is_consuming, every=0.1)
        node.freeze()
        began = time.monotonic()
    assert time.monotonic() - began < 25  # not until heartbeats are missed
    node.thaw()


@asynccontextmanager
async def _second_door(there: Stage, *, heartbeat: int) -> AsyncIterator[None]:
    """The same relay's consumer once more, with another heartbeat."""
    assert there.config.approvals.amqp is not None
    door = ApprovalConsumer(
        there.config.approvals.amqp,
        there.bus.exchange,
        there.config.api.clients,
        there.running.relay,
        RejectionLog(),
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(door.run(heartbeat=heartbeat))
        yield
        task.cancel()


async def test_under_a_memory_alarm_approvals_still_count_and_are_answered_afterwards(
    node: Broker, tmp_path: Path
) -> None:
    """An alarm blocks those who publish; this connection only consumes.

    See docs/protocol.md#an-alarm-blocks-publishers.
    """
    async with stage(node, tmp_path) as there:
        event, wish = await there.wish()
        await there.running.relay.gate.set_mode("off", "local:tester")
        await eventually(there.is_not_consuming, every=0.1)
        await there.bus.send(wish, "alarmed")
        await asyncio.to_thread(node.alarm, on=True)
        await there.running.relay.gate.set_mode("on", "local:tester")
        await there.sim.approved(event, within=60)
        assert not there.bus.told("approval.recorded")
        await asyncio.to_thread(node.alarm, on=False)
        await there.bus.hears("approval.granted", event, "alarmed")


async def test_a_queue_that_is_deleted_is_made_again(node: Broker, tmp_path: Path) -> None:
    async with stage(node, tmp_path) as there:
        async with there.bus.channel() as channel:
            await channel.queue_delete(there.bus.queue)
        await eventually(there.is_consuming, every=0.1)
        await approve(there, "again")


# --- rights, and what must exist


async def test_passive_names_what_it_sees_is_missing_and_needs_no_right_but_to_read_the_queue(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`configure: ^$`, `write: ^$`: the consumer writes nothing, not even its dead letters, which the broker moves by itself.

    RabbitMQ from 4.2.6 lets it look at the queue alone.
    """
    caplog.set_level(logging.INFO, "relay.amqp.approval_consumer")
    exchange = unused("least")
    rights = {
        "configure": "^$",
        "write": "^$",
        "read": f"^{re.escape(exchange)}.approvals.{SCOPE}$",
    }
    await asyncio.to_thread(node.add_user, "least", "least", **rights)
    others = (
        f"exchange {exchange}.dlx, no queue {exchange}.dead, no exchange {exchange}.approvals, no "
    )
    missing = rf"the broker has no ({re.escape(others)})?queue {re.escape(exchange)}\.approvals\.{SCOPE}: make what is missing"
    async with stage(
        node, tmp_path, exchange, wait=False, url=node.amqp_url("least"), declare="passive"
    ) as there:
        await eventually(lambda: bool(log_of(caplog)))
        assert re.match(missing, log_of(caplog)[0])
        (tmp_path / "maker").mkdir()
        async with stage(node, tmp_path / "maker", exchange):
            pass
        await eventually(there.is_consuming, every=0.1)
        async with AsyncExitStack() as stack:
            await there.bus.listen(stack)
            await approve(there, "least")
            await there.bus.send(b"no json", "buried")
            await eventually(lambda: [one.message_id for one in there.bus.dead] == ["buried"])


@pytest.mark.parametrize(
    ("rights", "said"),
    [
        (
            {},
            "the broker has no such queue (NOT_FOUND - no queue '{queue}' in vhost '/'): make it, or set declare: true",
        ),
        (
            {"read": "^$"},
            "the broker refused the queue (ACCESS_REFUSED - access to queue '{queue}' in vhost '/' refused for user 'least'): grant",
        ),
    ],
    ids=["no queue", "no right"],
)
async def test_what_declare_false_takes_as_given_and_does_not_find_is_told_with_its_remedy(
    node: Broker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    rights: dict[str, str],
    said: str,
) -> None:
    """And is come back to: nothing else of the relay minds."""
    caplog.set_level(logging.INFO, "relay.amqp.approval_consumer")
    await asyncio.to_thread(
        node.add_user, "least", "least", **{"configure": "^$", "write": "^$", **rights}
    )
    async with stage(
        node, tmp_path, wait=False, url=node.amqp_url("least"), declare=False
    ) as there:
        await eventually(lambda: bool(log_of(caplog)))
        told = log_of(caplog)[0].replace(
            "REFUSED - read access", "REFUSED - access"
        )  # the words of RabbitMQ from 4.3 on
        assert told.startswith(said.format(queue=there.bus.queue))


async def test_a_queue_with_other_arguments_is_named_with_the_argument(
    node: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus(node, unused())
    async with bus.channel() as channel:
        await channel.declare_queue(bus.queue, durable=True, arguments={"x-queue-type": "quorum"})
    async with stage(node, tmp_path, bus.exchange, wait=False):
        await eventually(lambda: bool(log_of(caplog)))
    assert log_of(caplog)[0].startswith(
        f"queue {bus.queue} exists and is another than this relay makes (PRECONDITION_FAILED - inequivalent arg"
    )
    assert "delete it so that it is made anew, or set declare: passive" in log_of(caplog)[0]
