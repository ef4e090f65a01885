"""What /metrics says: every metric of the page, with bounded labels, and values that are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from relay.api.metrics import Metrics
from relay.clock import Histogram
from relay.errors import Deferred, Rejected, StoreUnavailable
from relay.store.sqlite import Work
from tests.api.measured_relay import documented_metrics, run_measured_relay, scrape
from tests.api.running_relay import RunningRelay, make_event, run_relay
from tests.eventually import eventually


async def values(relay: RunningRelay) -> dict[tuple[str, ...], float]:
    """By name and then the values of the labels in the order of their names."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in await scrape(relay)
        for sample in family.samples
    }


async def test_every_metric_of_the_page_is_served_as_it_says(tmp_path: Path) -> None:
    async with run_measured_relay(tmp_path) as measured:
        relay = measured.running
        await relay.observe(make_event())
        await eventually(lambda: bool(relay.dispatcher.get_worker("box").ends))
        families = await scrape(relay)
    documented = documented_metrics()
    suffixes = {"counter": "_total", "info": "_info", "gauge": "", "histogram": ""}
    served = {f"{each.name}{suffixes.get(each.type, '')}": each for each in families}
    may_be_missing = {"imds_relay_clock_offset_seconds", "imds_relay_http_answers_total"}
    assert documented.keys() - served.keys() <= may_be_missing
    for name, family in served.items():
        metric = documented[name]
        # The text format has no kind for info.
        assert family.type == ("gauge" if metric.kind == "info" else metric.kind)
        assert re.sub(r" \((not on|on|with) [^)]*\)$", "", metric.meaning) == family.documentation
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == metric.labels, name


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, metric in documented_metrics().items():
        assert name.endswith("_total") is (metric.kind == "counter"), name
        assert name.endswith("_seconds") is (metric.unit == "seconds"), name
        assert metric.unit == "seconds" or metric.kind != "histogram", name


def test_a_bucket_of_a_histogram_includes_its_bound_and_all_below() -> None:
    histogram = Histogram((0.5, 1.0))
    for seconds in (0.0, 0.5, 0.75, 1.0, 7.0):
        histogram.observe(seconds)
    metrics = Metrics()
    metrics.add("poll_duration_seconds", histogram)
    (family,) = metrics.collect()
    samples = [(sample.labels.get("le"), sample.value) for sample in family.samples]
    assert samples == [("0.5", 2.0), ("1.0", 4.0), ("+Inf", 5.0), (None, 5.0), (None, 9.25)]


