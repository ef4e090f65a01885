"""CloudEvents 1.0 in structured JSON: the one form in which the relay writes, stores and sends what it says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

TYPE_PREFIX = "io.imdsrelay."
TYPE_VERSION = ".v1"
CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"


@dataclass(frozen=True, slots=True)
class CloudEvent:
    """One CloudEvent as it goes out.

    ``attributes`` are all context attributes, extensions included, as text. ``body`` is the whole event as UTF-8 JSON:
    the very bytes that were journalled, and that every sink sends.
    """

    attributes: Mapping[str, str]
    data: Mapping[str, Any]
    body: bytes

    @classmethod
    def build(cls, attributes: Mapping[str, str | None], data: Mapping[str, Any]) -> CloudEvent:
        """Make the event and its bytes; attributes that are None are left out."""
        kept = {name: value for name, value in attributes.items() if value is not None}
        return cls(kept, data, orjson.dumps({**kept, "data": data}))

    @classmethod
    def parse(cls, body: bytes) -> CloudEvent:
        """Read back what ``build`` made. Raises ValueError for anything that is not JSON."""
        fields: dict[str, Any] = orjson.loads(body)
        data = fields.pop("data")
        return cls(fields, data, body)

    @property
    def id(self) -> str:
        """32 hexadecimal digits, constant over retries, restarts and relays with the same history."""
        return self.attributes["id"]

    @property
    def type(self) -> str:
        """``io.imdsrelay.<family>.<change>.v1``."""
        return self.attributes["type"]

    @property
    def name(self) -> str:
        """``<family>.<change>``: what sinks' ``events`` patterns are compared with."""
        return event_name(self.type)

    @property
    def subject(self) -> str | None:
        """The EventId as Azure wrote it; for ``relay.*`` the sink it is about, or None."""
        return self.attributes.get("subject")

    @property
    def scope(self) -> str:
        """The group of VMs that reads the same document."""
        return self.attributes["scope"]

    @property
    def routing_detail(self) -> str:
        """Third word of the routing key: the event type, or the sink's name, or ``none``."""
        if self.name.startswith("relay."):
            return self.subject or "none"
        return self.attributes.get("eventtype", "none")


def event_name(event_type: str) -> str:
    """``<family>.<change>`` of a CloudEvents type; what is no type of ours stays as it is."""
    return event_type.removeprefix(TYPE_PREFIX).removesuffix(TYPE_VERSION)


def digest_id(*parts: object) -> str:
    """32 hexadecimal digits over the parts; equal parts give equal ids on every machine."""
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
