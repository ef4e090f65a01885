"""One trace from the poll to the StartRequest, sent to a real collector."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from typing_extensions import override

from relay.events.cloudevent import CloudEvent
from relay.events.tracing import Span, SpanContext, parse_traceparent
from relay.net.http import open_session
from relay.simulator import Plan
from relay.telemetry import TelemetrySettings, TracesSettings
from relay.telemetry.otlp import FINAL_TIMEOUT, MAX_WAITING, SpanExporter, running_span_exporter
from tests.approvals.manual_clock import NOON, ManualClock
from tests.cli.running_relay import ALICE_KEY, RunningRelay, running_relay
from tests.eventually import eventually
from tests.journey.relay_process import name_of
from tests.telemetry.collector import Collector, ReceivedSpan, collector

ONE_VOTE: dict[str, Any] = {
    "rules": [{"name": "one", "approve": {"votes": 1, "from": ["client:alice"]}}],
    "tell_first": "0s",
}


@pytest.fixture
async def collecting() -> AsyncIterator[Collector]:
    """A collector."""
    async with collector() as running:
        yield running


def traced(url: str, **more: Any) -> dict[str, Any]:
    """Return the section ``telemetry`` with traces."""
    return {"traces": {"url": url, "allow_http": True, **more}}


async def approve(relay: RunningRelay, event: Mapping[str, Any], headers: Mapping[str, str]) -> int:
    """Approve an event over HTTP, as the client alice; return the status."""
    data = event["data"]
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{relay.url}/v1/approvals",
            json={
                "eventId": data["eventId"],
                "decision": "approve",
                "revision": data["revision"],
            },
            headers={"Authorization": f"Bearer {ALICE_KEY}", **headers},
        ) as answer,
    ):
        return answer.status


def received(relay: RunningRelay, name: str) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the newest event of a type that the webhook receiver got, and its headers."""
    pairs = zip(relay.receiver.events, relay.receiver.headers, strict=True)
    return [pair for pair in pairs if name_of(pair[0]) == name][-1]


async def one_span(running: Collector, name: str, **attributes: Any) -> ReceivedSpan:
    """Wait for the only span of a name with these attributes; return it."""

    def matching() -> list[ReceivedSpan]:
        return [
            span
            for span in running.named(name)
            if all(
                span.attributes.get(f"imds_relay.{key}") == value
                for key, value in attributes.items()
            )
        ]

    await eventually(lambda: bool(matching()), what=name)
    (span,) = matching()
    return span


