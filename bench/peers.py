"""What other systems did: cited figures, which a run does not measure again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One system. A value that was not measured is None.

    ``one`` and ``ten`` are deliveries a second and CPU milliseconds for each delivery, to 1 and to
    10 endpoints. ``latency`` is p50 and p99 in milliseconds. ``memory`` is the peak in MB.
    """

    name: str
    one: tuple[float, float]
    ten: tuple[float, float] | None = None
    latency: tuple[float, float] | None = None
    memory: str | None = None


PEERS = (
    Peer(
        name="Hookaido (Go)",
        one=(1212, 0.78),
        ten=(852, 1.13),
        latency=(1.5, 3.2),
        memory="31 to 42",
    ),
    Peer(
        name="Svix (Rust)",
        one=(1419, 1.14),
        ten=(5769, 0.29),
        latency=(1.7, 4.2),
        memory="50 to 64",
    ),
    Peer(
        name="Outpost (Go)",
        one=(1967, 0.77),
        ten=(3260, 0.52),
        latency=(50, 53),
        memory="89 to 116",
    ),
    Peer(name="pgqueuer (Python, PostgreSQL)", one=(3195, 0.44)),
    Peer(name="FastStream (Python)", one=(2181, 0.36)),
    Peer(name="pg-boss (Node.js, PostgreSQL)", one=(1642, 0.61)),
    Peer(name="Celery (Python)", one=(775, 1.15)),
    Peer(name="dramatiq (Python)", one=(771, 1.45)),
    Peer(name="lazyhooks (Python)", one=(508, 1.56)),
)

BARE_ONE, BARE_TEN = 6324.0, 8415.0
"""Deliveries a second of a bare outbox on the machine of these figures, to 1 and 10 endpoints."""

SET_UP = (
    "We measured them before, not in the runs above, all with the same driver: 5,000 events to 1 "
    "endpoint, 1,000 to 10, each system persists an event and then delivers it, the receiver is "
    "another process, 2 cores, loopback, medians. The CPU time of PostgreSQL comes on top for "
    "pgqueuer. No figure is copied from a project's own page. That machine was slower than the one "
    "above: a bare outbox delivered 6,324/s to 1 endpoint there, and 8,415/s to 10. So the picture "
    "shows each system as a share of the bare outbox of its own run."
)
