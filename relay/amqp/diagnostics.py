"""Looks at a broker for `doctor`: connects, sees what exists, and asks for rights without a message getting anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import aiormq
from aio_pika import exceptions as amqp
from aiormq.exceptions import ChannelAccessRefused
from pamqp.commands import Basic
from yarl import URL

from relay.amqp.broker_url import host_port
from relay.amqp.cancellation import is_cancelled
from relay.amqp.connection import SETUP_TIMEOUT, Connection, connected
from relay.amqp.failures import broker_message, describe_failure
from relay.amqp.topology import Declare, Exchange, Queue
from relay.diagnostics import Finding, failure, ok, warning
from relay.errors import Deferred

_NEVER = "never"
"""An expiration that is none: a broker that lets us write refuses the message for it, and keeps it from every queue."""


async def diagnose(
    about: str,
    urls: Sequence[URL],
    parts: Sequence[Exchange | Queue],
    declare: Declare,
    *,
    writes: tuple[str, str] | None = None,
    reads: str | None = None,
) -> list[Finding]:
    """A finding for each host, and what one of them says of the parts.

    ``writes``: the exchange, and a routing key, with which the user must be allowed to publish. ``reads``: the queue that the
    user must be allowed to consume from.
    """
    findings: list[Finding] = []
    looked = False
    for url in urls:
        try:
            async with (
                connected(url, "imds-relay doctor") as connection,
                asyncio.timeout(SETUP_TIMEOUT),
            ):
                findings.append(
                    ok(
                        about,
                        f"connected to {host_port(url)}{' with TLS' if url.scheme == 'amqps' else ''}",
                    )
                )
                if not looked:
                    findings.extend(
                        [await _exists(about, connection, part, declare, reads) for part in parts]
                    )
                    findings.extend(
                        [await _may_write(about, connection, *writes)] if writes is not None else []
                    )
                    looked = True
        except Deferred as error:
            findings.append(
                failure(
                    about,
                    error.reason,
                    "correct the url, or see that the broker runs and lets this VM through",
                )
            )
        except (Exception, asyncio.CancelledError) as error:  # aiormq cancels whom nobody cancelled
            if is_cancelled():
                raise
            findings.append(
                failure(
                    about,
                    f"{host_port(url)}: {describe_failure(error).reason}",
                    "see the broker's log",
                )
            )
    return findings


async def _exists(
    about: str, connection: Connection, part: Exchange | Queue, declare: Declare, reads: str | None
) -> Finding:
    async with connection.channel(publisher_confirms=False) as channel:
        try:
            await part.declare(channel, passive=True)
        except amqp.ChannelNotFoundEntity:
            if declare is True:
                return ok(
                    about,
                    f"{part.title} is not there yet: the relay makes it, for which its user needs configure",
                )
            return failure(
                about, f"the broker has no {part.title}", "make it, or set declare: true"
            )
        except ChannelAccessRefused as error:
            if declare is True:
                return failure(
                    about,
                    f"the user has no right on {part.title} ({broker_message(error)})",
                    "grant it configure, write and read on it",
                )
            unknown = f"whether {part.title} is there is unknown: the user has no right to look ({broker_message(error)})"
            # Of the parts the relay itself uses the exchange, for which `_may_write` asks, and this queue.
            is_read = isinstance(part, Queue) and part.name == reads
            return (
                warning(about, unknown, "grant the user read on it")
                if is_read
                else ok(about, unknown)
            )
    return ok(about, f"{part.title} is there")


async def _may_write(about: str, connection: Connection, exchange: str, key: str) -> Finding:
    async with connection.channel() as channel:
        wire = cast("aiormq.Channel", await channel.get_underlay_channel())
        try:
            await wire.basic_publish(
                b"",
                exchange=exchange,
                routing_key=key,
                properties=Basic.Properties(expiration=_NEVER),
            )
        except ChannelAccessRefused as error:
            return failure(
                about,
                f"the user may not publish ({broker_message(error)})",
                "grant it write on the exchange, and on the topic",
            )
        except amqp.ChannelPreconditionFailed:
            return ok(about, f"the user may publish to {exchange}")
        except amqp.ChannelNotFoundEntity:
            return ok(about, f"whether the user may publish shows when {exchange} is there")
    return warning(
        about,
        "whether the user may publish could not be seen",
        "see the rights of the user on the broker",
    )
