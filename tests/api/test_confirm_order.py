"""The order of the checks of POST /v1/confirmations: the earlier of two faults is reported.

See docs/api.md#order-of-checks.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest

from tests.api.confirmation_links import MessageLinks, render_message
from tests.api.running_relay import RunningRelay, make_event, run_relay


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call to be spoiled, from alice and with the right code."""

    fields: dict[str, str]
    by: str = "alice"
    after: bytes = b""
    encoding: str = "identity"
    flooded: tuple[str, ...] = ()


ApplyFault = Callable[[Attempt], Attempt]
FAULTS: tuple[tuple[int, str, ApplyFault], ...] = (
    (413, "too long", lambda attempt: replace(attempt, after=attempt.after + b" " * 65536)),
    (415, "encoded", lambda attempt: replace(attempt, encoding="gzip")),
    (
        429,
        "address",  # only for callers without good credentials
        lambda attempt: replace(attempt, by="nobody", flooded=(*attempt.flooded, "loopback")),
    ),
    (401, "no key", lambda attempt: replace(attempt, by="nobody")),
    (
        429,
        "client",
        lambda attempt: replace(attempt, flooded=(*attempt.flooded, f"client:{attempt.by}")),
    ),
    (400, "malformed", lambda attempt: replace(attempt, after=b"}" + attempt.after)),
    (
        422,
        "wrong field",
        lambda attempt: replace(attempt, fields={**attempt.fields, "revision": "x"}),
    ),
    (
        404,
        "unknown",
        lambda attempt: replace(attempt, fields={**attempt.fields, "token": "x" * 43}),
    ),
    (202, "a repeat", lambda attempt: replace(attempt, by="bob")),
    (409, "changed", lambda attempt: attempt),
    (403, "not allowed", lambda attempt: replace(attempt, by="reader")),
    (503, "off", lambda attempt: attempt),
    (403, "wrong code", lambda attempt: replace(attempt, fields={**attempt.fields, "code": "0"})),
)
"""Faults in the order of their checks.

The code is checked after everything else, the mode of approvals included: whoever may not decide
cannot guess the code. An unknown link names no event, so nobody can have used it.
"""
ALONE: tuple[set[str], ...] = (
    {"no key", "client"},
    {"no key", "not allowed"},
    {"no key", "a repeat"},
    {"a repeat", "not allowed"},
    {"a repeat", "client"},
)
"""A caller without valid key has no bucket of a client, and a call has one client."""
PAIRS = [
    pytest.param(first, second, id=f"{first[1]} before {second[1]}")
    for first, second in itertools.combinations(FAULTS, 2)
    if {first[1], second[1]} not in ALONE
]


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    async with run_relay(tmp_path) as running_relay:
        await running_relay.observe(make_event())
        yield running_relay


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_the_earlier_of_two_faults_is_reported(
    relay: RunningRelay, first: tuple[int, str, ApplyFault], second: tuple[int, str, ApplyFault]
) -> None:
    message = await render_message(relay)
    names = {first[1], second[1]}
    await _prepare(relay, message, names)
    answer = await _sent(relay, first[2](second[2](_good(message))))
    assert answer == first[0], names


@pytest.mark.parametrize(("status", "name", "apply_fault"), FAULTS)
async def test_each_fault_alone_is_reported(
    relay: RunningRelay, status: int, name: str, apply_fault: ApplyFault
) -> None:
    message = await render_message(relay)
    await _prepare(relay, message, {name})
    assert await _sent(relay, apply_fault(_good(message))) == status


async def test_without_a_fault_the_decision_is_recorded(relay: RunningRelay) -> None:
    assert await _sent(relay, _good(await render_message(relay))) == 202


def _good(message: MessageLinks) -> Attempt:
    return Attempt({"token": message.tokens["approve"], "code": message.code})


async def _prepare(relay: RunningRelay, message: MessageLinks, names: set[str]) -> None:
    if "a repeat" in names:
        assert await _sent(relay, replace(_good(message), by="bob")) == 202
    if "changed" in names:
        await relay.observe(make_event(duration=9))
    if "off" in names:
        await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})


async def _sent(relay: RunningRelay, attempt: Attempt) -> int:
    relay.clock.freeze_monotonic()
    charges = relay.server.state.charges  # faster than a hundred calls
    for key in attempt.flooded:
        is_client = key.startswith("client:")
        bucket = charges.caller_buckets if is_client else charges.address_buckets
        while not bucket.take(key, relay.clock.monotonic()):
            pass
    headers = {"Content-Encoding": attempt.encoding}
    return (
        await relay.call(
            "POST",
            "/v1/confirmations",
            orjson.dumps(attempt.fields) + attempt.after,
            by=attempt.by,
            headers=headers,
        )
    ).status
