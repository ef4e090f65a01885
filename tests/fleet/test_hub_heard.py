"""When the hub says that an agent was heard: what the agent said is merged and recorded then."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.events.build import Origin, event_data
from relay.events.model import ScheduledEvent
from relay.fleet.hub.hub import Hub
from relay.fleet.messages import Pulse, StartResult
from relay.fleet.routing import Sender, pulse_key
from relay.fleet.settings import HubSettings
from relay.outbox import StateFileOwner, StoreSettings
from relay.outbox.sqlite import open_store
from tests.approvals.builders import build_event
from tests.approvals.manual_clock import NOON, ManualClock

AGENT = Origin("vmss-a-1", "vm-0")
SETTINGS = HubSettings.model_validate(
    {
        "role": "hub",
        "url": "amqp://imds-hub:x@127.0.0.1",
        "domains": [{"user": "vmss-a", "scopes": ["vmss-a-*"]}],
    }
)


class Heard:
    """Notes who was heard."""

    def __init__(self) -> None:
        self.relays: list[str] = []

    def on_result(self, _sender: Sender, _result: StartResult) -> None:
        """An agent has answered an order."""

    def on_heard(self, _scope: str, relay: str) -> None:
        """What an agent said is merged and recorded."""
        self.relays.append(relay)


def pulse(*events: ScheduledEvent, seconds: float) -> DeliveredMessage:
    """A pulse of the agent, sent so many seconds after noon."""
    content = Pulse(
        vm_id="vm",
        boot_id="boot",
        version="1.0.0",
        zone=None,
        names=("vm-0",),
        live=tuple(event_data(event, 1) for event in events),
        poll_age=0.0,
        clock_offset=0.0,
    )
    event = content.to_event(AGENT, NOON + timedelta(seconds=seconds))
    properties = Basic.Properties(user_id="vmss-a")
    deliver = Basic.Deliver(
        "tag", 1, exchange="azure.scheduledevents.fleet", routing_key=pulse_key(AGENT)
    )
    return DeliveredMessage(
        deliver, ContentHeader(0, 2, properties), event.body, cast("AbstractChannel", None)
    )


def ignore(*_: Any, **__: Any) -> None:
    """Take anything."""


async def test_a_pulse_with_news_that_are_put_off_is_not_heard_yet(tmp_path: Path) -> None:
    clock, heard = ManualClock(), Heard()
    owner = StateFileOwner("hub", None, is_hub=True)
    async with open_store(
        StoreSettings(path=tmp_path / "hub.db"), owner, clock, lambda _: ()
    ) as store:
        hub = Hub(SETTINGS, Origin("hub", "hub-0"), store, clock, ignore, ignore)
        await hub.load()
        hub.attach(heard, cast("Any", None), lambda: None)
        await hub.take_pulses([pulse(seconds=0)])
        assert heard.relays == ["vm-0"]
        await hub.take_pulses([pulse(build_event(), seconds=1)])
        assert heard.relays == ["vm-0"]
