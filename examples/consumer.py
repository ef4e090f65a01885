"""A consumer: reads events from its own quorum queue, drops repeats, prints a line for each.

AMQP_URL=amqp://guest:guest@127.0.0.1:5672/ python examples/consumer.py
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import OrderedDict
from typing import Any

import aio_pika
from aio_pika.exceptions import AMQPError, ChannelNotFoundEntity

EXCHANGE = os.environ.get("EXCHANGE", "azure.scheduledevents")
QUEUE = os.environ.get("QUEUE", "example.events")
BINDING = os.environ.get(
    "BINDING", "#"
)  # event.# for changes alone, event.*.reboot.# for reboots alone

REMEMBERED = 10_000


MAX_BYTES = 255


def read(body: bytes) -> dict[str, Any]:
    """Return the event in a message. Raise an error if a field that we use is malformed."""
    event: dict[str, Any] = json.loads(body)
    for name in ("source", "id"):
        if not isinstance(event[name], str) or len(event[name].encode()) > MAX_BYTES:
            raise ValueError(f"{name} is not text of at most {MAX_BYTES} bytes")
    names = event["data"].get("resources")
    if names is not None and not isinstance(names, list):
        raise ValueError("resources is neither null nor a list")
    return event


class Seen:
    """The last events by their identity. A real consumer stores this together with its results."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._keys: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __contains__(self, event: dict[str, Any]) -> bool:
        """Whether an event with the same source and id was added."""
        return (event["source"], event["id"]) in self._keys

    def add(self, event: dict[str, Any]) -> None:
        """Remember the event, and forget the oldest when there are too many."""
        self._keys[event["source"], event["id"]] = None
        if len(self._keys) > REMEMBERED:
            self._keys.popitem(last=False)


def line(event: dict[str, Any]) -> str:
    """Say what happened to what, and what came of it."""
    data = event["data"]
    change = ".".join(event["type"].split(".")[2:4])  # io.imdsrelay.<family>.<change>.v1
    known = {
        "": data.get("eventType"),
        "of": ", ".join(data.get("resources") or ()),
        "started by": data.get("eventSource"),
        "not before": data.get("notBefore"),
        "for seconds:": data.get("durationSeconds"),
        "outcome:": data.get("outcome"),
        "decision:": data.get("decision"),
        "by": data.get("principal"),
        "because": data.get("reason"),
    }
    said = " ".join(
        f"{word} {value}".strip() for word, value in known.items() if value not in {None, ""}
    )
    return f"{event['time']} {change} {said} [{event.get('subject', '-')}]"


async def consume(url: str) -> None:
    """Consume until cancelled, across lost connections. Unacknowledged messages come again."""
    seen = Seen()
    connection = await aio_pika.connect_robust(url, client_properties={"connection_name": QUEUE})
    async with connection, connection.channel() as channel:
        await channel.set_qos(prefetch_count=32)
        queue = await channel.declare_queue(
            QUEUE, durable=True, arguments={"x-queue-type": "quorum"}
        )
        await queue.bind(EXCHANGE, BINDING)
        print(f"consuming {QUEUE}", flush=True)
        async with queue.iterator() as messages:
            async for message in messages:
                try:
                    event = read(message.body)
                    if event not in seen:
                        print(line(event), flush=True)
                        seen.add(event)
                except (
                    ValueError,
                    LookupError,
                    TypeError,
                    AttributeError,
                    RecursionError,
                ) as error:
                    # No event: taking it up again mends nothing.
                    print(
                        f"rejected a message that is no event: {error!r}",
                        file=sys.stderr,
                        flush=True,
                    )
                    await message.reject(requeue=False)
                else:
                    await message.ack()  # done with it; until here the broker would send it again


async def main() -> None:
    """Run until Ctrl-C or SIGTERM."""
    task = asyncio.ensure_future(
        consume(os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/"))
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return
    except ChannelNotFoundEntity:
        sys.exit(
            f"expected the exchange {EXCHANGE}, there is none: start the relay first, it makes it"
        )
    except (AMQPError, OSError) as error:
        sys.exit(f"expected a RabbitMQ that lets us in: {error}")


if __name__ == "__main__":
    asyncio.run(main())
