"""Checks a broker for ``imds-relay doctor``, without delivering a message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from aio_pika import exceptions as amqp
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from relay.amqp.broker_url import Declare, host_port
from relay.amqp.connection import SETUP_TIMEOUT, GuardedConnection, open_connection
from relay.amqp.failures import broker_message, explain_failure, raise_if_cancelled
from relay.amqp.topology import Part, Queue
from relay.errors import Deferred
from relay.logs import Finding, failure, ok, warning

_REMEDY = "correct the url, or check that the broker runs and lets this VM through"


async def diagnose(
    subject: str,
    urls: Sequence[URL],
    parts: Sequence[Part],
    declare: Declare,
    *,
    reads: Collection[str] = (),
    examine: Callable[[GuardedConnection], Awaitable[list[Finding]]] | None = None,
) -> list[Finding]:
    """Return a finding for each host and, from the first that works, one for each part.

    ``reads`` are the queues from which the user must be allowed to consume. ``examine`` returns
    more findings over the same connection, such as about the rights to publish.
    """
    findings: list[Finding] = []
    checked = False
    for url in urls:
        try:
            async with (
                open_connection(url, "imds-relay doctor") as connection,
                asyncio.timeout(SETUP_TIMEOUT),
            ):
                tls = " with TLS" if url.scheme == "amqps" else ""
                findings.append(ok(subject, f"connected to {host_port(url)}{tls}"))
                if checked:
                    continue
                findings += [
                    await _check_exchange_or_queue(subject, connection, part, declare, reads)
                    for part in parts
                ]
                if examine is not None:
                    findings += await examine(connection)
                checked = True
        except Deferred as error:
            problem = error.reason.removesuffix(f": {error.remedy}")
            findings.append(failure(subject, problem, error.remedy or _REMEDY))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # see `failures`
            raise_if_cancelled()
            problem = f"{host_port(url)}: {explain_failure(error).reason}"
            findings.append(failure(subject, problem, "see the broker's log"))
    return findings


async def _check_exchange_or_queue(
    subject: str,
    connection: GuardedConnection,
    part: Part,
    declare: Declare,
    reads: Collection[str],
) -> Finding:
    title, makes = part.title, declare is True
    async with connection.channel(publisher_confirms=False) as channel:
        try:
            await part.declare(channel, passive=True)
        except amqp.ChannelNotFoundEntity:
            if not makes:
                return failure(
                    subject, f"the broker has no {title}", "make it, or set declare: true"
                )
            later = "the relay makes it, for which its user needs configure"
            return ok(subject, f"{title} is not there yet: {later}")
        except ChannelAccessRefused as error:
            refusal = broker_message(error)
            if makes:
                problem = f"the user has no right on {title} ({refusal})"
                return failure(subject, problem, "grant it configure, write and read on it")
            unknown = f"whether {title} is there is unknown: the user has no right to look"
            # The relay uses only these queues, and the exchange that `check_publish` checks.
            if isinstance(part, Queue) and part.name in reads:
                return warning(subject, f"{unknown} ({refusal})", "grant the user read on it")
            return ok(subject, f"{unknown} ({refusal})")
    return ok(subject, f"{title} is there")


async def check_publish(
    subject: str, connection: GuardedConnection, exchange: str, key: str, remedy: str
) -> Finding | None:
    """Return whether the user may publish; None: there is no exchange.

    The broker checks the rights at once. The transaction is rolled back, so that no queue gets the
    message.
    """
    async with connection.channel(publisher_confirms=False) as channel:
        raw = await channel.get_underlay_channel()
        try:
            await raw.tx_select()
            await raw.basic_publish(b"", exchange=exchange, routing_key=key)
            await raw.tx_rollback()
        except ChannelAccessRefused as error:
            problem = f"the user may not publish with the key {key} ({broker_message(error)})"
            return failure(subject, problem, remedy)
        except amqp.ChannelNotFoundEntity:
            return None
    return ok(subject, f"the user may publish to {exchange} with the key {key}")
