"""The exchanges and queues of a fleet. The names begin with the name of the event exchange.

The hub makes them, except the queue of an agent. That queue is exclusive, and the broker gives it a
name, so that the rights of the agents cover it. There is no queue for each scope: a fleet of
single VMs would have one quorum queue for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from relay.amqp.topology import (
    ApprovalsQueue,
    Exchange,
    Part,
    Queue,
    approvals_exchange_name,
    approvals_queue_name,
    approvals_topology,
    dead_letter_exchange_name,
    dead_letters_topology,
)
from relay.events.build import Origin
from relay.events.names import relay_word
from relay.fleet.routing import command_key, scope_key

HUB = "hub"
"""The scope of a hub that configures none, and the last word of its approvals queue. No agent has
this scope."""
_APPROVALS_KEY = "approve.*"
DELIVERY_LIMIT = 1_000
"""How often a report may be delivered. A hub that is killed gets what it had not acknowledged."""
MAX_REPORTS = 1_000_000
PULSE_TTL = 120_000
"""Milliseconds. A pulse that is older says nothing about the present."""
AGENT_QUEUE_ARGUMENTS: Mapping[str, Any] = {"x-max-length": 100, "x-message-ttl": 30_000}
"""The arguments of an agent's queue. An order is worth nothing after five seconds."""


def agent_publish_exchange_name(exchange: str) -> str:
    """Return the name of the exchange to which agents publish."""
    return f"{exchange}.fleet"


def command_exchange_name(exchange: str) -> str:
    """Return the name of the exchange to which the hub publishes for agents."""
    return f"{exchange}.commands"


def report_queue_name(exchange: str) -> str:
    """Return the name of the queue of everything that agents publish."""
    return f"{exchange}.fleet.in"


def hub_lock_queue_name(exchange: str) -> str:
    """Return the name of the queue that is exclusive to the connection of the one hub."""
    return f"{exchange}.fleet.hub"


def agent_binding_keys(origin: Origin) -> tuple[str, str]:
    """Return the routing keys with which an agent binds its queue to the command exchange."""
    return command_key(origin.scope, relay_word(origin.relay)), scope_key(origin.scope)


def _dead_letter_keys(exchange: str) -> tuple[str, ...]:
    """Return what is kept of dead letters: all but pulses, of which many expire without a hub.

    A message that somebody put directly into a queue has the name of the queue as its key.
    """
    queues = report_queue_name(exchange), approvals_queue_name(exchange, HUB)
    return ("approve.#", "event.#", "relay.#", "vote.#", "start.#", *queues)


def fleet_topology(exchange: str) -> tuple[Part, ...]:
    """Return what the hub makes on the broker.

    The exchange and queue for dead letters come first, so that no rejected message is lost.
    """
    fleet = agent_publish_exchange_name(exchange)
    return (
        *dead_letters_topology(exchange, _dead_letter_keys(exchange)),
        Exchange(fleet, "topic"),
        Exchange(command_exchange_name(exchange), "topic"),
        Queue(
            name=report_queue_name(exchange),
            source=fleet,
            keys=("event.#", "relay.#", "vote.#", "start.#", "pulse.#"),
            arguments={
                "x-single-active-consumer": True,
                "x-dead-letter-exchange": dead_letter_exchange_name(exchange),
                "x-delivery-limit": DELIVERY_LIMIT,
                "x-max-length": MAX_REPORTS,
                "x-overflow": "reject-publish",
            },
        ),
    )


def hub_approvals_topology(exchange: str, *, limited: bool = True) -> tuple[Part, ...]:
    """Return what a hub makes for approvals over AMQP: one queue for all scopes."""
    return approvals_topology(
        exchange,
        HUB,
        limited=limited,
        routing_key=_APPROVALS_KEY,
        dead_letter_keys=_dead_letter_keys(exchange),
    )


def make_hub_approvals_queue(exchange: str) -> ApprovalsQueue:
    """Return the queue from which a hub takes approvals. The routing key names the scope."""
    return ApprovalsQueue(
        exchange=approvals_exchange_name(exchange),
        name=approvals_queue_name(exchange, HUB),
        binding_key=_APPROVALS_KEY,
        key_pattern=re.compile(r"approve\.(?P<scope>[a-z0-9-]{1,80})"),
        description="all scopes",
        topology=hub_approvals_topology(exchange),
        topology_without_limits=hub_approvals_topology(exchange, limited=False),
    )
