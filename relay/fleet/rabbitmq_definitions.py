"""RabbitMQ definitions of a fleet: its users with the least rights, exchanges and queues. Pure.

The rights are what keeps a compromised VM from speaking for another scope. `relay.fleet.routing`
checks the senders again on arrival.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relay.amqp.broker_url import Declare
from relay.amqp.topology import (
    Exchange,
    Part,
    Queue,
    approvals_queue_name,
    events_topology,
)
from relay.fleet.settings import HubSettings, TrustDomain
from relay.fleet.topology import (
    HUB,
    agent_publish_exchange_name,
    command_exchange_name,
    fleet_topology,
    hub_approvals_topology,
    hub_lock_queue_name,
    report_queue_name,
)

SALT_BYTES = 4
HASH_BYTES = SALT_BYTES + 32
"""Bytes of a hash of a password: salt and SHA-256."""
NOTHING = "^$"
"""The pattern that gives no right."""
ANY_RELAY = "[a-z0-9_-]+"
_OWN_QUEUES = r"amq\.gen-.*"
"""The queues that the broker names. Nobody may choose such a name."""
_SCOPE_CHARACTER, _RELAY_CHARACTER = "[a-z0-9-]", "[a-z0-9_-]"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditionalHubExchange:
    """An exchange that the hub's user needs besides those of the fleet."""

    exchange: str
    declare: Declare
    """Whether the hub makes the exchange and its queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUserWithAdditionalExchanges:
    """The hub's RabbitMQ user, and what the hub does with it besides the fleet."""

    user: str
    sinks: tuple[AdditionalHubExchange, ...] = ()
    """The rabbitmq sinks that send in the same virtual host as the same user."""
    approvals: AdditionalHubExchange | None = None
    """Approvals over AMQP in the same virtual host by the same user."""


def fleet_definitions(
    settings: HubSettings,
    hub: HubUserWithAdditionalExchanges,
    vhost: str,
    password_hashes: Mapping[str, str],
    *,
    all_users: bool = False,
) -> dict[str, Any]:
    """Return the definitions that ``rabbitmqctl import_definitions`` takes.

    Of the users only those with a hash in ``password_hashes`` are listed, or ``all_users``. The
    import of a user without a hash removes the password that it has. A user that is not listed must
    exist before the import.
    """
    domains = settings.domains
    parts = tuple({part.title: part for part in _topology_parts(settings, hub)}.values())
    return {
        "vhosts": [{"name": vhost}],
        "users": [
            _user(user, password_hashes.get(user))
            for user in (hub.user, *(domain.user for domain in domains))
            if all_users or user in password_hashes
        ],
        "permissions": [
            {"vhost": vhost, "user": hub.user, **_hub_rights(settings, hub)},
            *(
                {"vhost": vhost, "user": domain.user, **_agent_rights(settings.exchange)}
                for domain in domains
            ),
        ],
        "topic_permissions": [
            {"vhost": vhost, **entry}
            for entry in _topic_rights_of_all_users(settings, hub, domains)
        ],
        "exchanges": [_exchange(part, vhost) for part in parts if isinstance(part, Exchange)],
        "queues": [_queue(part, vhost) for part in parts if isinstance(part, Queue)],
        "bindings": [
            {
                "vhost": vhost,
                "source": part.source,
                "destination": part.name,
                "destination_type": "queue",
                "routing_key": key,
                "arguments": {},
            }
            for part in parts
            if isinstance(part, Queue)
            for key in part.keys
        ],
    }


def _topology_parts(settings: HubSettings, hub: HubUserWithAdditionalExchanges) -> Iterator[Part]:
    for sink in hub.sinks:
        yield from events_topology(sink.exchange)
    yield from fleet_topology(settings.exchange)
    if hub.approvals is not None:
        yield from hub_approvals_topology(hub.approvals.exchange)


