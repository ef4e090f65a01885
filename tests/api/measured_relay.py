"""A relay whose /metrics has every metric: with polls, a link for approvals, and a fleet."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from relay.amqp.approval_consumer import ApprovalConsumer
from relay.amqp.topology import approvals_queue
from relay.approvals.amqp_handler import AmqpApprovalHandler
from relay.fleet.hub.hub import Hub
from relay.fleet.settings import HubSettings
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.poller import Poller
from relay.ingest import Recorder
from tests.api.running_relay import ORIGIN, SCOPE, RunningRelay, run_relay
from tests.background_tasks import BackgroundTasks
from tests.eventually import eventually
from tests.fleet.test_hub_counts import SETTINGS as HUB_SETTINGS
from tests.imds.scripted_server import run_server


@dataclass(frozen=True, slots=True)
class MeasuredRelay:
    """A relay, its poller, and a hub that has no connection."""

    running: RunningRelay
    poller: Poller
    hub: Hub
    consumer: ApprovalConsumer


def _ignore(*_: Any, **__: Any) -> None:
    """Take anything."""


@asynccontextmanager
async def run_measured_relay(folder: Path, **changes: Any) -> AsyncIterator[MeasuredRelay]:
    """Run it. Its poller reads a real server; the rest of the relay does not know of its events."""
    settings: HubSettings = HUB_SETTINGS
    async with run_relay(folder, attached=False, **changes) as running, run_server() as server:
        store, clock = running.store, running.clock
        source = SourceSettings(url=server.url)
        hub = Hub(
            settings, ORIGIN, store, clock, _ignore, _ignore, running.relay.gate.submit, _ignore
        )
        consumer = ApprovalConsumer(
            urls=lambda: [URL("amqp://127.0.0.1:1")],
            declare=True,
            queue=approvals_queue("azure.scheduledevents.approvals", SCOPE),
            relay=ORIGIN.relay,
            handler=AmqpApprovalHandler(callers={}, gate=running.gate, store=store, clock=clock),
            on_unusable=_ignore,
            clock=clock,
        )
        async with ImdsClient(source, clock) as client:
            recorder = Recorder(ORIGIN, "boot", None)
            poller = Poller(
                source, client, recorder, store, clock, report=_ignore, last_read_at=None
            )
            relay = replace(
                running.relay, source=poller, approvals_link=consumer, roster=hub.roster, hub=hub
            )
            running.server.state.attach_relay(relay)
            async with BackgroundTasks(poller.run()):
                await eventually(lambda: poller.read_age is not None)
            yield MeasuredRelay(running, poller, hub, consumer)


@dataclass(frozen=True, slots=True)
class DocumentedMetric:
    kind: str
    unit: str
    meaning: str
    labels: frozenset[str]


def documented_metrics() -> dict[str, DocumentedMetric]:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(imds_relay_\w+)` \| (\w+) \| (\w*) ?\| (.*?) \| (.*) \|$", page, re.MULTILINE
    )
    return {
        name: DocumentedMetric(
            kind, unit, meaning, frozenset(re.findall(r"(?:^|; )`(\w+)`: ", labels))
        )
        for name, kind, unit, meaning, labels in rows
    }


async def scrape(relay: RunningRelay) -> list[Family]:
    scraped = await relay.call("GET", "/metrics", by=None)
    assert scraped.status == 200
    return list(text_string_to_metric_families(scraped.body.decode()))
