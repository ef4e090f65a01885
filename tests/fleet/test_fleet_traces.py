"""A trace leads through a fleet: from the poll of an agent to the StartRequest of an agent."""

from __future__ import annotations

from pathlib import Path

from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.running_fleet import running_fleet
from tests.fleet.test_fleet_orders import RULE, SCOPE, approve_when_told, wait_until_agents_obey
from tests.rabbitmq import Broker
from tests.telemetry.collector import Collector, ReceivedSpan, collector


def span_of(collecting: Collector, name: str, relay: str) -> ReceivedSpan:
    """Return the only span of a name that a relay sent."""
    (span,) = [
        span
        for span in collecting.named(name)
        if span.resource["service.instance.id"].endswith(f"/{relay}")
    ]
    return span


async def test_hub_and_agent_add_to_one_trace_and_the_order_carries_it(
    own_broker: Broker, tmp_path: Path
) -> None:
    async with collector() as collecting:
        telemetry = {"telemetry": {"traces": {"url": collecting.url, "allow_http": True}}}
        async with running_fleet(
            own_broker,
            tmp_path,
            {SCOPE: ["vm-0"]},
            hub={**RULE, **telemetry},
            agents=telemetry,
        ) as fleet:
            azure = fleet.azures[SCOPE]
            await wait_until_agents_obey()
            event = azure.schedule(Plan(resources=("vm-0",), lasts=None))
            await approve_when_told(fleet, event.event_id)
            await eventually(lambda: "startrequest.accepted" in fleet.told(event.event_id))
        spans = [span for span in collecting.spans if not span.name.startswith("relay.")]
    about_event = [span for span in spans if span.attributes.get("imds_relay.sink") != "hub"]
    assert len({span.trace_id for span in about_event}) == 1
    assert len({span.span_id for span in spans}) == len(spans)
    seen, told = (span_of(collecting, "event.scheduled", relay) for relay in ("vm-0", "hub-0"))
    assert seen.parent_id == span_of(collecting, "poll", "vm-0").span_id
    assert told.parent_id == collecting.named("report")[0].span_id
    ordered = span_of(collecting, "StartRequest", "hub-0")
    granted = span_of(collecting, "approval.granted", "hub-0")
    carried_out = span_of(collecting, "carry out order", "vm-0")
    assert ordered.parent_id == granted.span_id
    assert ordered.attributes["imds_relay.agent"] == "vm-0"
    assert carried_out.parent_id == ordered.span_id
    assert (carried_out.kind, carried_out.failed) == ("consumer", False)
    (post,) = azure.start_requests
    assert "traceparent" not in {name.lower() for name in post.headers}