def _hub_rights(settings: HubSettings, hub: HubUserWithAdditionalExchanges) -> dict[str, str]:
    exchange = settings.exchange
    write, read = [command_exchange_name(exchange)], [report_queue_name(exchange)]
    made = list(fleet_topology(exchange)) if settings.declare is True else []
    for sink in hub.sinks:
        write.append(sink.exchange)
        if sink.declare is True:
            made += events_topology(sink.exchange)
    if hub.approvals is not None:
        read.append(approvals_queue_name(hub.approvals.exchange, HUB))
        if hub.approvals.declare is True:
            made += hub_approvals_topology(hub.approvals.exchange)
    names = [part.name for part in made]  # to make a part takes all three rights
    # RabbitMQ 4.2.6 tells how much waits in a queue only to those who may configure it.
    configure = [hub_lock_queue_name(exchange), report_queue_name(exchange)]
    return _rights([*configure, *names], [*write, *names], [*read, *names])


def _agent_rights(exchange: str) -> dict[str, str]:
    reports, commands = agent_publish_exchange_name(exchange), command_exchange_name(exchange)
    return _rights([], [reports], [commands], _OWN_QUEUES)


def _rights(
    configure: Iterable[str], write: Iterable[str], read: Iterable[str], *patterns: str
) -> dict[str, str]:
    """Return the rights to parts by their names, and to all whose names match a pattern."""
    rights = {"configure": configure, "write": write, "read": read}
    # The other characters that a name of an exchange may have mean themselves.
    return {
        right: _any_of_regex([*(name.replace(".", r"\.") for name in names), *patterns])
        for right, names in rights.items()
    }


def _topic_rights_of_all_users(
    settings: HubSettings, hub: HubUserWithAdditionalExchanges, domains: Sequence[TrustDomain]
) -> Iterator[dict[str, str]]:
    fleet = agent_publish_exchange_name(settings.exchange)
    commands = command_exchange_name(settings.exchange)
    every_scope = _matching((text for each in domains for text in each.scopes), _SCOPE_CHARACTER)
    yield {
        "user": hub.user,
        "exchange": commands,
        "write": rf"^(to\.{every_scope}\.{ANY_RELAY}|scope\.{every_scope})$",
        "read": NOTHING,
    }
    for domain in domains:
        scopes = _matching(domain.scopes, _SCOPE_CHARACTER)
        relays = _matching(domain.relays, _RELAY_CHARACTER)
        relays = ANY_RELAY if "*" in domain.relays else relays
        kinds = rf"((event|relay)\.[a-z-]+\.{ANY_RELAY}|vote|start|pulse)"
        yield {
            "user": domain.user,
            "exchange": fleet,
            "write": rf"^{kinds}\.{scopes}\.{relays}$",
            "read": NOTHING,
        }
        yield {
            "user": domain.user,
            "exchange": commands,
            "write": NOTHING,
            "read": rf"^(to\.{scopes}\.{relays}|scope\.{scopes})$",
        }


def _matching(patterns: Iterable[str], character: str) -> str:
    """Return the regular expression of patterns with * and ?. It never matches a dot."""
    return _alternatives(
        dict.fromkeys(
            text.replace("?", character).replace("*", f"{character}*") for text in patterns
        )
    )


def _alternatives(expressions: Iterable[str]) -> str:
    texts = list(expressions)
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _any_of_regex(expressions: Iterable[str]) -> str:
    """Return the regular expression for the whole names that match one of the expressions."""
    texts = list(dict.fromkeys(expressions))
    return f"^{_alternatives(texts)}$" if texts else NOTHING


def hash_password(password: str, salt: bytes) -> str:
    """Return the hash that RabbitMQ stores of a password. ``salt`` are four random bytes."""
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def is_password_hash(text: str) -> bool:
    """Whether a text has the form of such a hash."""
    try:
        return len(base64.b64decode(text, validate=True)) == HASH_BYTES
    except ValueError:
        return False


def _user(name: str, password_hash: str | None) -> dict[str, Any]:
    user: dict[str, Any] = {"name": name, "tags": []}
    if password_hash is not None:
        user["password_hash"] = password_hash
        user["hashing_algorithm"] = "rabbit_password_hashing_sha256"
    return user


def _exchange(part: Exchange, vhost: str) -> dict[str, Any]:
    return {
        "vhost": vhost,
        "name": part.name,
        "type": part.type,
        "durable": True,
        "auto_delete": False,
        "internal": False,
        "arguments": dict(part.arguments),
    }


def _queue(part: Queue, vhost: str) -> dict[str, Any]:
    return {
        "vhost": vhost,
        "name": part.name,
        "durable": True,
        "auto_delete": False,
        "arguments": dict(part.all_arguments),
    }
