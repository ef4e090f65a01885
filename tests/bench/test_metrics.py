"""A small run of each metric, with the real relay, receiver and broker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from bench.__main__ import GROUPS, main
from bench.results import RESULTS, Section
from bench.run import Options
from tests.rabbitmq import Broker, Reachable

ROOT = Path(__file__).parents[2]
SCALE = 0.01
slow = pytest.mark.skipif(
    "RELAY_TEST_CHAOS" not in os.environ, reason="takes minutes: make chaos-tests"
)
"""`make bench` shows as well whether these metrics can be measured."""


async def measure(metric: str, amqp_url: str = "", broker: Broker | None = None) -> Section:
    """Measure one round with few events. Each value must be there."""
    rounds: list[str] = []
    options = Options(
        repeats=1, amqp_url=amqp_url, broker=broker, scale=SCALE, advance=rounds.append
    )
    section = await GROUPS["all"][metric](options)
    assert section.metric == metric
    assert len(rounds) == 1
    for row in section.rows:
        assert row.values, row.name
        assert set(row.values) <= set(section.columns)
        assert all(len(values) == 1 for values in row.values.values()), row.name
    return section


def value(section: Section, name: str, column: str = "relay") -> float:
    """Return the value of the row whose name contains this."""
    (row,) = (row for row in section.rows if name in row.name)
    return row.values[column][0]


async def test_latency() -> None:
    section = await measure("latency")
    for column in ("relay", "bare outbox"):
        assert 0 < value(section, "p50", column) <= value(section, "p99", column) < 60_000
        assert len(section.series[column]) == 1


@slow
async def test_burst() -> None:
    section = await measure("burst")
    assert value(section, "1 endpoint, deliveries", "raw limit") > 0
    for column in ("relay", "bare outbox"):
        for name in ("1 endpoint", "10 endpoints"):
            assert value(section, f"{name}, deliveries", column) > 0
            assert value(section, f"{name}, CPU", column) > 0
            assert value(section, f"{name}, until recorded", column) > 0
            assert 10 < value(section, f"{name}, peak memory", column) < 1000
            assert value(section, f"{name}, repeats", column) == 0


async def test_publish(broker: Reachable) -> None:
    section = await measure("publish", broker.amqp_url())
    for column in ("relay", "bare outbox", "raw limit"):
        assert value(section, "deliveries", column) > 0


async def test_isolation() -> None:
    section = await measure("isolation")
    assert 0 < value(section, "p99", "one hangs") < 10_000, "less than the other endpoint hangs"


@slow
async def test_crash(broker: Reachable) -> None:
    section = await measure("crash", broker.amqp_url())
    for name in ("webhook", "RabbitMQ"):
        assert value(section, f"{name}, lost") == 0
        assert value(section, f"{name}, repeated") <= 64


@slow
async def test_idle(broker: Reachable) -> None:
    section = await measure("idle", broker.amqp_url())
    for name in ("webhook", "RabbitMQ"):
        assert 20 < value(section, f"{name}, resident") < 200
        assert 0 <= value(section, f"{name}, CPU") < 200


async def test_flood() -> None:
    section = await measure("flood")
    assert all(0 < row.values["relay"][0] < 60_000 for row in section.rows)


@slow
@pytest.mark.parametrize("metric", ["documents", "sinks", "backlog", "journal"])
async def test_growth(metric: str) -> None:
    section = await measure(metric)
    assert section.ratio == (section.columns[-1], section.columns[0])
    for row in section.rows:
        assert set(row.values) == set(section.columns)
        assert all(values[0] > 0 for values in row.values.values()), row.name


def test_the_command_prints_json_for_programs() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "bench", "flood", "--scale", "0.002", "--repeat", "2", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    measured = RESULTS.validate_python(orjson.loads(result.stdout))
    assert list(measured) == ["flood"]
    assert measured["flood"].rounds == 2
    assert "SQLite" in measured["flood"].versions
    assert result.stderr.count("measuring flood") == 2


@pytest.mark.parametrize("arguments", [["nothing"], ["idle", "--write", "--scale", "0.5"]])
def test_wrong_usage_measures_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m bench" in capsys.readouterr().err


@slow
async def test_a_fleet(own_broker: Broker) -> None:
    own_broker.start()
    rate = await measure("fleet-rate", broker=own_broker)
    assert 0 < value(rate, "CPU per change", "hub") < 1000
    assert value(rate, "changes", "hub") > 0
    pulses = await measure("fleet-pulses", broker=own_broker)
    assert value(pulses, "CPU per pulse", "bare consumer") > 0
    wave = await measure("fleet-wave", broker=own_broker)
    assert value(wave, "copies per change", "10 agents") >= 0
    assert value(wave, "scheduled, p99", "10 agents") < 60_000
    idle = await measure("fleet-idle", broker=own_broker)
    assert value(idle, "connections", "agent") == 1
    assert value(idle, "messages", "agent") <= 60 / 0.3, "no more than a pulse"
