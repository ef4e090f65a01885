"""The routing keys of a fleet, and who may send what under them. Pure.

Agents publish under keys such as ``pulse.<scope>.<relay>``. The hub publishes for one agent under
``to.<scope>.<relay>``, and for all agents of a scope under ``scope.<scope>``. The last word is the
*relay word*: the name of the relay in the characters of a routing key (`relay.events.model`).

Only the RabbitMQ user and the routing key say which relay a message is about. RabbitMQ checks both
against the rights in `relay.fleet.rabbitmq_definitions`. This module checks them again on arrival,
because RabbitMQ 3.10 checks no topic permission for the CC header and no version does for dead
letters (docs/protocol.md#topic-permissions-and-the-cc-header).

The hub makes the exchanges and queues, except the queue of an agent: the broker gives that its
name, so that the rights of the agents cover it. There is no queue for each scope: each VM that is a
scope of its own would have a quorum queue.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from aiormq.abc import DeliveredMessage

from relay.amqp.connection import UnusableMessage, require_publishing_user
from relay.amqp.topology import (
    ApprovalsQueue,
    Exchange,
    Part,
    Queue,
    approvals_queue,
    approvals_queue_name,
    dead_letter_exchange_name,
    dead_letters_topology,
)
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.model import relay_word, routing_word
from relay.fleet.settings import TrustDomain

_WORD = "[a-z0-9_-]{1,80}"
_AGENT_KEY = re.compile(
    rf"(?:(event|relay)\.{_WORD}\.{_WORD}|(pulse|vote|start))\.([a-z0-9-]{{1,80}})\.({_WORD})"
)
"""What an agent publishes, its scope and its relay word.

A report has two words before them, as in ``event.<change>.<type>.<scope>.<relay>``.
"""


@dataclass(frozen=True, slots=True)
class AuthorizedSender:
    """A relay for which a RabbitMQ user may speak. ``relay`` is the relay word."""

    scope: str
    relay: str
    user: str


def report_key(event: CloudEvent, origin: Origin) -> str:
    """Return the routing key under which an agent publishes an ``event.*`` or ``relay.*``."""
    family, _, change = event.name.partition(".")
    # It has at most 255 bytes, with its dots, a scope of 80 and a relay word of 80.
    words = (family, routing_word(change, 20), routing_word(event.routing_detail, 64))
    return ".".join((*words, origin.scope, relay_word(origin.relay)))


def agent_key(kind: Literal["pulse", "vote", "start"], origin: Origin) -> str:
    return f"{kind}.{origin.scope}.{relay_word(origin.relay)}"


def command_key(scope: str, relay: str) -> str:
    """Return the routing key of what the hub sends to one agent. ``relay`` is the relay word."""
    return f"to.{scope}.{relay}"


def scope_key(scope: str) -> str:
    return f"scope.{scope}"


@lru_cache(maxsize=4096)  # each agent publishes under a few keys again and again
def parse_agent_routing_key(key: str) -> tuple[str, str, str]:
    """Return the kind of an agent's message, its scope and relay word. Raises UnusableMessage."""
    match = _AGENT_KEY.fullmatch(key)
    if match is None:
        raise UnusableMessage(f"no agent publishes with the routing key {key!r:.300}")
    family, kind, scope, relay = match.groups()
    return family or kind, scope, relay


def verify_message_from_agent(
    message: DeliveredMessage, exchange: str, domains: Iterable[TrustDomain]
) -> tuple[str, AuthorizedSender]:
    """Return the kind and the sender; nothing in the body has a say. Raises UnusableMessage."""
    if message.exchange != exchange:
        raise UnusableMessage(f"it was not published to {exchange}")
    user = _user_of(message)
    kind, scope, relay = parse_agent_routing_key(message.routing_key or "")
    for domain in domains:
        if domain.user == user:
            if domain.may_speak_for_relay(scope, relay):
                return kind, AuthorizedSender(scope, relay, user)
            raise UnusableMessage(
                f"its user {user!r:.140} may not speak for relay {relay} of scope {scope}"
            )
    raise UnusableMessage(f"its user {user!r:.140} is the user of no trust domain")


def verify_command_from_hub(
    message: DeliveredMessage, exchange: str, keys: Collection[str], hub_user: str
) -> str:
    """Return the key, which the agent must have bound. Raises UnusableMessage."""
    key = message.routing_key
    if message.exchange != exchange or key is None or key not in keys:
        raise UnusableMessage(
            f"it was not published to {exchange} with a routing key of this agent"
        )
    user = _user_of(message)
    if user != hub_user:
        raise UnusableMessage(f"its user {user!r:.140} is not the hub's")
    return key


def _user_of(message: DeliveredMessage) -> str:
    # Nobody in a fleet has a use for the header. RabbitMQ removes BCC itself.
    if "CC" in (message.header.properties.headers or {}):
        raise UnusableMessage("it has a CC header, whose keys RabbitMQ 3.10 does not check")
    return require_publishing_user(message)


# --- exchanges and queues

HUB = "hub"
"""The scope of a hub that configures none, and the last word of its approvals queue. No agent has
this scope."""
DELIVERY_LIMIT = 1_000
"""How often a report may be delivered. A hub that is killed gets what it had not acknowledged."""
MAX_REPORTS = 1_000_000
PULSE_TTL = 120_000
"""Milliseconds. A pulse that is older says nothing about the present."""
AGENT_QUEUE_ARGUMENTS: Mapping[str, Any] = {"x-max-length": 100, "x-message-ttl": 30_000}
"""The arguments of an agent's queue. An order is worth nothing after five seconds."""


def agent_publish_exchange_name(exchange: str) -> str:
    return f"{exchange}.fleet"


def command_exchange_name(exchange: str) -> str:
    return f"{exchange}.commands"


def report_queue_name(exchange: str) -> str:
    return f"{exchange}.fleet.in"


def hub_lock_queue_name(exchange: str) -> str:
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
    """Return what the hub makes; dead letters come first, so that none is lost."""
    fleet = agent_publish_exchange_name(exchange)
    return (
        *dead_letters_topology(exchange, _dead_letter_keys(exchange)),
        Exchange(fleet, "topic"),
        Exchange(command_exchange_name(exchange), "topic"),
        Queue(
            report_queue_name(exchange),
            fleet,
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


def hub_approvals_queue(exchange: str) -> ApprovalsQueue:
    """Return the queue from which a hub takes approvals. The routing key names the scope."""
    return approvals_queue(
        exchange,
        HUB,
        key="approve.*",
        key_pattern=r"approve\.(?P<scope>[a-z0-9-]{1,80})",
        dead_letter_keys=_dead_letter_keys(exchange),
    )
