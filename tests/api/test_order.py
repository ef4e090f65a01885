"""The order of the checks: of two faults in one call, the earlier is told.

See docs/api.md#order-of-checks.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.api.running_relay import EVENT_ID, Running, event, running


@dataclass(frozen=True, slots=True)
class Try:
    """A call to be spoiled."""

    by: str = "alice"
    headers: Mapping[str, str] | None = None
    body: Mapping[str, Any] | bytes | None = None
    flooded: tuple[str, ...] = ()

    def sent(self) -> bytes:
        """The body's bytes."""
        return self.body if isinstance(self.body, bytes) else orjson.dumps(self.body)


def _with(one: Try, **changes: Any) -> Try:
    assert isinstance(one.body, Mapping)
    return replace(one, body={**one.body, **changes})


def _header(one: Try, name: str, value: str) -> Try:
    return replace(one, headers={**(one.headers or {}), name: value})


FAULTS: tuple[tuple[int, str, Callable[[Try], Try]], ...] = (
    (413, "too long", lambda one: replace(one, body=one.sent() + b" " * 65536)),
    (415, "encoded", lambda one: _header(one, "Content-Encoding", "gzip")),
    (429, "address", lambda one: replace(one, flooded=(*one.flooded, "stranger"))),
    (401, "no key", lambda one: replace(one, by="nobody")),
    (429, "client", lambda one: replace(one, flooded=(*one.flooded, one.by))),
    (400, "malformed", lambda one: replace(one, body=one.sent()[:-1])),
    (422, "wrong field", lambda one: _with(one, decision="aprove")),
    (202, "a repeat", lambda one: _header(one, "Idempotency-Key", "seen")),
    (404, "unknown", lambda one: _with(one, eventId="unknown")),
    (409, "changed", lambda one: _with(one, revision="stale")),
    (403, "not allowed", lambda one: replace(one, by="reader")),
)
"""What can be wrong, in the order in which it must be told. Applied from the last to the first, so that bodies spoil last."""


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Running]:
    """Approvals are off at the end, so that a call with no other fault gets a 503."""
    async with running(tmp_path) as one:
        await one.see(event())
        await one.decide(headers={"Idempotency-Key": "seen"})
        await one.call("PUT", "/v1/approvals/mode", {"mode": "off"})
        yield one


def _compatible(first: str, second: str) -> bool:
    # Another body is no repeat, a repeat is of one who may, and a stranger has no bucket of a client's.
    together = {first, second}
    alone: tuple[set[str], ...] = (
        {"a repeat", "unknown"},
        {"a repeat", "changed"},
        {"a repeat", "not allowed"},
        {"no key", "client"},
        {"no key", "not allowed"},
    )
    return together not in alone


PAIRS = [
    pytest.param(first, second, id=f"{first[1]} before {second[1]}")
    for first, second in itertools.combinations(FAULTS, 2)
    if _compatible(first[1], second[1])
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_of_two_faults_the_earlier_is_told(
    relay: Running,
    first: tuple[int, str, Callable[[Try], Try]],
    second: tuple[int, str, Callable[[Try], Try]],
) -> None:
    wish = first[2](second[2](Try(body=relay.wish())))
    _flood(relay, wish)
    answer = await relay.call(
        "POST", "/v1/approvals", wish.sent(), by=wish.by, headers=wish.headers
    )
    assert answer.status == first[0], answer.body
    _is_that_429(answer.body, first[1])


async def test_with_no_other_fault_it_is_503(relay: Running) -> None:
    assert (await relay.call("POST", "/v1/approvals", relay.wish())).status == 503


@pytest.mark.parametrize(("status", "_name", "spoil"), FAULTS)
async def test_each_fault_is_told_before_503(
    relay: Running, status: int, _name: str, spoil: Callable[[Try], Try]
) -> None:
    wish = spoil(Try(body=relay.wish()))
    _flood(relay, wish)
    assert (
        await relay.call("POST", "/v1/approvals", wish.sent(), by=wish.by, headers=wish.headers)
    ).status == status


async def test_of_reads_too_401_comes_before_422_and_404_before_403(relay: Running) -> None:
    assert (await relay.call("GET", "/v1/events?cursor=x", by="nobody")).status == 401
    assert (await relay.call("GET", "/v1/events?cursor=x", by="mute")).status == 422
    assert (await relay.call("GET", "/v1/events", by="mute")).status == 403
    assert (await relay.call("GET", "/v1/events/unknown", by="mute")).status == 404
    assert (await relay.call("GET", f"/v1/events/{EVENT_ID}", by="mute")).status == 403
    assert (await relay.call("POST", "/v1/sinks/unknown/ping", by="reader")).status == 404
    assert (await relay.call("POST", "/v1/sinks/box/ping", by="reader")).status == 403


def _flood(relay: Running, wish: Try) -> None:
    """Empty the buckets that the call would take from."""
    relay.clock.stop()
    state = relay.server._state  # a hundred calls would do the same, and test_auth has them
    buckets = {"stranger": (state.address_buckets, "127.0.0.1")}
    for who in wish.flooded:
        bucket, key = buckets.get(who, (state.caller_buckets, f"client:{who}"))
        while not bucket.take(key, relay.clock.monotonic()):
            pass


def _is_that_429(body: bytes, name: str) -> None:
    if name in ("address", "client"):
        words = {"address": b"from this address", "client": b"of client:"}
        assert words[name] in body
