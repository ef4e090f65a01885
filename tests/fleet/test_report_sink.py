"""Which events an agent publishes to the hub."""

from __future__ import annotations

import pytest

from relay.errors import Rejected
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.agent.agent import ReportSink
from tests.builders import DATA, EVENT_ID, cloudevent


class Hub:
    """The far side: it takes what is published."""

    def __init__(self) -> None:
        self.published: list[tuple[str, str]] = []

    async def publish(self, event: CloudEvent, key: str) -> None:
        self.published.append((event.name, key))


@pytest.mark.parametrize("name", ["event.scheduled", "event.ended", "relay.source-lost"])
async def test_what_an_agent_recorded_is_published_for_its_scope(name: str) -> None:
    hub = Hub()
    data = DATA if name.startswith("event.") else {"sink": None, "reason": "?", "count": 1}
    event = cloudevent(name, EVENT_ID if data is DATA else None, data)
    await ReportSink(hub.publish, Origin("vmss-a", "VM-0")).deliver(event)
    ((published, key),) = hub.published
    assert published == name
    assert key.endswith(".vmss-a.vm-0")


async def test_what_a_relay_recorded_for_a_sink_named_hub_before_it_was_an_agent_is_rejected() -> (
    None
):
    """The broker would refuse it and close the channel, again and again."""
    hub = Hub()
    with pytest.raises(Rejected):
        await ReportSink(hub.publish, Origin("vmss-a", "VM-0")).deliver(
            cloudevent("approval.recorded", EVENT_ID, DATA)
        )
    assert hub.published == []
