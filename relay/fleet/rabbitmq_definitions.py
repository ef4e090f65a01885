"""RabbitMQ definitions of a fleet: its users with the least rights, exchanges and queues. Pure.

The rights are what keeps a compromised VM from speaking for another scope. `relay.fleet.routing`
checks the senders again on arrival.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
_WORD_CHARACTERS = {"scopes": "[a-z0-9-]", "relays": "[a-z0-9_-]"}


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


@dataclass(slots=True)
class _Rights:
    """The names that a user may configure, write and read, as regular expressions."""

    configure: list[str] = field(default_factory=list)
    write: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)

    def add_declare_rights(self, parts: Iterable[Part]) -> None:
        """Add what it takes to make these parts."""
        for part in parts:
            for names in (self.configure, self.write, self.read):
                names.append(_escape_regex_dots(part.name))

    def to_fields(self) -> dict[str, str]:
        return {
            "configure": _any_of_regex(self.configure),
            "write": _any_of_regex(self.write),
            "read": _any_of_regex(self.read),
        }


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
            {"vhost": vhost, "user": hub.user, **_hub_rights(settings, hub).to_fields()},
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


def _hub_rights(settings: HubSettings, hub: HubUserWithAdditionalExchanges) -> _Rights:
    exchange = settings.exchange
    rights = _Rights()
    rights.write.append(_escape_regex_dots(command_exchange_name(exchange)))
    rights.read.append(_escape_regex_dots(report_queue_name(exchange)))
    rights.configure.append(_escape_regex_dots(hub_lock_queue_name(exchange)))
    if settings.declare is True:
        rights.add_declare_rights(fleet_topology(exchange))
    for sink in hub.sinks:
        rights.write.append(_escape_regex_dots(sink.exchange))
        if sink.declare is True:
            rights.add_declare_rights(events_topology(sink.exchange))
    if hub.approvals is not None:
        rights.read.append(_escape_regex_dots(approvals_queue_name(hub.approvals.exchange, HUB)))
        if hub.approvals.declare is True:
            rights.add_declare_rights(hub_approvals_topology(hub.approvals.exchange))
    return rights


def _agent_rights(exchange: str) -> dict[str, str]:
    return {
        "configure": _any_of_regex([_OWN_QUEUES]),
        "write": _any_of_regex(
            [_escape_regex_dots(agent_publish_exchange_name(exchange)), _OWN_QUEUES]
        ),
        "read": _any_of_regex([_escape_regex_dots(command_exchange_name(exchange)), _OWN_QUEUES]),
    }


def _topic_rights_of_all_users(
    settings: HubSettings, hub: HubUserWithAdditionalExchanges, domains: Sequence[TrustDomain]
) -> Iterator[dict[str, str]]:
    fleet, commands = (
        agent_publish_exchange_name(settings.exchange),
        command_exchange_name(settings.exchange),
    )
    every_scope = _alternatives(
        dict.fromkeys(
            _scope_or_relay_glob_to_regex("scopes", text)
            for domain in domains
            for text in domain.scopes
        )
    )
    yield {
        "user": hub.user,
        "exchange": commands,
        "write": rf"^(to\.{every_scope}\.{ANY_RELAY}|scope\.{every_scope})$",
        "read": NOTHING,
    }
    for domain in domains:
        scopes = _alternatives(
            _scope_or_relay_glob_to_regex("scopes", text) for text in domain.scopes
        )
        relays = (
            ANY_RELAY
            if "*" in domain.relays
            else _alternatives(
                _scope_or_relay_glob_to_regex("relays", text) for text in domain.relays
            )
        )
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


def _scope_or_relay_glob_to_regex(kind: str, text: str) -> str:
    """Return the regular expression of a pattern with * and ?. It never matches a dot."""
    word = _WORD_CHARACTERS[kind]
    return text.replace("?", word).replace("*", f"{word}*")


def _alternatives(expressions: Iterable[str]) -> str:
    texts = list(expressions)
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _any_of_regex(expressions: Iterable[str]) -> str:
    """Return the regular expression for the whole names that match one of the expressions."""
    texts = list(dict.fromkeys(expressions))
    return f"^{_alternatives(texts)}$" if texts else NOTHING


def _escape_regex_dots(name: str) -> str:
    # The other characters that a name of an exchange may have mean themselves.
    return name.replace(".", r"\.")


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
