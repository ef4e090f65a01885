"""How deep tests search: `make test` takes a sample, and `make chaos-tests` everything."""

from __future__ import annotations

import os

CHAOS = "RELAY_TEST_CHAOS" in os.environ
"""Whether tests that take minutes run, and those that search go deep."""


def depth(deep: int, sample: int) -> int:
    """Return how much a test tries: ``sample`` in `make test`."""
    return deep if CHAOS else sample
