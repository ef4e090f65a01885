"""RabbitMQ: each event is a persistent message on a topic exchange, with publisher confirm.

`settings` is the sink's section of the configuration. `sink` needs the AMQP libraries, so it is
imported only when a sink is connected: a relay without RabbitMQ saves their memory.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from relay.clock import Clock
from relay.diagnostics import Finding
from relay.sinks import Sink
from relay.sinks.rabbitmq.settings import Settings

__all__ = ["Settings", "connect", "diagnose"]


def connect(settings: Settings, clock: Clock) -> AbstractAsyncContextManager[Sink]:
    """Stay connected in the background until the context ends. The broker may be down."""
    from relay.sinks.rabbitmq import sink  # noqa: PLC0415  # see the module's docstring

    return sink.connect(settings, clock)


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature is the same for all sinks
    """Check whether the broker answers, has what is needed, and lets the user publish."""
    from relay.sinks.rabbitmq import sink  # noqa: PLC0415  # see the module's docstring

    return await sink.diagnose(settings, scope)
