"""RabbitMQ: each event is a persistent message on a topic exchange, with publisher confirm.

This module is what the contract in `relay.sinks` asks for. The sink itself is in `sink`, which
needs the AMQP libraries. It is imported only when a sink is connected or checked: a relay without
RabbitMQ saves their memory.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Literal

from pydantic import Field

from relay.amqp.broker_url import BrokerSettings, Declare, ExchangeName
from relay.clock import Clock
from relay.logs import Finding
from relay.settings import Duration
from relay.sinks import Sink, SinkSettings


class Settings(SinkSettings, BrokerSettings):
    """A topic exchange on a RabbitMQ."""

    kind: Literal["rabbitmq"]
    exchange: ExchangeName = "azure.scheduledevents"
    """The topic exchange; the unrouted exchange and queue are named after it."""
    declare: Declare = True
    """true: make exchanges and queue; passive: check that they exist; false: take them as given."""
    timeout: Duration = Field(default=15.0, gt=0)
    """How long a message waits while an alarm of the broker lets nobody publish."""


def connect(settings: Settings, clock: Clock) -> AbstractAsyncContextManager[Sink]:
    from relay.sinks.rabbitmq import sink  # noqa: PLC0415  # see the module's docstring

    return sink.connect(settings, clock)


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature is the same for all sinks
    """Check whether the broker answers, has what is needed, and lets the user publish."""
    from relay.sinks.rabbitmq import sink  # noqa: PLC0415  # see the module's docstring

    return await sink.diagnose(settings, scope)