async def test_one_trace_leads_from_the_poll_to_the_start_request(
    collecting: Collector, tmp_path: Path
) -> None:
    """The receiver of the webhook goes on with the trace, and approves in it."""
    async with running_relay(tmp_path, telemetry=traced(collecting.url), **ONE_VOTE) as relay:
        planned = await relay.announce()
        event, headers = received(relay, "event.scheduled")
        carried = parse_traceparent(headers["traceparent"])
        assert carried is not None
        caller = carried.child("1234567890abcdef")
        assert await approve(relay, event, {"traceparent": str(caller)}) == 202
        await relay.wait_for_webhook("event.started", planned.event_id)
        relay.azure.end(planned.event_id)
        await relay.wait_for_webhook("event.ended", planned.event_id)
    poll, scheduled = collecting.named("poll")[0], await one_span(collecting, "event.scheduled")
    delivery = await one_span(collecting, "deliver drain", type="event.scheduled")
    recorded = await one_span(collecting, "approval.recorded")
    granted = await one_span(collecting, "approval.granted")
    sent = await one_span(collecting, "StartRequest")
    accepted = await one_span(collecting, "startrequest.accepted")
    assert {span.trace_id for span in collecting.spans} == {carried.trace_id}
    assert (poll.parent_id, poll.kind) == ("", "client")
    assert (scheduled.parent_id, scheduled.kind) == (poll.span_id, "internal")
    assert (delivery.parent_id, delivery.kind) == (scheduled.span_id, "client")
    assert carried.span_id == delivery.span_id  # what the receiver does is below the delivery
    assert (recorded.parent_id, recorded.kind) == (caller.span_id, "server")
    assert (granted.parent_id, granted.kind) == (recorded.span_id, "internal")
    assert (sent.parent_id, sent.kind) == (granted.span_id, "client")
    assert accepted.parent_id == granted.span_id
    for name in ("event.started", "event.ended"):
        span = await one_span(collecting, name)
        its_poll = next(each for each in collecting.spans if each.span_id == span.parent_id)
        assert (its_poll.name, its_poll.parent_id) == ("poll", poll.span_id)
    assert all(span.began <= span.ended and not span.failed for span in collecting.spans)
    assert poll.ended <= scheduled.ended
    # The attributes are the fields of the log.
    assert scheduled.attributes["imds_relay.event_id"] == planned.event_id
    assert scheduled.attributes["imds_relay.resources"] == ["db-0", "db-1"]
    assert scheduled.attributes["cloudevents.event_id"] == event["id"]
    assert recorded.attributes["imds_relay.principal"] == "client:alice"
    assert recorded.resource["service.name"] == "imds-relay"
    assert recorded.resource["service.instance.id"] == "west/db-0"
    # The events carry the spans that stand for them.
    carried_by_events = {
        name_of(each): parse_traceparent(each["traceparent"]) for each in relay.receiver.events
    }
    assert carried_by_events["event.scheduled"] == carried.child(scheduled.span_id)
    assert carried_by_events["approval.granted"] == carried.child(granted.span_id)
    # Azure gets nothing of it.
    assert not any(
        name.lower() in ("traceparent", "tracestate")
        for call in relay.azure.calls
        for name in call.headers
    )


async def test_a_trace_goes_on_after_a_restart(collecting: Collector, tmp_path: Path) -> None:
    """Nothing but the store is kept: the vote comes after the restart."""
    async with running_relay(tmp_path, telemetry=traced(collecting.url), **ONE_VOTE) as relay:
        await relay.announce(Plan(type="Freeze", resources=("db-0",), id="E-1", notice=900.0))
        event, _ = received(relay, "event.scheduled")
    scheduled = await one_span(collecting, "event.scheduled")
    async with running_relay(tmp_path, telemetry=traced(collecting.url), **ONE_VOTE) as relay:
        await eventually(lambda: bool(relay.azure.calls))
        # This simulator knows no such event, so it has ended.
        await relay.wait_for_webhook("event.ended", "E-1")
    ended = await one_span(collecting, "event.ended")
    assert ended.trace_id == scheduled.trace_id == parse(event["traceparent"]).trace_id
    its_poll = next(each for each in collecting.spans if each.span_id == ended.parent_id)
    assert its_poll.parent_id == scheduled.parent_id


async def test_another_occurrence_of_the_same_event_is_another_trace(
    collecting: Collector, tmp_path: Path
) -> None:
    async with running_relay(tmp_path, telemetry=traced(collecting.url)) as relay:
        for number in (1, 2):
            planned = relay.azure.schedule(Plan(type="Freeze", resources=("db-0",), id="E-1"))
            await eventually(
                lambda: len(collecting.named("event.scheduled")) == number  # noqa: B023  # it is awaited
            )
            relay.azure.cancel(planned)
            await eventually(lambda: len(collecting.named("event.ended")) == number)  # noqa: B023
    starts, ends = collecting.named("event.scheduled"), collecting.named("event.ended")
    assert [span.trace_id for span in starts] == [span.trace_id for span in ends]
    assert len({span.trace_id for span in starts}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1",
        "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n",
        " 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-\uff14bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
    ],
)
def test_a_malformed_traceparent_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None


def parse(text: str) -> SpanContext:
    """Return the context of a text that must be well formed."""
    context = parse_traceparent(text)
    assert context is not None
    assert str(context)[:52] == text[:52]
    return context


FOREIGN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


