"""The example programs that drain machines reject invalid messages and go on to the next ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from tests.programs import command_of, running
from tests.rabbitmq import Broker

HERE = Path(__file__).parent
ARGUMENTS: dict[str, Any] = {"x-queue-type": "quorum", "x-single-active-consumer": True}
EVENT: dict[str, Any] = {
    "specversion": "1.0",
    "id": "54fe8047b3d40c0d34ee0464d941daae",
    "source": "imds://compose",
    "type": "io.imdsrelay.event.scheduled.v1",
    "subject": "of no event",
    "scope": "compose",
    "data": {
        "eventId": "of no event",
        "eventStatus": "Scheduled",
        "resources": ["vm-0"],
        "revision": "0275c9e0126a4086",
    },
}

"""What is no event is made from this by taking away or changing one field."""
REAL = EVENT | {
    "id": "real",
    "subject": "C7061BAC",
    "data": EVENT["data"] | {"eventId": "C7061BAC"},
}


def without(*names: str) -> bytes:
    """The event without some of its fields."""
    return json.dumps({name: value for name, value in EVENT.items() if name not in names}).encode()


def with_data(**data: object) -> bytes:
    return json.dumps(EVENT | {"data": EVENT["data"] | data}).encode()


MACHINES = "[+-z]*"
"""A glob and a regular expression for the machine `vm-0`, and for each character of it."""
WRONG_DATA: tuple[object, ...] = (None, "text", {})
RUBBISH = (
    *(
        b"",
        b"not JSON",
        b"\xff",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b"true",
        b"{}",
        b"[" * 100_000,
        b"[{}]",
    ),
    *(without(name) for name in ("id", "source", "type", "data", "scope")),
    *(json.dumps(EVENT | {name: 5}).encode() for name in ("id", "source", "type", "data", "scope")),
    *(
        json.dumps(EVENT | {name: []}).encode()
        for name in ("id", "source", "type", "data", "scope")
    ),
    *(json.dumps(EVENT | {"data": data}).encode() for data in WRONG_DATA),
    *(with_data(**{name: 5}) for name in EVENT["data"]),
    *(with_data(**{name: None}) for name in ("eventId", "eventStatus", "revision")),
    *(with_data(resources=names) for names in ([5], [None], [""], ["vm\0"])),
    # A program can iterate over text and objects, and all their parts match MACHINES.
    *(
        with_data(resources=names)
        for names in ("", "vm-0", {}, {"vm-0": 0}, 0, False, True, [["vm-0"]])
    ),
    # Message ids and routing keys have at most 255 bytes in AMQP. An approval adds to these fields.
    *(json.dumps(EVENT | {name: "x" * 300}).encode() for name in ("id", "scope")),
    *(
        json.dumps(EVENT | {name: "ø" * 125}, ensure_ascii=False).encode()
        for name in ("id", "scope")
    ),
)


@pytest.mark.timeout(600)  # Go compiles its library first
@pytest.mark.parametrize("program", ["drain.py", "drain.mjs", "drain.go"])
async def test_what_is_no_event_does_not_hold_up_the_events_behind_it(
    program: str, tmp_path: Path, broker: Broker
) -> None:
    """All messages wait in the queue before the program starts.

    The last two are an event of another type and an event to approve.
    """
    command = await asyncio.to_thread(command_of, program, tmp_path, HERE)
    async with (
        await aio_pika.connect(broker.amqp_url()) as connection,
        connection.channel() as channel,
    ):
        await channel.queue_delete("drain")
        await channel.declare_exchange("drained", "topic", auto_delete=True)
        approvals = await channel.declare_exchange("drained.approvals", "topic", auto_delete=True)
        decisions = await channel.declare_queue(exclusive=True)
        await decisions.bind(approvals, "approve.compose")
        queue = await channel.declare_queue("drain", durable=True, arguments=ARGUMENTS)
        refused = json.dumps(
            {**EVENT, "id": "1", "type": "io.imdsrelay.approval.refused.v1", "data": {}}
        ).encode()
        for body in (*RUBBISH, refused, json.dumps(REAL).encode()):
            await channel.default_exchange.publish(aio_pika.Message(body), "drain", timeout=60)
        said = b""
        program_run = running(
            *command,
            cwd=tmp_path,
            stderr=asyncio.subprocess.STDOUT,
            AMQP_URL=broker.amqp_url(),
            EXCHANGE="drained",
            MACHINES=MACHINES,
        )
        async with program_run as output, asyncio.timeout(60):
            while b"drained and approved: io.imdsrelay.event.scheduled.v1 C7061BAC" not in said:
                line = await output.readline()
                assert line, said.decode()
                said += line
        if program == "drain.py":  # it says what it rejects
            assert said.count(b"buried what is no event") == len(RUBBISH)
        decision = await decisions.get(timeout=60)
        assert decision is not None
        wanted = {
            "eventId": "C7061BAC",
            "decision": "approve",
            "revision": "0275c9e0126a4086",
            "reason": "drained",
        }
        assert json.loads(decision.body) == wanted
        assert await decisions.get(fail=False, no_ack=True) is None
        await queue.delete(if_unused=False, if_empty=False)
