"""RabbitMQ definitions of a fleet: its users with the least rights, exchanges and queues. Pure.

The rights are what keeps a compromised VM from speaking for another scope. `relay.fleet.routing`
checks the senders again on arrival.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from relay.amqp.broker_url import Declare
from relay.amqp.topology import Exchange, Part, Queue, events_topology
from relay.fleet.routing import (
    agent_publish_exchange_name,
    command_exchange_name,
    fleet_topology,
    hub_approvals_queue,
    hub_lock_queue_name,
    report_queue_name,
)
from relay.fleet.settings import HubSettings

SALT_BYTES = 4
_NOTHING = "^$"
_ANY_RELAY = "[a-z0-9_-]+"
_OWN_QUEUES = r"amq\.gen-.*"
"""The queues that the broker names. Nobody may choose such a name."""
_SCOPE_CHARACTER, _RELAY_CHARACTER = "[a-z0-9-]", "[a-z0-9_-]"


class Use(NamedTuple):
    """What the hub's user does in the virtual host: it may make parts, write and read."""

    parts: tuple[Part, ...]
    declare: Declare
    write: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


def use_for_sink(exchange: str, declare: Declare) -> Use:
    return Use(events_topology(exchange), declare, write=(exchange,))


def use_for_approvals(exchange: str, declare: Declare) -> Use:
    queue = hub_approvals_queue(exchange)
    return Use(queue.topology, declare, read=(queue.name,))


def fleet_definitions(
    settings: HubSettings,
    hub_user: str,
    vhost: str,
    password_hashes: Mapping[str, str],
    others: Sequence[Use] = (),
) -> dict[str, Any]:
    """Return the definitions that ``rabbitmqctl import_definitions`` takes.

    ``others`` is what the hub does as the same user in the same virtual host besides the fleet. Of
    the users only those with a hash in ``password_hashes`` are listed: the import of a user without
    one removes the password that it has. A user that is not listed must exist before.
    """
    exchange = settings.exchange
    reports, commands = agent_publish_exchange_name(exchange), command_exchange_name(exchange)
    read = (report_queue_name(exchange),)
    fleet = Use(fleet_topology(exchange), settings.declare, write=(commands,), read=read)
    uses = (fleet, *others)
    # What is only written to comes first: the exchanges of the sinks.
    all_parts = (part for use in sorted(uses, key=lambda use: bool(use.read)) for part in use.parts)
    parts = tuple({part.title: part for part in all_parts}.values())
    queues = [part for part in parts if isinstance(part, Queue)]
    agents = _rights([], [reports], [commands], _OWN_QUEUES)
    definitions: dict[str, list[dict[str, Any]]] = {
        "users": [
            {
                "name": user,
                "tags": [],
                "password_hash": password_hashes[user],
                "hashing_algorithm": "rabbit_password_hashing_sha256",
            }
            for user in (hub_user, *(domain.user for domain in settings.domains))
            if user in password_hashes
        ],
        "permissions": [
            {"user": hub_user, **_hub_rights(exchange, uses)},
            *({"user": domain.user, **agents} for domain in settings.domains),
        ],
        "topic_permissions": list(_topic_rights(settings, hub_user)),
        "exchanges": [
            {
                "name": part.name,
                "type": part.type,
                "durable": True,
                "auto_delete": False,
                "internal": False,
                "arguments": dict(part.arguments),
            }
            for part in parts
            if isinstance(part, Exchange)
        ],
        "queues": [
            {
                "name": part.name,
                "durable": True,
                "auto_delete": False,
                "arguments": dict(part.all_arguments),
            }
            for part in queues
        ],
        "bindings": [
            {
                "source": part.source,
                "destination": part.name,
                "destination_type": "queue",
                "routing_key": key,
                "arguments": {},
            }
            for part in queues
            for key in part.keys
        ],
    }
    return {"vhosts": [{"name": vhost}]} | {
        kind: [each if kind == "users" else {"vhost": vhost, **each} for each in entries]
        for kind, entries in definitions.items()
    }


def _hub_rights(exchange: str, uses: Sequence[Use]) -> dict[str, str]:
    # To make a part takes all three rights.
    made = [part.name for use in uses if use.declare is True for part in use.parts]
    write = [name for use in uses for name in use.write]
    read = [name for use in uses for name in use.read]
    # RabbitMQ 4.2.6 tells how much waits in a queue only to those who may configure it.
    configure = [hub_lock_queue_name(exchange), report_queue_name(exchange)]
    return _rights([*configure, *made], [*write, *made], [*read, *made])


def _rights(
    configure: Iterable[str], write: Iterable[str], read: Iterable[str], *patterns: str
) -> dict[str, str]:
    rights = {"configure": configure, "write": write, "read": read}
    # The other characters that a name of an exchange may have mean themselves.
    expressions = {
        right: [*(name.replace(".", r"\.") for name in names), *patterns]
        for right, names in rights.items()
    }
    return {right: f"^{_any_of(texts)}$" for right, texts in expressions.items()}


def _topic_rights(settings: HubSettings, hub_user: str) -> Iterator[dict[str, str]]:
    fleet = agent_publish_exchange_name(settings.exchange)
    commands = command_exchange_name(settings.exchange)
    every_scope = _matching(
        (text for domain in settings.domains for text in domain.scopes), _SCOPE_CHARACTER
    )
    to_agents = rf"^(to\.{every_scope}\.{_ANY_RELAY}|scope\.{every_scope})$"
    yield {"user": hub_user, "exchange": commands, "write": to_agents, "read": _NOTHING}
    for domain in settings.domains:
        scopes = _matching(domain.scopes, _SCOPE_CHARACTER)
        relays = _matching(domain.relays, _RELAY_CHARACTER)
        relays = _ANY_RELAY if "*" in domain.relays else relays
        kinds = rf"((event|relay)\.[a-z-]+\.{_ANY_RELAY}|vote|start|pulse)"
        said = rf"^{kinds}\.{scopes}\.{relays}$"
        heard = rf"^(to\.{scopes}\.{relays}|scope\.{scopes})$"
        yield {"user": domain.user, "exchange": fleet, "write": said, "read": _NOTHING}
        yield {"user": domain.user, "exchange": commands, "write": _NOTHING, "read": heard}


def _matching(patterns: Iterable[str], character: str) -> str:
    """Return the regular expression of patterns with * and ?. It never matches a dot."""
    return _any_of(text.replace("?", character).replace("*", f"{character}*") for text in patterns)


def _any_of(expressions: Iterable[str]) -> str:
    texts = list(dict.fromkeys(expressions))
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def hash_password(password: str, salt: bytes) -> str:
    """Return the hash that RabbitMQ stores of a password. ``salt`` are four random bytes."""
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def is_password_hash(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == SALT_BYTES + 32
    except ValueError:
        return False
