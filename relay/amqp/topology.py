"""The exchanges and queues on the broker: which there are, and how they are made or checked.

docs/rabbitmq.md#what-is-on-the-broker lists them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aio_pika import exceptions as amqp
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelAccessRefused

from relay.amqp.broker_url import Declare
from relay.amqp.failures import broker_message, raise_if_cancelled
from relay.errors import Deferred

MAX_UNROUTED_MESSAGES = 10_000
MAX_DEAD_LETTERS = 10_000
MAX_APPROVALS = 1_000
MAX_APPROVALS_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Exchange:
    name: str
    type: Literal["topic", "fanout"]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"exchange {self.name}"

    async def declare(self, channel: AbstractChannel, *, passive: bool) -> None:
        """Make the exchange; if ``passive``, only check it. Raises what aio-pika raises."""
        await channel.declare_exchange(
            self.name, self.type, durable=True, passive=passive, arguments=dict(self.arguments)
        )


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable quorum queue, bound to the exchange ``source`` with each of the ``keys``."""

    name: str
    source: str
    keys: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"queue {self.name}"

    @property
    def all_arguments(self) -> Mapping[str, Any]:
        return {"x-queue-type": "quorum", **self.arguments}

    async def declare(self, channel: AbstractChannel, *, passive: bool) -> None:
        """Make and bind the queue; if ``passive``, only check it. Raises what aio-pika raises."""
        queue = await channel.declare_queue(
            self.name, durable=True, passive=passive, arguments=dict(self.all_arguments)
        )
        if not passive:
            for key in self.keys:
                await queue.bind(self.source, key)


Part = Exchange | Queue


def events_topology(exchange: str) -> tuple[Part, ...]:
    """Return what the sink makes; that for unrouted messages first, so that none is lost."""
    unrouted = f"{exchange}.unrouted"
    return (
        Exchange(unrouted, "fanout"),
        Queue(unrouted, unrouted, keys=("",), arguments={"x-max-length": MAX_UNROUTED_MESSAGES}),
        Exchange(exchange, "topic", {"alternate-exchange": unrouted}),
    )


def approvals_queue_name(exchange: str, scope: str) -> str:
    return f"{exchange}.approvals.{scope}"


def dead_letter_exchange_name(exchange: str) -> str:
    return f"{exchange}.dlx"


def dead_letters_topology(exchange: str, keys: tuple[str, ...] = ("#",)) -> tuple[Part, ...]:
    """Return the exchange and queue for messages that could not be used."""
    dead_letters, limit = dead_letter_exchange_name(exchange), {"x-max-length": MAX_DEAD_LETTERS}
    return (
        Exchange(dead_letters, "topic"),
        Queue(f"{exchange}.dead", dead_letters, keys=keys, arguments=limit),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalsQueue:
    """The queue from which a relay takes approvals, and whose approvals it holds."""

    exchange: str
    name: str
    binding_key: str
    key_pattern: re.Pattern[str]
    """The routing keys of its messages. Its group ``scope``, if any, is the scope that they name.

    Without that group the queue is for one scope.
    """
    description: str
    """Whose approvals these are, such as ``prod``."""
    topology: tuple[Part, ...]
    """What ``declare: true`` makes: that for dead letters first, so that none is lost."""


def approvals_queue(
    exchange: str,
    scope: str,
    *,
    key: str | None = None,
    key_pattern: str | None = None,
    dead_letter_keys: tuple[str, ...] = ("#",),
) -> ApprovalsQueue:
    """``key`` and ``key_pattern``: those of a queue for all scopes, whose own name is ``scope``."""
    binding_key = key or f"approve.{scope}"
    approvals, name = f"{exchange}.approvals", approvals_queue_name(exchange, scope)
    return ApprovalsQueue(
        exchange=approvals,
        name=name,
        binding_key=binding_key,
        key_pattern=re.compile(key_pattern or re.escape(binding_key)),
        description="all scopes" if key else scope,
        topology=(
            *dead_letters_topology(exchange, dead_letter_keys),
            Exchange(approvals, "topic"),
            Queue(
                name,
                approvals,
                keys=(binding_key,),
                arguments={
                    "x-single-active-consumer": True,
                    "x-dead-letter-exchange": dead_letter_exchange_name(exchange),
                    "x-max-length": MAX_APPROVALS,
                    "x-max-length-bytes": MAX_APPROVALS_BYTES,
                    "x-overflow": "reject-publish",
                },
            ),
        ),
    )


async def declare_topology(
    connection: AbstractConnection, parts: Sequence[Part], declare: Declare
) -> str:
    """Make or check the parts, as ``declare`` says.

    Returns the end of a sentence that names the parts that could not be checked, if any: RabbitMQ
    from 4.2.6 refuses ``passive`` to a user without a right on the part. Publishing and consuming
    then show whether it exists. Raises Deferred with what is missing, refused or different, and the
    remedy.
    """
    if declare is False:
        return ""
    missing: list[str] = []
    unknown: list[str] = []
    for part in parts:
        # One channel for each part: a refusal closes it, and the error names all that is missing.
        async with connection.channel(publisher_confirms=False) as channel:
            try:
                await part.declare(channel, passive=declare == "passive")
            except amqp.ChannelNotFoundEntity:
                missing.append(part.title)
            except ChannelAccessRefused as error:
                if declare is True:
                    raise Deferred(
                        f"the broker refused to make {part.title} ({broker_message(error)}): grant "
                        "the user configure, read and write on it, or make it yourself and set "
                        "declare: passive",
                        status=403,
                    ) from None
                unknown.append(part.title)
            except amqp.ChannelPreconditionFailed as error:
                raise Deferred(
                    f"{part.title} already exists with different arguments "
                    f"({broker_message(error)}): delete it so that the relay makes it again, "
                    "or set declare: passive to use it as it is",
                    status=406,
                ) from None
        raise_if_cancelled()
    if missing:
        raise Deferred(
            f"the broker has no {', no '.join(missing)}: make what is missing, "
            "or set declare: true, or declare: false to go without",
            status=404,
        )
    if not unknown:
        return ""
    reason = "because the user may not check them"
    return f"; whether these exist is unknown, {reason}: {', '.join(unknown)}"
