"""What must exist on the broker: exchanges and queues, made, looked for, or taken as given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aio_pika
from aio_pika import exceptions as amqp
from aiormq.exceptions import ChannelAccessRefused

from relay.amqp.cancellation import raise_if_cancelled
from relay.amqp.failures import broker_message
from relay.errors import Deferred

Declare = Literal[True, False, "passive"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange."""

    name: str
    type: Literal["topic", "fanout"]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What it is called in a sentence."""
        return f"exchange {self.name}"

    async def declare(self, channel: aio_pika.abc.AbstractChannel, *, passive: bool) -> None:
        """Make it, or only see that it exists. Raises what aio-pika raises."""
        await channel.declare_exchange(
            self.name, self.type, durable=True, passive=passive, arguments=dict(self.arguments)
        )


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable quorum queue, bound to one exchange."""

    name: str
    source: str
    key: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What it is called in a sentence."""
        return f"queue {self.name}"

    async def declare(self, channel: aio_pika.abc.AbstractChannel, *, passive: bool) -> None:
        """Make and bind it, or only see that it exists. Raises what aio-pika raises."""
        arguments = {"x-queue-type": "quorum", **self.arguments}
        queue = await channel.declare_queue(
            self.name, durable=True, passive=passive, arguments=arguments
        )
        if not passive:
            await queue.bind(self.source, self.key)


async def establish(
    connection: aio_pika.abc.AbstractConnection,
    parts: tuple[Exchange | Queue, ...],
    declare: Declare,
) -> tuple[Exchange | Queue, ...]:
    """See to it that the parts exist, as ``declare`` says: True makes them, ``passive`` looks, False does neither.

    Returns the parts that ``passive`` may not look at: RabbitMQ from 4.2.6 refuses that to a user without a right on the part.
    Such a refusal says nothing about the part. Publishing and consuming show whether what the relay uses is there.
    Raises Deferred with what is missing, refused or different, and what to do about it.
    """
    missing: list[str] = []
    unseen: list[Exchange | Queue] = []
    for part in parts if declare else ():
        # A channel each: a refusal closes it, and all that is missing is to be named at once.
        async with connection.channel(publisher_confirms=False) as channel:
            try:
                await part.declare(channel, passive=declare == "passive")
            except amqp.ChannelNotFoundEntity:
                missing.append(part.title)
            except ChannelAccessRefused as error:
                if declare is True:
                    remedy = "grant the user configure, read and write on it, or have it made by somebody else and set declare: passive"
                    reason = f"the broker refused to make {part.title} ({broker_message(error)}): {remedy}"
                    raise Deferred(reason, failure="slow", status=403) from None
                unseen.append(part)
            except amqp.ChannelPreconditionFailed as error:
                remedy = (
                    "delete it so that it is made anew, or set declare: passive to use it as it is"
                )
                raise Deferred(
                    f"{part.title} exists and is another than this relay makes ({broker_message(error)}): {remedy}",
                    status=406,
                ) from None
        raise_if_cancelled()
    if missing:
        remedy = "make what is missing, or set declare: true, or declare: false to go without"
        raise Deferred(
            f"the broker has no {', no '.join(missing)}: {remedy}", failure="slow", status=404
        )
    return tuple(unseen)


def not_seen(parts: tuple[Exchange | Queue, ...]) -> str:
    """The end of a sentence that says which parts could not be looked at; empty where there is none."""
    titles = ", ".join(part.title for part in parts)
    return (
        f"; whether these exist is unknown, as the user has no right to look: {titles}"
        if parts
        else ""
    )