async def test_the_trace_of_a_caller_is_linked_if_it_is_another(
    collecting: Collector, tmp_path: Path
) -> None:
    """A vote belongs to the trace of the event, whatever trace its caller is in."""
    async with running_relay(tmp_path, telemetry=traced(collecting.url), **ONE_VOTE) as relay:
        await relay.announce()
        event, _ = received(relay, "event.scheduled")
        assert await approve(relay, event, {"traceparent": "00-rubbish-01"}) == 202
        stale = {**event, "data": {**event["data"], "revision": "another"}}
        assert await approve(relay, stale, {"traceparent": FOREIGN}) == 409
    recorded = await one_span(collecting, "approval.recorded")
    refused = await one_span(collecting, "approval.refused")
    scheduled = await one_span(collecting, "event.scheduled")
    assert recorded.links == ()
    assert refused.links == (parse(FOREIGN).trace_id,)
    assert {recorded.trace_id, refused.trace_id} == {scheduled.trace_id}
    assert recorded.parent_id == scheduled.span_id


async def test_without_traces_no_event_and_no_request_has_a_traceparent(tmp_path: Path) -> None:
    async with running_relay(tmp_path) as relay:
        await relay.announce()
        event, headers = received(relay, "event.scheduled")
    assert "traceparent" not in event
    assert "traceparent" not in {name.lower() for name in headers}


async def test_traces_change_no_id_of_an_event(collecting: Collector, tmp_path: Path) -> None:
    ids = []
    for folder, telemetry in (("off", None), ("on", traced(collecting.url))):
        (tmp_path / folder).mkdir()
        async with running_relay(tmp_path / folder, telemetry=telemetry) as relay:
            planned = relay.azure.schedule(
                Plan(type="Freeze", id="E-1", resources=("db-0",), started=True, lasts=None)
            )
            await relay.wait_for_webhook("event.started", planned.event_id)
            ids.append([event["id"] for event in relay.receiver.events])
    assert ids[0] == ids[1]


def test_the_id_of_an_event_does_not_depend_on_its_attributes() -> None:
    event = CloudEvent.build({"id": "a" * 32, "type": "x", "scope": "west"}, {"n": 1})
    with_trace = event.with_attribute("traceparent", FOREIGN)
    assert (with_trace.id, with_trace.data) == (event.id, event.data)
    assert CloudEvent.parse(with_trace.body).attributes["traceparent"] == FOREIGN


# --- the way to the collector


def span(number: int = 0) -> Span:
    """Return a span."""
    return Span(
        name=f"span {number}",
        kind="internal",
        context=SpanContext("a" * 32, f"{number + 1:016x}"),
        parent=None,
        began=NOON,
        ended=NOON,
    )


async def test_it_sends_its_headers_to_the_path_of_the_collector(collecting: Collector) -> None:
    key = "a-key-of-the-collector"
    settings = TracesSettings.model_validate(
        {"url": f"{collecting.url}/otlp/v1/traces", "allow_http": True, "headers": {"x-key": key}}
    )
    async with running_span_exporter(settings, ManualClock(), "west/vm-0") as exporting:
        exporting.record(span())
    assert (collecting.paths, collecting.headers[0]["x-key"]) == (["/otlp/v1/traces"], key)
    assert [each.name for each in collecting.spans] == ["span 0"]  # sent at the end


