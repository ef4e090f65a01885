"""Traces over RabbitMQ: the event, its message, and the approval that comes back."""

from __future__ import annotations

from pathlib import Path

from relay.events.tracing import parse_traceparent
from tests.eventually import eventually
from tests.journey.bus import define_users, running_system
from tests.rabbitmq import Broker
from tests.telemetry.collector import collector


async def test_a_consumer_goes_on_with_the_trace_and_approves_in_it(
    own_broker: Broker, tmp_path: Path
) -> None:
    """Over AMQP a causationid is the id of a message, and the trace goes on all the same."""
    define_users(own_broker)
    foreign = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with collector() as collecting:
        traces = {"url": collecting.url, "allow_http": True}
        async with running_system(own_broker, tmp_path, telemetry={"traces": traces}) as system:
            event, decision = await system.schedule_reboot()
            scheduled = system.bus.events_of_type("event.scheduled", event)[0]
            headers = system.bus.headers[system.bus.events.index(scheduled)]
            carried = parse_traceparent(headers["traceparent"])
            assert carried is not None
            assert headers["ce-traceparent"] == scheduled["traceparent"]
            caller = carried.child("1234567890abcdef")
            # The same id of a message as a CloudEvent could have is no parent.
            await system.bus.send(decision, "a" * 32, headers={"traceparent": str(caller)})
            await system.bus.wait_for_event("startrequest.accepted", event)
            other, decision = await system.schedule_reboot()
            cloud = {"specversion": "1.0", "id": "1", "type": "t", "source": "/db"}
            await system.bus.send({**cloud, "traceparent": foreign, "data": decision}, "b")
            await system.bus.wait_for_event("startrequest.accepted", other)
        await eventually(lambda: len(collecting.named("startrequest.accepted")) == 2)
    ours = [span for span in collecting.spans if span.trace_id == carried.trace_id]
    (message,) = [
        span
        for span in ours
        if span.name == "deliver bus" and span.attributes["imds_relay.type"] == "event.scheduled"
    ]
    assert (message.span_id, message.kind) == (carried.span_id, "producer")
    by_name = {span.name: span for span in ours}
    recorded, granted = by_name["approval.recorded"], by_name["approval.granted"]
    assert (recorded.parent_id, recorded.kind) == (caller.span_id, "consumer")
    assert granted.parent_id == recorded.span_id
    assert by_name["StartRequest"].parent_id == granted.span_id
    assert by_name["startrequest.accepted"].parent_id == granted.span_id
    theirs = [span for span in collecting.named("approval.recorded") if span is not recorded]
    assert [span.links for span in theirs] == [(foreign.split("-")[1],)]
    assert theirs[0].trace_id not in (carried.trace_id, foreign.split("-")[1])
