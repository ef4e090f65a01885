"""Health, readiness and metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from relay import __version__
from relay.errors import Deferred
from tests.api.running_relay import SCOPE, RunningRelay, eventually, make_event, run_relay


async def test_a_working_relay_is_healthy_and_ready(relay: RunningRelay) -> None:
    assert (await relay.call("GET", "/healthz", by=None)).json == {"status": "ok"}
    ready = await relay.call("GET", "/readyz", by=None)
    assert (ready.status, ready.json) == (
        200,
        {
            "status": "ok",
            "source": "ok",
            "store": "ok",
            "sinks": {"failing": [], "disabled": [], "paused": []},
        },
    )


async def test_undelivering_sinks_are_named_and_leave_the_relay_ready(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=("well", "sick", "gone", "resting")) as relay:
        relay.sinks["sick"].failure = Deferred("it is down")
        relay.sinks["gone"].failure = Deferred("it is gone", failure="disabled")
        await relay.call("POST", "/v1/sinks/resting/pause")
        await relay.observe(*(make_event(event_id=f"event-{number}") for number in range(5)))
        await eventually(lambda: any(sink.failing for sink in relay.dispatcher.status()))
        await eventually(
            lambda: any(sink.state == "disabled" for sink in relay.dispatcher.status())
        )
        ready = await relay.call("GET", "/readyz", by=None)
        assert (ready.status, ready.json["sinks"]) == (
            200,
            {"failing": ["sick"], "disabled": ["gone"], "paused": ["resting"]},
        )
        assert ready.json["reasons"] == {
            "sick": "it is down",
            "gone": "it is gone",
            "resting": "paused by client:alice",
        }


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


async def test_metrics_report_the_state_of_the_relay(relay: RunningRelay) -> None:
    relay.sinks["box"].failure = Deferred("it is down")
    await relay.call("GET", "/v1/events", by="nobody")
    await relay.decide()
    await eventually(lambda: relay.dispatcher.status()[0].waiting > 0)
    scraped = await relay.call("GET", "/metrics", by=None)
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in read_text(scraped.body.decode())
        for sample in family.samples
    }
    head = await relay.store.read(lambda tx: tx.head())
    assert values[("imds_relay_build_info", *sorted((__version__, SCOPE, "westno-0")))] == 1
    assert values[("imds_relay_polls_total",)] == 7
    assert values[("imds_relay_poll_failures",)] == 0
    assert values[("imds_relay_source_lost",)] == 0
    assert values[("imds_relay_store_failing",)] == 0
    assert values[("imds_relay_journal_position",)] == head.position
    assert [values[("imds_relay_approvals_mode", mode)] for mode in ("on", "dry-run", "off")] == [
        1,
        0,
        0,
    ]
    assert values[("imds_relay_sink_waiting", "box", "box")] == relay.dispatcher.status()[0].waiting
    assert values[("imds_relay_sink_state", "box", "box", "on")] == 1
    assert values[("imds_relay_sink_tries_total", "", "box", "box", "deferred")] >= 1
    assert values[("imds_relay_sink_state", "box", "box", "disabled")] == 0
    assert values[("imds_relay_rejected_calls_total",)] == 1
    assert values[("imds_relay_http_answers_total", "401")] == 1
    assert values[("imds_relay_http_answers_total", "202")] == 1


async def test_metrics_come_as_openmetrics_on_request(relay: RunningRelay) -> None:
    scraped = await relay.call(
        "GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert "openmetrics" in scraped.headers["Content-Type"]
    assert any(
        family.name == "imds_relay_polls"
        for family in read_openmetrics(scraped.body.decode())  # type: ignore[no-untyped-call]  # it has no types
    )


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "Via"])
async def test_calls_through_a_local_proxy_do_not_count_as_local(
    relay: RunningRelay, header: str
) -> None:
    assert (await relay.call("GET", "/metrics", by=None)).status == 200
    assert (await relay.call("GET", "/metrics", by=None, headers={header: "x"})).status == 401
    assert (await relay.call("GET", "/metrics", by="drain", headers={header: "x"})).status == 403
    assert (await relay.call("GET", "/metrics", by="reader", headers={header: "x"})).status == 200
