"""The HTTP API: what programs and people call. This module names the parts of the relay it uses.

`server` accepts connections and checks each request, `auth` identifies callers, `routes` holds a
module for each resource, and `schema` describes requests, responses and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from relay.api.settings import ApiSettings, Client
from relay.approvals.decision_handler import DecisionHandler
from relay.chat import ChatSink
from relay.clock import Clock
from relay.delivery.dispatcher import Dispatcher
from relay.events.build import Origin
from relay.outbox.sqlite import Store

__all__ = ["ApiSettings", "Client", "Relay", "SourceHealth"]


class SourceHealth(Protocol):
    """What the API reports about the poller."""

    lost: bool
    """Whether the metadata service gives no usable response."""
    polls: int
    failures: int
    """Polls in a row without a usable response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """The parts of a running relay that the API uses."""

    store: Store
    gate: DecisionHandler
    """The gate; on an agent the way to the hub's."""
    dispatcher: Dispatcher
    source: SourceHealth
    origin: Origin
    clock: Clock
    chats: Mapping[str, ChatSink] = field(default_factory=dict)
    """The chat sinks by name."""
