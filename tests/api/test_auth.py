"""Callers: every form of bearer key, missing credentials, rights of routes, and rates."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.api.connections import Peer
from relay.clock import TokenBuckets
from relay.logs import ThrottledLog
from tests.api.running_relay import EVENT_ID, OTHER_SECRET, RunningRelay, make_event, run_relay

OLD, NEW = (
    hashlib.sha256(f"bearer-test-key-of-{name}".encode()).hexdigest() for name in ("old", "new")
)


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    (tmp_path / "key").write_text("bearer-test-key-of-file\n")
    clients = (
        {"name": "rotating", "key_sha256": [OLD, NEW.upper()]},
        {"name": "filed", "key_file": str(tmp_path / "key")},
        {"name": "plain", "key": "bearer-test-key-of-plain"},
        {"name": "umlaut", "key": "bearer-test-key-of-Åse"},
        {"name": "keyless"},
    )
    async with run_relay(tmp_path, clients=clients) as running_relay:
        yield running_relay


async def test_a_key_is_accepted_in_each_of_its_forms_and_read_again_from_its_file(
    keyed: RunningRelay, tmp_path: Path
) -> None:
    for who in ("old", "new", "file", "plain", "Åse"):
        assert (await keyed.call("GET", "/v1/events", by=who)).status == 200, who
    (tmp_path / "key").write_text("bearer-test-key-of-tomorrow")
    assert (await keyed.call("GET", "/v1/events", by="file")).status == 401
    assert (await keyed.call("GET", "/v1/events", by="tomorrow")).status == 200


async def test_anything_but_a_clients_key_is_401(keyed: RunningRelay) -> None:
    for authorization in (
        *("", "Bearer", "Bearer ", "Bearer  ", "Bearer é", "Basic a2V5"),
        "bearer-test-key-of-plain",
        "Bearer bearer-test-key-of-plain2",
        "Bearer bearer-test-key-of-plai",
        f"Bearer {OLD}",
    ):
        headers = {"Authorization": authorization}
        answer = await keyed.call("GET", "/v1/events", by=None, headers=headers)
        assert answer.status == 401, authorization
        assert answer.headers["WWW-Authenticate"] == 'Bearer realm="imds-relay"'


LISTS = ("events", "deliveries", "dead-letters", "sinks", "standing-holds", "fleet")
OTHERS = (f"events/{EVENT_ID}", f"events/{EVENT_ID}/rule", "standing-holds/x", "stream", "status")
READS = tuple(f"/v1/{path}" for path in (*LISTS, *OTHERS))
OPERATIONS = (
    ("POST", "/v1/sinks/box/ping", None),
    ("POST", "/v1/sinks/box/pause", None),
    ("POST", "/v1/sinks/box/resume", None),
    ("POST", "/v1/dead-letters/redeliver", {"sink": "box"}),
    ("POST", "/v1/dead-letters/1/redeliver", None),
    ("POST", "/v1/reload", None),
    ("PUT", "/v1/approvals/mode", {"mode": "on"}),
)


async def test_reads_need_read_operations_operate_and_health_nothing(relay: RunningRelay) -> None:
    for path in READS:
        assert (await relay.call("GET", path, by=None)).status == 401, path
        refused = await relay.call("GET", path, by="drain")
        assert (refused.status, "read" in refused.json["detail"]) == (403, True), path
    for method, path, body in OPERATIONS:
        assert (await relay.call(method, path, body, by=None)).status == 401, path
        assert (await relay.call(method, path, body, by="bob")).status == 403, path
        assert (await relay.call(method, path, body, by="alice")).status not in (401, 403), path
    for path in ("/healthz", "/readyz", "/openapi.json"):
        for by in (None, "nobody"):
            assert (await relay.call("GET", path, by=by)).status == 200, path


async def test_a_client_may_make_50_calls_at_once_and_then_10_a_second(relay: RunningRelay) -> None:
    relay.clock.freeze_monotonic()
    statuses = [(await relay.call("GET", "/v1/events")).status for _ in range(60)]
    assert statuses == [200] * 50 + [429] * 10
    relay.clock.offset = 1.0
    statuses = [(await relay.call("GET", "/v1/events")).status for _ in range(12)]
    assert statuses == [200] * 10 + [429] * 2
    refused = await relay.call("GET", "/v1/events")
    assert refused.headers["Retry-After"] == "1"
    assert refused.json["detail"] == "too many calls of client:alice; try again in 1 s"
    assert (await relay.call("GET", "/v1/events", by="bob")).status == 200


async def test_only_bad_calls_count_against_their_address(relay: RunningRelay) -> None:
    relay.clock.freeze_monotonic()
    for name in ("alice", "bob", "reader"):
        for _ in range(50):
            assert (await relay.call("GET", "/v1/events", by=name)).status in (200, 403)
    refused = [await relay.call("GET", "/v1/events", by="nobody") for _ in range(105)]
    assert [answer.status for answer in refused] == [401] * 100 + [429] * 5
    assert refused[-1].headers["Retry-After"] == "1"
    assert (await relay.call("GET", "/healthz", by=None)).status == 200
    relay.clock.offset = 1.0
    assert (await relay.call("GET", "/v1/events", by="nobody")).status == 401


async def test_a_good_key_passes_where_strangers_used_up_the_address(relay: RunningRelay) -> None:
    """As behind a proxy, where all callers have one address."""
    relay.use_up_rate()
    statuses = [(await relay.call("GET", "/v1/events", by="bob")).status for _ in range(51)]
    assert statuses == [200] * 50 + [429]
    assert (await relay.decide()).status == 202
    for by in (None, "nobody"):
        assert (await relay.call("GET", "/v1/events", by=by)).status == 429


async def test_a_good_signature_is_let_through_there_too(relay: RunningRelay) -> None:
    relay.use_up_rate()
    body = orjson.dumps(relay.decision_body())
    assert (await relay.post_callback(body)).status == 202
    assert (await relay.post_callback(body, secret=OTHER_SECRET)).status == 429


async def test_unauthenticated_calls_are_logged_once_a_minute_and_not_journaled(
    relay: RunningRelay, caplog: pytest.LogCaptureFixture
) -> None:
    head = await relay.store.read(lambda tx: tx.head())
    relay.clock.freeze_monotonic()
    for _ in range(5):
        await relay.call("GET", "/v1/events", by="s3cret-of-somebody")
        await relay.post_callback(b"{}", client="nobody")
    lines = [record.getMessage() for record in caplog.records if record.name == "relay.api.callers"]
    assert lines == [
        "a call from 127.0.0.1 without good credentials was refused: the bearer key is no client's"
    ]
    relay.clock.offset = 61.0
    await relay.call("GET", "/v1/events", by="nobody")
    assert "s3cret" not in caplog.text
    assert await relay.store.read(lambda tx: tx.head()) == head


def test_calls_from_many_addresses_take_bounded_memory(caplog: pytest.LogCaptureFixture) -> None:
    rejections = ThrottledLog(logging.getLogger("test"))
    for number in range(5000):
        rejections.warning(f"2001:db8:{number:x}::", "no key", 1.0)
    assert (rejections.count, len(caplog.records)) == (5000, 1024)
    rejections.warning("192.0.2.1", "no key", 62.0)
    assert len(caplog.records) == 1025


async def test_no_response_reveals_software_versions(relay: RunningRelay) -> None:
    for path in ("/healthz", "/nothing", "/v1/events"):
        answer = await relay.call("GET", path, by=None)
        assert answer.headers["Server"] == "imds-relay"
        assert answer.headers["Cache-Control"] == "no-store"


async def test_without_a_relay_all_but_health_and_the_description_is_503(tmp_path: Path) -> None:
    async with run_relay(tmp_path, attached=False) as relay:
        await relay.observe(make_event())
        for path in (*READS, "/readyz", "/metrics"):
            answer = await relay.call("GET", path)
            assert (answer.status, "starting" in answer.json["detail"]) == (503, True), path
        for method, path, body in OPERATIONS:
            assert (await relay.call(method, path, body)).status == 503, path
        assert (await relay.decide()).status == 503
        assert (await relay.post_callback(orjson.dumps(relay.decision_body()))).status == 503
        assert (await relay.call("GET", "/v1/events", by="nobody")).status == 401
        for path in ("/healthz", "/openapi.json"):
            assert (await relay.call("GET", path)).status == 200
        relay.server.state.attach_relay(relay.relay)
        assert (await relay.call("GET", "/v1/events")).status == 200
        relay.server.state.detach_relay()
        assert (await relay.call("GET", "/v1/events")).status == 503


PAUSES = st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=80)


@given(PAUSES, st.integers(1, 20), st.floats(0.1, 50))
def test_no_period_has_too_many_calls(pauses: list[float], burst: int, rate: float) -> None:
    buckets, now, passed = TokenBuckets(rate, burst), 0.0, []
    for pause in pauses:
        now += pause
        if not buckets.take("one", now):
            passed.append(now)
    for first, since in enumerate(passed):
        for count, until in enumerate(passed[first:], start=1):
            assert count <= burst + rate * (until - since) + 1e-6


@given(PAUSES, st.integers(1, 20), st.floats(0.1, 50))
def test_waiting_the_returned_time_is_enough(pauses: list[float], burst: int, rate: float) -> None:
    buckets, now = TokenBuckets(rate, burst), 0.0
    for pause in pauses:
        now += pause
        if wait := buckets.take("one", now):
            now += wait + 1e-6
            assert not buckets.take("one", now)


@given(st.lists(st.booleans(), max_size=60))
def test_a_refunded_token_does_not_count(given_back: list[bool]) -> None:
    buckets = TokenBuckets(rate=1, burst=20)
    for back in given_back:
        taken = not buckets.take("one", 0.0)
        if back and taken:
            buckets.refund("one", 0.0)
    kept = min(20, given_back.count(False))
    if kept < 20:
        for _ in range(20 - kept):
            assert not buckets.take("one", 0.0)
    assert buckets.take("one", 0.0)


def test_a_clock_that_is_set_back_takes_no_tokens() -> None:
    buckets = TokenBuckets(rate=1, burst=3)
    assert [buckets.take("one", now) for now in (3600.0, 0.0, 0.0)] == [0, 0, 0]
    assert buckets.take("one", 0.0) == 1
    assert not buckets.take("one", 1.0)


def test_each_key_has_a_bucket_and_the_oldest_is_forgotten() -> None:
    buckets = TokenBuckets(rate=1, burst=1, max_keys=3)
    for key in "abc":
        assert not buckets.take(key, 0.0)
        assert buckets.take(key, 0.0)
    assert not buckets.take("d", 0.0)
    assert buckets.take("c", 0.0)
    assert not buckets.take("a", 0.0)  # forgotten: full again


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        *((each, "loopback") for each in ("::1", "127.0.0.1", "127.255.0.7", "::ffff:127.0.0.2")),
    ],
)
def test_one_host_has_one_rate_limit(address: str, network: str) -> None:
    assert Peer(address).network == network
