"""Health, readiness and metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from relay.api.doctor import diagnose
from relay.api.settings import ApiSettings
from relay.errors import Deferred
from tests.api.running_relay import RunningRelay, make_event, over_socket, run_relay
from tests.eventually import eventually


async def test_a_working_relay_is_healthy_and_ready(relay: RunningRelay) -> None:
    assert (await relay.call("GET", "/healthz", by=None)).json == {"status": "ok"}
    ready = await relay.call("GET", "/readyz", by=None)
    sinks: dict[str, list[str]] = {"failing": [], "disabled": [], "paused": []}
    all_is_well = {"status": "ok", "source": "ok", "store": "ok", "sinks": sinks}
    assert (ready.status, ready.json) == (200, all_is_well)


async def test_undelivering_sinks_are_named_and_leave_the_relay_ready(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=("well", "sick", "gone", "resting")) as relay:
        relay.sinks["sick"].failure = Deferred("it is down")
        relay.sinks["gone"].failure = Deferred("it is gone", failure="disabled")
        await relay.call("POST", "/v1/sinks/resting/pause")
        await relay.observe(*(make_event(event_id=f"event-{number}") for number in range(5)))
        await eventually(lambda: relay.dispatcher.get_worker("sick").failing)
        await eventually(lambda: relay.dispatcher.get_worker("gone").state == "disabled")
        ready = await relay.call("GET", "/readyz", by=None)
        sinks = {"failing": ["sick"], "disabled": ["gone"], "paused": ["resting"]}
        assert (ready.status, ready.json["sinks"]) == (200, sinks)
        assert ready.json["reasons"] == {
            "sick": "it is down",
            "gone": "it is gone",
            "resting": "paused by client:alice",
        }


PROXY_HEADERS = ("Forwarded", "X-Forwarded-For", "x-forwarded-proto", "X-Real-IP", "Via")
FORWARDED = {"X-Forwarded-For": "x"}
PAUSED = {"failing": [], "disabled": [], "paused": ["box"]}
REASONS = {"box": "paused by client:alice"}
CALLERS = {None: 401, "nobody": 401, "drain": 403, "mute": 403, "reader": 200, "alice": 200}
"""What callers get of /metrics: those without good credentials, without `read`, and others."""


async def test_readiness_gives_reasons_to_callers_that_metrics_answers(relay: RunningRelay) -> None:
    await relay.call("POST", "/v1/sinks/box/pause")
    for header in PROXY_HEADERS:
        for by, status in CALLERS.items():
            scraped = await relay.call("GET", "/metrics", by=by, headers={header: "x"})
            ready = await relay.call("GET", "/readyz", by=by, headers={header: "x"})
            assert (scraped.status, ready.status, ready.json["sinks"]) == (status, 200, PAUSED)
            assert ready.json.get("reasons") == (REASONS if status == 200 else None)
    relay.azure.lost = True
    for by, reasons in ((None, None), ("reader", REASONS)):
        ready = await relay.call("GET", "/readyz", by=by, headers=FORWARDED)
        assert (ready.status, ready.json["sinks"]) == (503, PAUSED)
        assert ready.json.get("reasons") == reasons


async def test_the_local_socket_gives_reasons_also_behind_a_proxy(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    async with run_relay(tmp_path, socket=path) as relay, over_socket(path) as local:
        await relay.call("POST", "/v1/sinks/box/pause")
        ready = await relay.call("GET", "/readyz", by=None, headers=FORWARDED, session=local)
        assert ready.json["reasons"] == REASONS


async def test_doctor_shows_why_a_sink_does_not_deliver(tmp_path: Path) -> None:
    socket = str(tmp_path / "relay.sock")
    async with run_relay(tmp_path, socket=socket) as relay:
        await relay.call("POST", "/v1/sinks/box/pause")
        for places in ({"socket": None}, {"socket": socket}, {"socket": "auto"}):
            listen = f"127.0.0.1:{relay.server.port}"
            settings = ApiSettings.model_validate({"listen": listen, **places})
            findings, is_running = await diagnose(settings, tmp_path / "relay.db")
            assert is_running
            assert "box: paused by client:alice" in findings[0].said


async def test_readiness_refuses_nobody_and_lets_nobody_guess_keys(relay: RunningRelay) -> None:
    relay.clock.freeze_monotonic()
    for _ in range(105):
        assert (await relay.call("GET", "/readyz", by=None, headers=FORWARDED)).status == 200
    assert (await relay.call("GET", "/v1/events", by="nobody")).status == 401
    for _ in range(105):
        assert (await relay.call("GET", "/readyz", by="nobody", headers=FORWARDED)).status == 200
    assert (await relay.call("GET", "/v1/events", by="nobody")).status == 429
    scraped = await relay.call("GET", "/metrics", by=None)
    assert b"imds_relay_rejected_calls_total 100.0" in scraped.body


async def test_a_client_over_its_limit_is_a_stranger_to_readiness(relay: RunningRelay) -> None:
    relay.clock.freeze_monotonic()
    await relay.call("POST", "/v1/sinks/box/pause")
    answers = [
        await relay.call("GET", "/readyz", by="reader", headers=FORWARDED) for _ in range(60)
    ]
    assert {answer.status for answer in answers} == {200}
    assert [answer.json.get("reasons") for answer in answers] == [REASONS] * 50 + [None] * 10


async def test_a_lost_source_makes_the_relay_unready(relay: RunningRelay) -> None:
    relay.azure.lost = True
    ready = await relay.call("GET", "/readyz", by=None)
    assert (ready.status, ready.json["source"], ready.json["store"]) == (503, "lost", "ok")
    assert ready.headers["Content-Type"] == "application/problem+json"
    assert (await relay.call("GET", "/healthz", by=None)).status == 200


async def test_a_read_only_store_makes_the_relay_unready(relay: RunningRelay) -> None:
    relay.make_store_read_only()
    assert (await relay.decide()).status == 503
    ready = await relay.call("GET", "/readyz", by=None)
    assert (ready.status, ready.json["source"], ready.json["store"]) == (503, "ok", "failing")


async def test_metrics_come_as_openmetrics_on_request(relay: RunningRelay) -> None:
    scraped = await relay.call(
        "GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert "openmetrics" in scraped.headers["Content-Type"]
    assert any(
        family.name == "imds_relay_polls"
        for family in read_openmetrics(scraped.body.decode())  # type: ignore[no-untyped-call]  # it has no types
    )


async def test_only_calls_to_a_loopback_host_count_as_local(relay: RunningRelay) -> None:
    """A page of another site can make a browser call its own name at 127.0.0.1."""
    await relay.call("POST", "/v1/sinks/box/pause")
    local = "localhost", "LOCALHOST:8080", "127.0.0.1", "127.9.9.9:1", "[::1]:8080"
    names = "relay.example.com", "localhost.example.com", "127.0.0.1.example.com:8080"
    for host in (*local, *names, "::1", "", "127.0.0.1@example.com", "10.0.0.4", "[::1"):
        is_local = host in local
        headers = {"Host": host}
        scraped = await relay.call("GET", "/metrics", by=None, headers=headers)
        ready = await relay.call("GET", "/readyz", by=None, headers=headers)
        assert (scraped.status, ready.status) == (200 if is_local else 401, 200), host
        assert ready.json.get("reasons") == (REASONS if is_local else None)
        assert (await relay.call("GET", "/metrics", by="reader", headers=headers)).status == 200
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.server.port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.0 401 ")
    writer.close()