def relay_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines about the export."""
    return [
        record.getMessage() for record in caplog.records if record.name == "relay.telemetry.otlp"
    ]


async def fail(exporting: SpanExporter, clock: ManualClock, times: int) -> None:
    """Let time pass until the export has failed so often."""
    for _ in range(times):
        before = exporting.failures
        await clock.advance_until(lambda: exporting.failures > before)  # noqa: B023  # it is awaited


async def test_a_collector_that_is_away_costs_one_line_and_gets_the_newest_spans_later(
    collecting: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relay")
    collecting.status = 503
    clock = ManualClock()
    settings = TracesSettings.model_validate({"url": collecting.url, "allow_http": True})
    async with running_span_exporter(settings, clock, "west/vm-0") as exporting:
        for number in range(MAX_WAITING + 10):
            exporting.record(span(number))
        await fail(exporting, clock, 5)
        (line,) = relay_lines(caplog)
        assert line.startswith("the collector did not take spans of traces: expected 2xx, got 503")
        collecting.status = 200
        await clock.advance_until(lambda: len(collecting.spans) == MAX_WAITING)
    assert collecting.spans[0].name == "span 10"
    assert exporting.lost == 10
    assert relay_lines(caplog)[1:] == ["the collector takes traces again; 10 spans were lost"]


@pytest.mark.parametrize("status", [301, 400, 401])
async def test_spans_that_a_collector_refuses_for_good_are_not_sent_again(
    collecting: Collector, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relay")
    collecting.status = status
    clock = ManualClock()
    settings = TracesSettings.model_validate({"url": collecting.url, "allow_http": True})
    async with running_span_exporter(settings, clock, "west/vm-0") as exporting:
        exporting.record(span())
        await fail(exporting, clock, 1)
        exporting.record(span(1))
        await fail(exporting, clock, 1)
        assert (collecting.requests, exporting.lost) == (2, 2)
    assert len(relay_lines(caplog)) == 1


@pytest.mark.parametrize(("rejects", "lost"), [(1, 1), (2**62, 1), (-5, 0)])
async def test_spans_that_a_collector_rejects_are_counted(
    collecting: Collector, rejects: int, lost: int
) -> None:
    """It cannot reject more than it got, or fewer than none."""
    collecting.rejects = rejects
    settings = TracesSettings.model_validate({"url": collecting.url, "allow_http": True})
    async with running_span_exporter(settings, ManualClock(), "west/vm-0") as exporting:
        exporting.record(span())
    assert exporting.lost == lost


async def test_a_collector_that_hangs_does_not_hold_up_the_end(collecting: Collector) -> None:
    collecting.hangs = True
    clock = ManualClock()
    settings = TracesSettings.model_validate({"url": collecting.url, "allow_http": True})
    async with running_span_exporter(settings, clock, "west/vm-0") as exporting:
        exporting.record(span())
        await clock.advance_until(lambda: collecting.requests == 1)
        began = time.monotonic()
    assert time.monotonic() - began < FINAL_TIMEOUT + 15  # for a machine that stands still


@pytest.mark.parametrize(
    "url",
    ["http://169.254.169.254/v1/traces", "http://[fd00:ec2::254]:4318", "http://168.63.129.16"],
)
def test_a_metadata_address_is_no_collector(url: str) -> None:
    with pytest.raises(ValueError, match="metadata or host address"):
        TracesSettings.model_validate({"url": url, "allow_http": True})


class MetadataResolver(AbstractResolver):
    """Every name leads to the metadata service."""

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host="169.254.169.254",
                port=port,
                family=socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    @override
    async def close(self) -> None:
        pass


async def test_a_name_that_leads_to_a_metadata_address_is_not_dialled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = TracesSettings.model_validate(
        {"url": "http://collector.example.com:4318", "allow_http": True}
    )
    async with open_session(resolver=MetadataResolver()) as session:
        exporting = SpanExporter(settings, session, ManualClock(), "west/vm-0")
        exporting.record(span())
        await exporting.finish()
    (line,) = [text for text in relay_lines(caplog) if "did not take" in text]
    assert "metadata or host address" in line


def test_http_has_to_be_allowed_and_a_url_given() -> None:
    with pytest.raises(ValueError, match="expected https, got http"):
        TracesSettings.model_validate({"url": "http://127.0.0.1:4318"})
    with pytest.raises(ValueError, match="expected url or url_file"):
        TracesSettings.model_validate({})
    with pytest.raises(ValueError, match="expected printable ASCII characters"):
        TracesSettings.model_validate(
            {"url": "https://c.example.com", "headers": {"x-key": "a\nb"}}
        )


def test_without_its_packages_a_configuration_with_traces_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.telemetry._PACKAGES", ("opentelemetry_is_absent.sdk.trace",))
    with pytest.raises(ValueError, match=r"the extra otel .* requirements/run\.lock"):
        TelemetrySettings.model_validate({"traces": {"url": "https://c.example.com"}})
