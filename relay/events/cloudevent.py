"""CloudEvents 1.0 in structured JSON: the only form in which the relay stores and sends events."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import orjson

from relay.events import fast_dataclass

TYPE_PREFIX = "io.imdsrelay."
TYPE_VERSION = ".v1"
CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
PRIORITIES = 4
EVENT, DECISION, RELAY, REFUSAL = range(PRIORITIES)
"""The priorities: ``event.*``; ``startrequest.*``, ``approval.*`` and ``standing-hold.*``;
``relay.*``; ``approval.refused``. Of the events that wait, those of the first priority are sent
first."""


@fast_dataclass(frozen=True, slots=True)
class CloudEvent:
    """One CloudEvent.

    ``attributes`` holds all context attributes, extensions included, as text. ``body`` is the whole
    event as UTF-8 JSON. The journal stores these bytes and every sink sends them.
    """

    attributes: Mapping[str, str]
    data: Mapping[str, Any]
    body: bytes

    @classmethod
    def build(cls, attributes: Mapping[str, str | None], data: Mapping[str, Any]) -> CloudEvent:
        """Make the event and its bytes. Attributes that are None are left out."""
        present = {name: value for name, value in attributes.items() if value is not None}
        body = orjson.dumps({**present, "data": data})
        # A copy of its own size: docs/protocol.md#orjson-does-not-trim-what-it-returns
        return cls(present, data, b"".join((body, b"")))

    @classmethod
    def parse(cls, body: bytes) -> CloudEvent:
        """Read the bytes that ``build`` made. Raises ValueError if they are not JSON."""
        attributes: dict[str, Any] = orjson.loads(body)
        data = attributes.pop("data")
        return cls(attributes, data, body)

    @property
    def id(self) -> str:
        """32 hexadecimal digits. Retries, restarts and relays with equal history give equal ids."""
        return self.attributes["id"]

    @property
    def type(self) -> str:
        """``io.imdsrelay.<family>.<change>.v1``."""
        return self.attributes["type"]

    @property
    def name(self) -> str:
        """``<family>.<change>``. The ``events`` patterns of sinks are compared with it."""
        return event_name(self.type)

    @property
    def subject(self) -> str | None:
        """The EventId as Azure wrote it; the sink of ``relay.*``, the id of a standing hold."""
        return self.attributes.get("subject")

    @property
    def scope(self) -> str:
        """The group of VMs that read the same document."""
        return self.attributes["scope"]

    @property
    def routing_detail(self) -> str:
        """The third word of the routing key: the event type, the name of the sink, or ``none``."""
        if self.name.startswith("relay."):
            return self.subject or "none"
        return self.attributes.get("eventtype", "none")


@lru_cache(maxsize=64)  # there are few types, and each event is asked for its name often
def event_name(event_type: str) -> str:
    """Return ``<family>.<change>`` of a CloudEvents type. Any other text is returned unchanged."""
    return event_type.removeprefix(TYPE_PREFIX).removesuffix(TYPE_VERSION)


def dataschema(name: str) -> str:
    """Return the URI that names the schema of ``data``. It is an identifier, not an address."""
    return f"urn:imdsrelay:schema:{name}{TYPE_VERSION}"


def digest_id(*parts: object) -> str:
    """Return 32 hexadecimal digits over the parts. Equal parts give equal ids on every machine."""
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]


@cache
def is_about_event(name: str) -> bool:
    """Whether CloudEvents with this name are about an event of Azure, and so have its EventId."""
    return not name.startswith(("relay.", "standing-hold."))


@cache
def delivery_priority(name: str) -> int:
    """Return the priority by a name. Refusals are last: a hostile client can cause any number."""
    if name == "approval.refused":
        return REFUSAL
    return {"event": EVENT, "relay": RELAY}.get(name.partition(".")[0], DECISION)
