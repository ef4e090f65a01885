"""The HTTP API: what programs and people call. This module names the parts of the relay it uses.

`server` accepts connections, `calls` takes each call through its checks, `callers` says who makes
it, and `routes` holds a module for each resource. The roles of the
relay (`relay.roles`) make a `Relay` of their parts and attach it to the server while they run.
A relay polls Azure itself, alone or as an agent of a fleet. A hub takes the events from its agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from relay.api.settings import ApiSettings, Client
from relay.approvals.gate import DecisionHandler
from relay.chat import ChatSink
from relay.clock import Clock
from relay.delivery.dispatcher import Dispatcher
from relay.events.build import Origin
from relay.histogram import Histogram
from relay.store.sqlite import Store

if TYPE_CHECKING:  # a relay without a fleet saves the memory of the AMQP libraries
    from relay.amqp.approval_consumer import ApprovalConsumer
    from relay.fleet.hub.hub import Hub
    from relay.fleet.hub.roster import Roster
    from relay.fleet.hub.start_orders import OrderResult

__all__ = ["ApiSettings", "Client", "ConfigurationReloader", "Relay", "SourceHealth"]


class SourceHealth(Protocol):
    """What the API reports about the source of events: the poller, or on a hub the agents."""

    lost: bool
    """Whether the source has given no usable response for too long."""
    polls: int
    """Polls so far; on a hub messages of agents."""
    failures: int
    """Polls in a row without a usable response; on a hub failed connections in a row."""

    @property
    def lost_reason(self) -> str:
        """What it means that the source is lost."""


class PollMeasurements(Protocol):
    """What is measured of the polls of the metadata service."""

    poll_seconds: Histogram

    @property
    def read_age(self) -> float | None:
        """The seconds since the document was last read; None: this process read none yet."""

    @property
    def clock_offset(self) -> float | None:
        """The seconds that our clock is certainly ahead of the service's; None: not known."""


class ConfigurationReloader(Protocol):
    """Reads the configuration again, and takes it over."""

    problem: str | None
    """Why the last reload was refused; None if it was not."""

    async def reload(self, by: str, /) -> Sequence[ChangedKey]:
        """Take over the configuration as it is now. Raises ReloadRefused."""


class ChangedKey(Protocol):
    """A key of the configuration whose value has changed."""

    @property
    def key(self) -> str:
        """Where it is: ``sinks.bus``."""

    @property
    def kind(self) -> Literal["added", "changed", "removed", "moved"]:
        """What has happened to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """The parts of a running relay that the API uses."""

    store: Store
    gate: DecisionHandler
    """Takes approvals, holds and releases. An agent forwards them to the gate of its hub."""
    dispatcher: Dispatcher
    """Delivers what is recorded to the sinks."""
    source: SourceHealth
    origin: Origin
    """The scope and the name of this relay."""
    clock: Clock
    chats: Mapping[str, ChatSink] = field(default_factory=dict)
    """The chat sinks by name."""
    roster: Roster | None = None
    """The agents, on a hub."""
    hub: Hub | None = None
    """What a hub counts."""
    order_results: Mapping[OrderResult, int] = field(default_factory=dict)
    """How the start orders of a hub ended."""
    polling: PollMeasurements | None = None
    """None on a hub, which does not poll."""
    approvals_link: ApprovalConsumer | None = None
    """None without approvals over RabbitMQ."""
