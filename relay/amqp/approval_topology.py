"""The exchanges and queues of approvals. See docs/rabbitmq.md#what-is-on-the-broker. Pure."""

from __future__ import annotations

from relay.amqp.topology import Exchange, Queue

MAX_DEAD_LETTERS = 10_000


def approvals_exchange(exchange: str) -> str:
    """Return the name of the exchange to which clients publish approvals."""
    return f"{exchange}.approvals"


def approvals_queue(exchange: str, scope: str) -> str:
    """Return the name of the queue that holds the approvals of a scope."""
    return f"{exchange}.approvals.{scope}"


def approvals_routing_key(scope: str) -> str:
    """Return the routing key of the approvals of a scope."""
    return f"approve.{scope}"


def approvals_topology(exchange: str, scope: str) -> tuple[Exchange | Queue, ...]:
    """Return what ``declare: true`` makes.

    The dead-letter exchange and queue come first, so that no rejected message is lost.
    """
    approvals = approvals_exchange(exchange)
    dead_letters = f"{exchange}.dlx"
    return (
        Exchange(dead_letters, "topic"),
        Queue(
            name=f"{exchange}.dead",
            source=dead_letters,
            key="#",
            arguments={"x-max-length": MAX_DEAD_LETTERS},
        ),
        Exchange(approvals, "topic"),
        Queue(
            name=approvals_queue(exchange, scope),
            source=approvals,
            key=approvals_routing_key(scope),
            arguments={
                "x-single-active-consumer": True,
                "x-dead-letter-exchange": dead_letters,
            },
        ),
    )
