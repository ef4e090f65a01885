"""The order of the checks of POST /v1/confirmations: the earlier of two faults is told.

See docs/api.md#order-of-checks.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest

from tests.api.confirmation_links import Message, message
from tests.api.running_relay import Running, event, running


@dataclass(frozen=True, slots=True)
class Try:
    """A call to be spoiled, from alice and with the right code."""

    fields: dict[str, str]
    by: str = "alice"
    after: bytes = b""
    encoding: str = "identity"
    flooded: tuple[str, ...] = ()


Spoil = Callable[[Try], Try]
FAULTS: tuple[tuple[int, str, Spoil], ...] = (
    (413, "too long", lambda one: replace(one, after=one.after + b" " * 65536)),
    (415, "encoded", lambda one: replace(one, encoding="gzip")),
    (429, "address", lambda one: replace(one, flooded=(*one.flooded, "127.0.0.1"))),
    (401, "no key", lambda one: replace(one, by="nobody")),
    (429, "client", lambda one: replace(one, flooded=(*one.flooded, f"client:{one.by}"))),
    (400, "malformed", lambda one: replace(one, after=b"}" + one.after)),
    (422, "wrong field", lambda one: replace(one, fields={**one.fields, "revision": "x"})),
    (404, "unknown", lambda one: replace(one, fields={**one.fields, "token": "x" * 43})),
    (202, "a repeat", lambda one: replace(one, by="bob")),
    (409, "changed", lambda one: one),
    (403, "not allowed", lambda one: replace(one, by="reader")),
    (503, "off", lambda one: one),
    (403, "wrong code", lambda one: replace(one, fields={**one.fields, "code": "0"})),
)
"""What can be wrong, in the order in which it must be told.

A code is looked at only where nothing else refuses, the switch included: so who may not decide cannot find it out. A link
that is none names no event, so nobody can have used it.
"""
ALONE: tuple[set[str], ...] = (
    {"no key", "client"},
    {"no key", "not allowed"},
    {"no key", "a repeat"},
    {"a repeat", "not allowed"},
    {"a repeat", "client"},
)
"""A stranger has no bucket of a client's, and a call is of one client."""
PAIRS = [
    pytest.param(first, second, id=f"{first[1]} before {second[1]}")
    for first, second in itertools.combinations(FAULTS, 2)
    if {first[1], second[1]} not in ALONE
]


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path) as one:
        await one.see(event())
        yield one


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_of_two_faults_the_earlier_is_told(
    relay: Running, first: tuple[int, str, Spoil], second: tuple[int, str, Spoil]
) -> None:
    sent = await message(relay)
    names = {first[1], second[1]}
    await _prepare(relay, sent, names)
    answer = await _sent(relay, first[2](second[2](_good(sent))))
    assert answer == first[0], names


@pytest.mark.parametrize(("status", "name", "spoil"), FAULTS)
async def test_each_fault_alone_is_told(
    relay: Running, status: int, name: str, spoil: Spoil
) -> None:
    sent = await message(relay)
    await _prepare(relay, sent, {name})
    assert await _sent(relay, spoil(_good(sent))) == status


async def test_without_a_fault_it_is_done(relay: Running) -> None:
    assert await _sent(relay, _good(await message(relay))) == 202


def _good(sent: Message) -> Try:
    return Try({"token": sent.tokens["approve"], "code": sent.code})


async def _prepare(relay: Running, sent: Message, names: set[str]) -> None:
    if "a repeat" in names:
        assert await _sent(relay, replace(_good(sent), by="bob")) == 202
    if "changed" in names:
        await relay.see(event(duration=9))
    if "off" in names:
        await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})


async def _sent(relay: Running, one: Try) -> int:
    relay.clock.stop()
    state = relay.server._state  # a hundred calls would do the same
    for key in one.flooded:
        bucket = state.caller_buckets if key.startswith("client:") else state.address_buckets
        while not bucket.take(key, relay.clock.monotonic()):
            pass
    headers = {"Content-Encoding": one.encoding}
    return (
        await relay.call(
            "POST",
            "/v1/confirmations",
            orjson.dumps(one.fields) + one.after,
            by=one.by,
            headers=headers,
        )
    ).status
