"""A drain service: drains the machines of an event, then approves it over the same broker.

Set AMQP_URL=amqp://drain:secret@127.0.0.1:5672/ MACHINES='db-*' DRAIN='kubectl drain',
then run python examples/drain.py
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections import OrderedDict
from fnmatch import fnmatch
from typing import Any

import aio_pika
from aio_pika.abc import AbstractExchange, AbstractIncomingMessage
from yarl import URL

AMQP_URL = os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/")
EXCHANGE = os.environ.get("EXCHANGE", "azure.scheduledevents")
QUEUE = os.environ.get("QUEUE", "drain")
MACHINES = os.environ.get("MACHINES", "*")
DRAIN = shlex.split(os.environ.get("DRAIN", "true"))

BINDINGS = ("event.scheduled.#", "event.updated.#", "approval.refused.#", "startrequest.#")
# Of several instances one works and the next takes over, so the order is kept. A policy of the
# broker says where rejected messages go.
ARGUMENTS: dict[str, Any] = {"x-queue-type": "quorum", "x-single-active-consumer": True}
CHANGE = "io.imdsrelay.event."
REMEMBERED = 10_000
MAX_BYTES = 255
"""The length of a message id or routing key in AMQP."""


def read(body: bytes) -> dict[str, Any]:
    """Return the event in a message. Raises if it is none, or lacks a field that is used here."""
    event: dict[str, Any] = json.loads(body)
    json.dumps(event, ensure_ascii=False).encode()  # half a surrogate pair could not be printed
    data, used = event["data"], [event["source"], event["id"], event["type"]]
    sent = [f"{QUEUE}-{event['id']}"]
    if event["type"].startswith(CHANGE):
        names = data["resources"]
        if names is not None and not isinstance(names, list):
            raise ValueError("resources is neither null nor a list")
        used += [
            event["scope"],
            *(data[name] for name in ("eventId", "eventStatus", "revision")),
            *(names or ()),
        ]
        sent.append(f"approve.{event['scope']}")
    if not isinstance(data, dict) or not all(
        isinstance(text, str) and text and "\0" not in text for text in used
    ):
        raise ValueError("a field is missing or no text")
    if any(len(text.encode()) > MAX_BYTES for text in sent):
        raise ValueError("the id or the scope is too long for an approval")
    return event


def wanted(event: dict[str, Any]) -> bool:
    """Return whether to drain: the event is Scheduled and names only machines of this service.

    An approval would free all its machines.
    """
    if not event["type"].startswith(CHANGE) or event["data"]["eventStatus"] != "Scheduled":
        return False
    names = event["data"]["resources"] or ()
    return bool(names) and all(fnmatch(name.lower(), MACHINES.lower()) for name in names)


async def drain(event: dict[str, Any]) -> None:
    """Run the command for each machine. Draining a drained machine must do no harm."""
    for name in event["data"]["resources"]:
        process = await asyncio.create_subprocess_exec(*DRAIN, name)
        if await process.wait():
            raise RuntimeError(f"{shlex.join(DRAIN)} {name} failed")


async def approve(event: dict[str, Any], approvals: AbstractExchange) -> None:
    """Publish the decision; return once it is in the relay's queue, raise where there is none."""
    data = event["data"]
    decision = {
        "eventId": data["eventId"],
        "decision": "approve",
        "revision": data["revision"],
        "reason": "drained",
    }
    message = aio_pika.Message(
        json.dumps(decision).encode(),
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        # The same for the same state: a second approval counts as a repeat.
        message_id=f"{QUEUE}-{event['id']}",
        user_id=URL(AMQP_URL).user,  # the broker checks that we are who we say
    )
    await approvals.publish(message, f"approve.{event['scope']}", mandatory=True, timeout=10)


async def handle(
    message: AbstractIncomingMessage,
    seen: OrderedDict[tuple[str, str], None],
    approvals: AbstractExchange,
) -> None:
    """One message: acknowledged when everything is done, buried when it is no event."""
    try:
        event = read(message.body)
        key, said = (event["source"], event["id"]), f"{event['type']} {event.get('subject')}"
        data = event["data"]
        ours = event.get("causationid", "").startswith(f"{QUEUE}-")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        print(f"buried what is no event: {error!r}", file=sys.stderr, flush=True)
        await message.reject(requeue=False)
        return
    if key not in seen and ours:
        print(
            f"answered: {said}: {data.get('refusal') or data.get('reason') or 'done'}", flush=True
        )
    elif key not in seen and wanted(event):
        await drain(event)
        await approve(event, approvals)
        print(f"drained and approved: {said}", flush=True)
    seen[key] = None  # a real service keeps this where it keeps its results, in one transaction
    if len(seen) > REMEMBERED:
        seen.popitem(last=False)
    await message.ack()


async def serve() -> None:
    """Handle one message after the other. Unacknowledged messages come again, to any instance.

    A robust connection subscribes again if the broker cancels the consumer, for example because
    the queue was deleted. A plain connection would wait forever.
    """
    seen: OrderedDict[tuple[str, str], None] = OrderedDict()
    connection = await aio_pika.connect_robust(
        AMQP_URL, client_properties={"connection_name": QUEUE}
    )
    async with connection, connection.channel(on_return_raises=True) as channel:
        await channel.set_qos(prefetch_count=1)
        queue = await channel.declare_queue(QUEUE, durable=True, arguments=ARGUMENTS)
        for key in BINDINGS:
            await queue.bind(EXCHANGE, key)
        approvals = await channel.get_exchange(f"{EXCHANGE}.approvals", ensure=False)
        print(f"draining {MACHINES} for {QUEUE}", flush=True)
        async with queue.iterator() as messages:
            async for message in messages:
                await handle(message, seen, approvals)


async def main() -> None:
    """Serve until Ctrl-C or SIGTERM; after a failure, again."""
    task = asyncio.ensure_future(for_ever())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await asyncio.wait({task})


async def for_ever() -> None:
    """Serve, and serve again."""
    while True:
        try:
            await serve()
        except (aio_pika.exceptions.AMQPError, OSError, RuntimeError) as error:
            print(f"again in 5 s: {error!r}", file=sys.stderr, flush=True)
        await asyncio.sleep(5)


if __name__ == "__main__":
    asyncio.run(main())
