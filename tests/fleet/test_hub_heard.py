"""Whom the hub hears."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.events.build import Origin, common_event_data
from relay.events.model import ScheduledEvent
from relay.fleet.hub.hub import Hub
from relay.fleet.messages import Pulse
from relay.fleet.routing import agent_key
from relay.fleet.settings import HubSettings, TrustDomain
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import open_store
from tests.clocks import NOON, ManualClock

AGENT = Origin("vmss-a-1", "vm-0")
SETTINGS = HubSettings.model_validate(
    {
        "role": "hub",
        "url": "amqp://imds-hub:x@127.0.0.1",
        "domains": [{"user": "vmss-a", "scopes": ["vmss-a-*"]}],
    }
)


def pulse(
    *events: ScheduledEvent,
    seconds: float,
    origin: Origin = AGENT,
    clock_offset: float = 0.0,
    user: str = "vmss-a",
) -> DeliveredMessage:
    """A pulse of the agent, sent so many seconds after noon."""
    content = Pulse(
        vm_id="vm",
        boot_id="boot",
        version="1.0.0",
        zone=None,
        names=("vm-0",),
        live=tuple(common_event_data(event, 1) for event in events),
        poll_age=0.0,
        clock_offset=clock_offset,
    )
    event = content.to_event(origin, NOON + timedelta(seconds=seconds))
    properties = Basic.Properties(user_id=user)
    deliver = Basic.Deliver(
        "tag", 1, exchange="azure.scheduledevents.fleet", routing_key=agent_key("pulse", origin)
    )
    return DeliveredMessage(
        deliver, ContentHeader(0, 2, properties), event.body, cast("AbstractChannel", None)
    )


def ignore(*_: Any, **__: Any) -> None:
    """Take anything."""


async def test_nobody_reports_in_the_name_of_the_hub(tmp_path: Path) -> None:
    """A domain with a pattern such as * can speak for the scope that the hub itself has."""
    clock = ManualClock()
    domain = TrustDomain(user="vmss-a", scopes=("*",))
    settings = SETTINGS.model_copy(update={"domains": (domain,)})
    owner, origin = StateFileScopeAndVm("hub", None, is_hub=True), Origin("hub", "hub-0")
    async with open_store(
        StoreSettings(path=tmp_path / "hub.db"), owner, clock, lambda _: ()
    ) as store:
        hub = Hub(settings, origin, store, clock, ignore, ignore)
        await hub.load()
        await hub.take([pulse(seconds=0, origin=origin), pulse(seconds=0)])
        assert [agent.relay for agent in hub.roster] == ["vm-0"]
