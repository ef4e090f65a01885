"""Checks the broker of a fleet for ``imds-relay doctor``, without sending a message."""

from __future__ import annotations

import re

from aio_pika import exceptions as amqp
from aiormq.exceptions import ChannelAccessRefused

from relay.amqp.connection import GuardedConnection
from relay.amqp.diagnostics import check_publish
from relay.amqp.diagnostics import diagnose as diagnose_broker
from relay.amqp.failures import broker_message
from relay.events.build import Origin
from relay.fleet.routing import (
    AGENT_QUEUE_ARGUMENTS,
    agent_binding_keys,
    agent_key,
    agent_publish_exchange_name,
    command_exchange_name,
    fleet_topology,
    report_queue_name,
    scope_key,
)
from relay.fleet.settings import AgentSettings, HubSettings
from relay.logs import Finding, failure, ok, warning

_SUBJECT = "fleet"
_REMEDY = "grant it the rights that `imds-relay fleet definitions` prints"


async def diagnose_broker_for_hub(settings: HubSettings) -> list[Finding]:
    """Check whether the broker has what a hub needs, and lets its user order and consume."""
    exchange = settings.exchange
    scope = re.sub("[*?]", "x", settings.domains[0].scopes[0])  # a scope of the first domain

    async def examine(connection: GuardedConnection) -> list[Finding]:
        return [await _check_publish(connection, command_exchange_name(exchange), scope_key(scope))]

    return await diagnose_broker(
        _SUBJECT,
        settings.broker_urls(),
        fleet_topology(exchange) if settings.declare else (),
        settings.declare,
        reads=(report_queue_name(exchange),),
        examine=examine,
    )


async def diagnose_broker_for_agent(
    settings: AgentSettings, origin: Origin | None
) -> list[Finding]:
    """Check whether the broker lets the user of an agent report, and hear the hub.

    Without an ``origin`` it is unknown what the agent would report for.
    """

    async def examine(connection: GuardedConnection) -> list[Finding]:
        if origin is None:
            return []
        exchange = agent_publish_exchange_name(settings.exchange)
        return [
            await _check_publish(connection, exchange, agent_key("pulse", origin)),
            await _check_can_receive_commands(connection, settings, origin),
        ]

    return await diagnose_broker(
        _SUBJECT, settings.broker_urls(), (), declare=False, examine=examine
    )


async def _check_publish(connection: GuardedConnection, exchange: str, key: str) -> Finding:
    finding = await check_publish(_SUBJECT, connection, exchange, key, _REMEDY)
    return finding or _missing_exchange(exchange)


def _missing_exchange(exchange: str) -> Finding:
    return warning(
        _SUBJECT,
        f"the broker has no exchange {exchange}",
        "start the hub, which makes it, or import what `imds-relay fleet definitions` prints",
    )


async def _check_can_receive_commands(
    connection: GuardedConnection, settings: AgentSettings, origin: Origin
) -> Finding:
    """Bind a queue as the agent does. It ends with the connection."""
    exchange = command_exchange_name(settings.exchange)
    async with connection.channel(publisher_confirms=False) as channel:
        try:
            queue = await channel.declare_queue(
                exclusive=True, arguments=dict(AGENT_QUEUE_ARGUMENTS)
            )
            for key in agent_binding_keys(origin):
                await queue.bind(exchange, key)
        except ChannelAccessRefused as error:
            return failure(
                _SUBJECT, f"the user may not hear the hub ({broker_message(error)})", _REMEDY
            )
        except amqp.ChannelNotFoundEntity:
            return _missing_exchange(exchange)
    return ok(_SUBJECT, "the user may hear the hub")
