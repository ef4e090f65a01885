"""The routing keys of a fleet, and who may send what under them. Pure.

Agents publish under keys such as ``pulse.<scope>.<relay>``. The hub publishes for one agent under
``to.<scope>.<relay>``, and for all agents of a scope under ``scope.<scope>``. The last word is the
*relay word*: the name of the relay in the characters of a routing key
(`relay.events.names`).

Only the RabbitMQ user and the routing key say which relay a message is about. RabbitMQ checks both
against the rights in `relay.fleet.rabbitmq_definitions`. This module checks them again on arrival,
because RabbitMQ 3.10 checks no topic permission for the CC header and no version does for dead
letters (docs/protocol.md#topic-permissions-and-the-cc-header).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from aiormq.abc import DeliveredMessage

from relay.amqp.message_verification import UnusableMessage, require_publishing_user
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.names import relay_word, routing_word
from relay.fleet.settings import TrustDomain

AgentMessageKind = Literal["event", "relay", "pulse", "vote", "start"]
"""What an agent publishes: the first word of the routing key."""
_MAX_CHANGE_WORD = 20
_MAX_DETAIL_WORD = 64
"""Bytes of the words of a routing key, which has at most 255 with its dots and a scope of 80."""
_SCOPE = re.compile(r"[a-z0-9-]{1,80}")
_WORD = re.compile(r"[a-z0-9_-]{1,80}")
_DETAILED_KINDS = ("event", "relay")
"""The kinds whose keys have two more words: ``event.<change>.<type>.<scope>.<relay>``."""


@dataclass(frozen=True, slots=True)
class AgentRoutingKey:
    """A routing key of an agent's message. ``relay`` is the relay word."""

    kind: AgentMessageKind
    scope: str
    relay: str


@dataclass(frozen=True, slots=True)
class AuthorizedSender:
    """A relay for which a RabbitMQ user may speak. ``relay`` is the relay word."""

    scope: str
    relay: str
    user: str


def report_key(event: CloudEvent, origin: Origin) -> str:
    """Return the routing key under which an agent publishes an ``event.*`` or ``relay.*``."""
    family, _, change = event.name.partition(".")
    words = (
        family,
        routing_word(change, _MAX_CHANGE_WORD),
        routing_word(event.routing_detail, _MAX_DETAIL_WORD),
    )
    return ".".join((*words, origin.scope, relay_word(origin.relay)))


def agent_key(kind: Literal["pulse", "vote", "start"], origin: Origin) -> str:
    """Return the routing key of a pulse, a vote, or the result of a start order."""
    return f"{kind}.{origin.scope}.{relay_word(origin.relay)}"


def command_key(scope: str, relay: str) -> str:
    """Return the routing key of what the hub sends to one agent. ``relay`` is the relay word."""
    return f"to.{scope}.{relay}"


def scope_key(scope: str) -> str:
    """Return the routing key of what the hub sends to all agents of a scope."""
    return f"scope.{scope}"


@lru_cache(maxsize=4096)  # each agent publishes under a few keys again and again
def parse_agent_routing_key(key: str) -> AgentRoutingKey:
    """Return the parts of a routing key of an agent's message. Raises UnusableMessage."""
    kind, *details, scope, relay = words if len(words := key.split(".")) >= 3 else ("", "", "")
    if (
        kind not in get_args(AgentMessageKind)
        or len(details) != (2 if kind in _DETAILED_KINDS else 0)
        or not all(map(_WORD.fullmatch, (*details, relay)))
        or _SCOPE.fullmatch(scope) is None
    ):
        raise UnusableMessage(f"no agent publishes with the routing key {key!r:.300}")
    return AgentRoutingKey(kind, scope, relay)  # type: ignore[arg-type]  # it is one of the kinds


def authorize_sender(
    user: str, key: AgentRoutingKey, domains: Iterable[TrustDomain]
) -> AuthorizedSender:
    """Return the relay that sent a message.

    ``user`` is the ``user_id`` that RabbitMQ has checked. Raises UnusableMessage if the user may
    not speak for the relay of the key.
    """
    for domain in domains:
        if domain.user == user:
            if domain.may_speak_for_relay(key.scope, key.relay):
                return AuthorizedSender(key.scope, key.relay, user)
            raise UnusableMessage(
                f"its user {user!r:.140} may not speak for relay {key.relay} of scope {key.scope}"
            )
    raise UnusableMessage(f"its user {user!r:.140} is the user of no trust domain")


def verify_message_from_agent(
    message: DeliveredMessage, exchange: str, domains: Iterable[TrustDomain]
) -> tuple[AgentRoutingKey, AuthorizedSender]:
    """Return the key and the sender of a message to the hub. Raises UnusableMessage.

    ``exchange`` is the fleet exchange. Nothing in the body has a say in this.
    """
    if message.exchange != exchange:
        raise UnusableMessage(f"it was not published to {exchange}")
    user = require_publishing_user(message)
    _refuse_cc_header(message)
    key = parse_agent_routing_key(message.routing_key or "")
    return key, authorize_sender(user, key, domains)


def verify_command_from_hub(
    message: DeliveredMessage, exchange: str, keys: Collection[str], hub_user: str
) -> str:
    """Return the routing key of a message of the hub. Raises UnusableMessage.

    ``exchange`` is the command exchange, and ``keys`` are those that the agent has bound.
    """
    key = message.routing_key
    if message.exchange != exchange or key is None or key not in keys:
        raise UnusableMessage(
            f"it was not published to {exchange} with a routing key of this agent"
        )
    user = require_publishing_user(message)
    _refuse_cc_header(message)
    if user != hub_user:
        raise UnusableMessage(f"its user {user!r:.140} is not the hub's")
    return key


def _refuse_cc_header(message: DeliveredMessage) -> None:
    # Nobody in a fleet has a use for the header. RabbitMQ removes BCC itself.
    if "CC" in (message.header.properties.headers or {}):
        raise UnusableMessage("it has a CC header, whose keys RabbitMQ 3.10 does not check")
