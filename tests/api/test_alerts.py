"""The alert rules fire on what a relay in trouble really serves, and on nothing else.

promtool evaluates deploy/prometheus/alerts.yml. Each series has the value of a healthy relay for
five minutes, and then that of the relay in trouble.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.metrics_core import Metric as Family

from relay.clock import SystemClock
from relay.config import Config, LoadedConfig
from relay.errors import ConfigError, Deferred, Rejected, ReloadRefused
from relay.fleet.messages import Pulse
from relay.fleet.routing import AuthorizedSender
from relay.roles.reload import Reloader
from tests.api.measured_relay import documented_metrics, run_measured_relay, scrape
from tests.api.running_relay import make_event
from tests.eventually import eventually
from tests.programs import output_of

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
Series = dict[str, float]


def series_of(families: list[Family]) -> Series:
    """Return each series, as PromQL names it, with its value."""
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = [f"{name}={json.dumps(value)}" for name, value in sample.labels.items()]
        found[f"{sample.name}{{{','.join(labels)}}}"] = sample.value
    return found


def check_firing(folder: Path, before: Series, after: Series, expected: set[str]) -> None:
    """Check that nothing fires before the change, and these alerts some minutes after it."""
    series = [
        {"series": name, "values": f"{before.get(name, '_')}x4 {after.get(name, '_')}x10"}
        for name in sorted(before.keys() | after.keys())
    ]
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)]
    checks = [
        {"expr": firing, "eval_time": "4m", "exp_samples": []},
        {"expr": f"clamp_max({firing}, 1)", "eval_time": "9m", "exp_samples": samples},
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    rules = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}
    path = folder / "firing.yml"
    path.write_bytes(orjson.dumps(rules))  # JSON is YAML
    output_of("promtool", "test", "rules", path)


@NEEDS_PROMTOOL
def test_the_rules_are_valid_and_each_has_a_unit_test() -> None:
    tests = DEPLOY / "prometheus" / "alerts_test.yml"
    output_of("promtool", "check", "rules", ALERTS)
    output_of("promtool", "test", "rules", tests)
    alerts = re.findall(r"alert: (\w+)", ALERTS.read_text(encoding="utf-8"))
    assert len(alerts) >= 8
    tested = re.findall(r'alertname="(\w+)"', tests.read_text(encoding="utf-8"))
    assert set(alerts) == set(tested)
    page = (DEPLOY.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [alert for alert in alerts if f"| `{alert}` |" not in page] == []


@NEEDS_PROMTOOL
async def test_promtool_finds_no_fault_in_the_metrics(tmp_path: Path) -> None:
    async with run_measured_relay(tmp_path) as measured:
        scraped = await measured.running.call("GET", "/metrics", by=None)
    assert output_of("promtool", "check", "metrics", given=scraped.body.decode()) == ""


async def refused_reloader() -> Reloader:
    """Return a reloader whose file was wrong. It never comes to the parts of the relay."""

    def load() -> LoadedConfig:
        raise ConfigError("relay.yaml:1: it is wrong")

    parts: Any = None
    config, alone = LoadedConfig(Config(), None), contextlib.nullcontext
    reloader = Reloader(parts, config, load, SystemClock(), alone)
    with pytest.raises(ReloadRefused):
        await reloader.reload("a test")
    return reloader


@NEEDS_PROMTOOL
async def test_a_relay_in_trouble_fires_every_alert_that_it_can(tmp_path: Path) -> None:
    async with run_measured_relay(tmp_path) as measured:
        relay = measured.running
        measured.consumer.is_connected = True
        await relay.observe(make_event())
        await eventually(lambda: not relay.dispatcher.workers[0].waiting)
        before = series_of(await scrape(relay))

        relay.sinks["box"].failure = Rejected("it never wants this")
        await relay.observe(make_event(), make_event(event_id="rejected"))
        await eventually(lambda: relay.dispatcher.get_worker("box").ends["parked"] == 1)
        relay.sinks["box"].failure = Deferred("it is down", skew=45.0)
        others = [make_event(event_id=f"event-{number}") for number in range(4)]
        await relay.observe(make_event(), make_event(event_id="rejected"), *others)
        await eventually(lambda: relay.dispatcher.workers[0].failing)
        relay.clock.offset += relay.seconds_to_not_before() - 200
        measured.poller.lost = True
        relay.server.state.reloader = await refused_reloader()
        measured.consumer.is_connected = False
        relay.make_store_read_only()
        assert (await relay.decide()).status in (409, 503)
        await eventually(lambda: relay.store.write_error is not None)
        after = series_of(await scrape(relay))
    expected = {
        "ImdsRelayEventDueWithoutApproval",
        "ImdsRelaySourceLost",
        "ImdsRelayStoreFailing",
        "ImdsRelayConfigurationRefused",
        "ImdsRelaySinkFailing",
        "ImdsRelayDeadLetters",
        "ImdsRelayOldestMessageTooOld",
        "ImdsRelayClockWrong",
        "ImdsRelayApprovalsLinkDown",
    }
    check_firing(tmp_path, before, after, expected)


@NEEDS_PROMTOOL
async def test_a_hub_with_a_silent_scope_and_a_wrong_clock_fires_two_alerts(tmp_path: Path) -> None:
    agents = (
        AuthorizedSender("scope-a", "vm-0", "user-a"),
        AuthorizedSender("scope-b", "vm-1", "user-b"),
    )
    pulse = Pulse(version="1.0.0", names=(), live=(), poll_age=0.0, clock_offset=0.0)
    late = pulse.model_copy(update={"clock_offset": 5.0})
    async with run_measured_relay(tmp_path) as measured:
        relay, roster = measured.running, measured.hub.roster
        measured.consumer.is_connected = True
        now = relay.clock.now()
        roster.note_listening(now)
        for agent in agents:
            roster.note_message(agent, agent.relay, now, pulse)
        before = series_of(await scrape(relay))
        for _ in range(4):
            relay.clock.offset += 50
            roster.note_listening(relay.clock.now())
            roster.note_message(agents[1], "vm-1", relay.clock.now(), late)
        after = series_of(await scrape(relay))
    assert after['imds_relay_hub_agents{state="silent"}'] == 1
    assert after['imds_relay_hub_agents{state="fresh"}'] == 1
    check_firing(tmp_path, before, after, {"ImdsRelayScopeSilent", "ImdsRelayClockWrong"})


PANELS = orjson.loads((DEPLOY / "grafana" / "imds-relay.json").read_bytes())["panels"]
EXPRESSIONS = {
    f"panel:{panel['id']}:{target['refId']}": target["expr"]
    for panel in PANELS
    for target in panel.get("targets", ())
}


def test_the_dashboard_shows_metrics_that_are_there() -> None:
    assert len(EXPRESSIONS) > 15
    names = re.findall(r"imds_relay_\w+", " ".join(EXPRESSIONS.values()))
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert metrics <= documented_metrics().keys()
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))


@NEEDS_PROMTOOL
def test_prometheus_parses_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    variables = re.compile(r"\$(__rate_interval|instance)")
    values = {"__rate_interval": "5m", "instance": ".*"}
    rules = [
        {"record": name, "expr": variables.sub(lambda found: values[found[1]], expression)}
        for name, expression in EXPRESSIONS.items()
    ]
    path = tmp_path / "dashboard.yml"
    path.write_bytes(orjson.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    output_of("promtool", "check", "rules", path)
