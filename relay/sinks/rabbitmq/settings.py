"""The section of a RabbitMQ sink in the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from relay.amqp.broker_url import BrokerSettings, Declare, ExchangeName
from relay.settings import Duration
from relay.sinks import SinkSettings


class Settings(SinkSettings, BrokerSettings):
    """A topic exchange on a RabbitMQ."""

    kind: Literal["rabbitmq"]
    exchange: ExchangeName = "azure.scheduledevents"
    """The topic exchange; the unrouted exchange and queue are named after it."""
    declare: Declare = True
    """true: make exchanges and queue; passive: check that they exist; false: take them as given."""
    timeout: Duration = Field(default=15.0, gt=0)
    """How long the broker may take to confirm a message."""