async def test_a_scrape_whose_read_runs_twice_has_every_value_once(
    relay: RunningRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all work of a commit does of which some fails."""
    read = relay.store.read

    async def read_twice(work: Work[Any]) -> Any:
        await read(work)
        return await read(work)

    monkeypatch.setattr(relay.store, "read", read_twice)
    lines = (await relay.call("GET", "/metrics")).body.decode().splitlines()
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples)) > 50


async def test_an_approval_is_followed_from_missing_votes_to_its_start(relay: RunningRelay) -> None:
    before = await values(relay)
    assert before["imds_relay_events_total", "scheduled", "Reboot"] == 1
    assert before["imds_relay_live_events", "Reboot", "Scheduled"] == 1
    assert before["imds_relay_scheduled_events", "pending"] == 1
    assert before["imds_relay_missing_votes",] == 2
    seconds = relay.seconds_to_not_before()
    assert seconds <= before["imds_relay_next_event_seconds", "pending"] < seconds + 60

    assert (await relay.decide()).status == 202
    assert (await relay.decide(by="reader")).status == 403
    one_vote = await values(relay)
    assert one_vote["imds_relay_missing_votes",] == 1
    assert one_vote["imds_relay_decisions_total", "approve"] == 1
    assert one_vote["imds_relay_refusals_total", "approve"] == 1
    assert one_vote["imds_relay_grants_total",] == 0

    assert (await relay.decide(by="bob")).status == 202
    started = await eventually(
        lambda: values(relay),
        lambda found: found["imds_relay_start_requests_total", "accepted"] == 1,
    )
    assert started["imds_relay_grants_total",] == 1
    assert started["imds_relay_scheduled_events", "accepted"] == 1
    assert ("imds_relay_next_event_seconds", "pending") not in started
    assert started["imds_relay_start_requests_total", "failed"] == 0

    await relay.observe()
    ended = await values(relay)
    assert ended["imds_relay_events_total", "ended", "Reboot"] == 1
    assert ended["imds_relay_live_events", "Reboot", "Scheduled"] == 0


async def test_the_next_event_is_the_first_whose_not_before_is_to_come(relay: RunningRelay) -> None:
    relay.clock.offset = 60.0
    past = make_event(event_id="past", not_before="2020-01-01T00:00:00Z")
    unknown = make_event(event_id="unknown", not_before=None)
    await relay.observe(make_event(), past, unknown)
    found = await values(relay)
    seconds = relay.seconds_to_not_before()  # those of the event that comes, by the relay's clock
    assert seconds <= found["imds_relay_next_event_seconds", "pending"] < seconds + 60
    assert found["imds_relay_scheduled_events", "pending"] == 2
    assert found["imds_relay_scheduled_events", "none"] == 1
    assert ("imds_relay_next_event_seconds", "none") not in found


async def test_deliveries_dead_letters_and_circuits_of_each_sink_are_told(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=("well", "sick")) as relay:
        relay.sinks["sick"].failure = Rejected("it never wants this", status=777)
        await relay.observe(make_event())
        await eventually(lambda: relay.dispatcher.get_worker("sick").ends["parked"] == 1)
        relay.sinks["sick"].failure = Deferred("it is down", skew=45.0)
        await relay.observe(*(make_event(event_id=f"event-{number}") for number in range(4)))
        await eventually(lambda: relay.dispatcher.get_worker("sick").health.circuit != "closed")
        relay.clock.offset = 500.0
        found = await eventually(
            lambda: values(relay),
            lambda found: found["imds_relay_sink_deliveries_total", "box", "delivered", "well"] > 5,
        )
    assert found["imds_relay_sink_deliveries_total", "box", "parked", "sick"] == 1
    assert found["imds_relay_sink_dead_letters", "box", "sick"] == 1
    assert found["imds_relay_sink_dead_letters", "box", "well"] == 0
    assert found["imds_relay_sink_tries_total", "box", "parked", "sick", "other"] == 1
    tries = sum(
        value
        for name, value in found.items()
        if name[0] == "imds_relay_sink_tries_total" and "well" in name
    )
    assert found["imds_relay_sink_try_duration_seconds_count", "box", "well"] == tries
    assert found["imds_relay_sink_circuit_state", "box", "well", "closed"] == 1
    assert found["imds_relay_sink_circuit_state", "box", "sick", "closed"] == 0
    assert found["imds_relay_sink_clock_skewed", "box", "sick"] == 1
    assert found["imds_relay_sink_clock_skewed", "box", "well"] == 0
    assert 500 <= found["imds_relay_sink_oldest_waiting_seconds", "box", "sick"] < 600


async def test_what_azure_invents_adds_no_series(relay: RunningRelay) -> None:
    before = {name for name in await values(relay) if name[0] != "imds_relay_http_answers_total"}
    changes = [
        make_event(event_id=f"E-{number}", event_type=f"Type{number}", event_status=f"S{number}")
        for number in range(30)
    ]
    await relay.observe(make_event(), *changes)
    after = await values(relay)
    assert after["imds_relay_events_total", "scheduled", "other"] == 30
    assert after["imds_relay_live_events", "other", "other"] == 30
    added = {name for name in after if name[0].startswith(("imds_relay_ev", "imds_relay_li"))}
    assert added <= before


async def test_polls_and_commits_are_timed(tmp_path: Path) -> None:
    async with run_measured_relay(tmp_path) as measured:
        measured.running.clock.offset = 70.0
        found = await values(measured.running)
        assert found["imds_relay_poll_duration_seconds_count",] >= 1
        assert 70 <= found["imds_relay_poll_age_seconds",] < 100
        assert found["imds_relay_store_commit_duration_seconds_count",] >= 1
        assert found["imds_relay_approvals_link_up",] == 0
        measured.consumer.is_connected = True
        assert (await values(measured.running))["imds_relay_approvals_link_up",] == 1


async def test_a_state_file_that_cannot_be_written_leaves_every_metric(relay: RunningRelay) -> None:
    before = await values(relay)
    relay.make_store_read_only()
    assert (await relay.decide()).status == 503
    found = await values(relay)
    assert found["imds_relay_store_failing",] == 1
    assert found["imds_relay_missing_votes",] == 2
    assert before.keys() <= found.keys()


async def test_a_state_file_that_cannot_be_read_leaves_other_metrics(relay: RunningRelay) -> None:
    # The thread of the store closes it: SQLite crashes if another one does so during a statement.
    connection = relay.store._state_file.connection  # noqa: SLF001  # no other way to break the disk
    with pytest.raises(StoreUnavailable):
        await relay.store.read(lambda _: connection.close())
    found = await values(relay)
    assert ("imds_relay_missing_votes",) not in found
    assert found["imds_relay_store_failing",] == 1
    assert found["imds_relay_sink_failing", "box", "box"] == 0
