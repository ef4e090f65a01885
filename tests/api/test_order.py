"""The order of the checks: of two faults in one call, the earlier is reported.

See docs/api.md#order-of-checks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.api.running_relay import RunningRelay, make_event, run_relay


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call, to which faults are applied."""

    by: str = "alice"
    headers: Mapping[str, str] | None = None
    body: Mapping[str, Any] | bytes | None = None
    flooded: tuple[str | None, ...] = ()
    """Those whose rate is used up: clients, and None for the address."""

    def sent(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else orjson.dumps(self.body)


def _with(attempt: Attempt, **changes: Any) -> Attempt:
    assert isinstance(attempt.body, Mapping)
    return replace(attempt, body={**attempt.body, **changes})


def _header(attempt: Attempt, name: str, value: str) -> Attempt:
    return replace(attempt, headers={**(attempt.headers or {}), name: value})


FAULTS: tuple[tuple[int, str, Callable[[Attempt], Attempt]], ...] = (
    (413, "too long", lambda attempt: replace(attempt, body=attempt.sent() + b" " * 65536)),
    (415, "encoded", lambda attempt: _header(attempt, "Content-Encoding", "gzip")),
    (
        429,
        "address",  # only for callers without good credentials
        lambda attempt: replace(attempt, by="nobody", flooded=(*attempt.flooded, None)),
    ),
    (401, "no key", lambda attempt: replace(attempt, by="nobody")),
    (429, "client", lambda attempt: replace(attempt, flooded=(*attempt.flooded, attempt.by))),
    (400, "malformed", lambda attempt: replace(attempt, body=attempt.sent()[:-1])),
    (422, "wrong field", lambda attempt: _with(attempt, decision="aprove")),
    (202, "a repeat", lambda attempt: _header(attempt, "Idempotency-Key", "seen")),
    (404, "unknown", lambda attempt: _with(attempt, eventId="unknown")),
    (409, "changed", lambda attempt: _with(attempt, revision="stale")),
    (403, "not allowed", lambda attempt: replace(attempt, by="reader")),
)
"""Faults in the order of their checks. Applied in reverse, so that bodies are malformed last."""


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """Approvals are off at the end, so that a call with no other fault gets a 503."""
    async with run_relay(tmp_path) as running_relay:
        await running_relay.observe(make_event())
        await running_relay.decide(headers={"Idempotency-Key": "seen"})
        await running_relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})
        yield running_relay


def _compatible(first: str, second: str) -> bool:
    # Another body is no repeat, a repeat has an allowed caller, and an unknown caller has no
    # bucket of a client.
    alone: tuple[set[str], ...] = (
        {"a repeat", "unknown"},
        {"a repeat", "changed"},
        {"a repeat", "not allowed"},
        {"no key", "client"},
        {"no key", "not allowed"},
    )
    return {first, second} not in alone


NONE: tuple[int, str, Callable[[Attempt], Attempt]] = (503, "nothing", lambda attempt: attempt)
PAIRS = [
    pytest.param(first, second, id=f"{first[1]} before {second[1]}")
    for at, first in enumerate(FAULTS)
    for second in (*FAULTS, NONE)[at + 1 : at + 3]  # the next, or the one after it, says the order
    if _compatible(first[1], second[1])
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_the_earlier_of_two_faults_is_reported(
    relay: RunningRelay,
    first: tuple[int, str, Callable[[Attempt], Attempt]],
    second: tuple[int, str, Callable[[Attempt], Attempt]],
) -> None:
    attempt = first[2](second[2](Attempt(body=relay.decision_body())))
    for who in attempt.flooded:
        relay.use_up_rate(who)
    answer = await relay.call(
        "POST", "/v1/approvals", attempt.sent(), by=attempt.by, headers=attempt.headers
    )
    assert answer.status == first[0], answer.body
    _is_that_429(answer.body, first[1])


async def test_reads_too_check_401_then_403_then_422_then_404(relay: RunningRelay) -> None:
    assert (await relay.call("GET", "/v1/events?cursor=x", by="nobody")).status == 401
    assert (await relay.call("GET", "/v1/events?cursor=x", by="mute")).status == 403
    assert (await relay.call("GET", "/v1/events?cursor=x", by="bob")).status == 422
    assert (await relay.call("GET", "/v1/events/unknown", by="mute")).status == 403
    assert (await relay.call("GET", "/v1/events/unknown?cursor=x", by="bob")).status == 422
    assert (await relay.call("GET", "/v1/events/unknown", by="bob")).status == 404
    assert (await relay.call("POST", "/v1/sinks/unknown/ping", by="reader")).status == 403
    assert (await relay.call("POST", "/v1/sinks/box/ping", by="reader")).status == 403


def _is_that_429(body: bytes, name: str) -> None:
    if name in ("address", "client"):
        words = {"address": b"from this address", "client": b"of client:"}
        assert words[name] in body
