"""Outgoing connections of sinks, chat platforms and the broker.

`egress` refuses addresses that nobody may reach, and URLs that lead there. `http` makes requests.
`tls` makes TLS contexts, and has the section ``tls`` of the configuration. `connectivity` is for
``imds-relay doctor``. The client of the metadata service has a session of its own
(`relay.imds.client`). The functions here say how long to wait before another try of a call or a
connection; deliveries have more to consider (`relay.delivery.retry`).
"""

from __future__ import annotations


def exponential_backoff(failures: int, *, first: float, maximum: float) -> float:
    """Return the seconds to wait after so many failures in a row (1 or more), without jitter.

    The wait starts at ``first`` seconds and doubles with each failure, up to ``maximum``.
    """
    doublings = min(max(failures, 1) - 1, 16)
    return min(first * 2.0**doublings, maximum)


def with_jitter(seconds: float, chance: float) -> float:
    """Return the wait, up to a quarter longer. ``chance`` is a random number in [0, 1)."""
    return seconds * (1 + chance / 4)
