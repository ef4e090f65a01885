"""A fleet has one hub. A second hub does nothing, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.app import start_relay
from relay.clock import SystemClock
from relay.config import Config
from relay.fleet.agent import start_orders
from relay.fleet.hub import link
from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.running_fleet import RunningFleet, running_fleet
from tests.ports import reserve
from tests.rabbitmq import Broker
from tests.store.open_store import open_store_in, record_event

SCOPE = "vmss-a-1f0c33ab"
AUTOMATIC = {"approvals": {"tell_first": "0s", "rules": [{"name": "all", "approve": "automatic"}]}}


async def test_a_second_hub_tells_nothing_and_starts_nothing_until_the_first_is_gone(
    own_broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(link, "LOST_AFTER", 1.0)
    monkeypatch.setattr(start_orders, "RESTART_PAUSE", 0.0)
    async with running_fleet(
        own_broker, tmp_path, {SCOPE: ["vm-0", "vm-1"]}, hub=AUTOMATIC
    ) as fleet:
        second = fleet.hub_config(tmp_path / "second.db")
        async with start_relay(second, SystemClock()) as other:
            await eventually(lambda: "another hub reads" in caplog.text)
            await eventually(lambda: other.relay.source.lost)
            await eventually(lambda: "relay.source-lost" in names(fleet))
            event = fleet.azures[SCOPE].schedule(Plan(resources=("vm-0",)))
            await eventually(lambda: "event.started" in fleet.told(event.event_id))
            ids = [each["id"] for each in fleet.inbox.events]
            assert len(set(ids)) == len(ids)
            assert len(fleet.azures[SCOPE].start_requests) == 1
            assert await other.relay.store.read(lambda tx: tx.occurrences.live_occurrences()) == []
            await fleet.stop_hub()
            await eventually(lambda: not other.relay.source.lost)
            await eventually(lambda: "relay.source-recovered" in names(fleet))


def names(fleet: RunningFleet) -> list[str]:
    return [each["type"].split(".", 2)[2][:-3] for each in fleet.inbox.events]


def hub_without_broker(folder: Path) -> Config:
    """Return the configuration of a hub that finds no broker."""
    return Config.model_validate(
        {
            "fleet": {
                "role": "hub",
                "url": f"amqp://hub:hub@127.0.0.1:{reserve(1)[0]}/",
                "domains": [{"user": "vmss-a", "scopes": ["*"]}],
            },
            "store": {"path": str(folder / "relay.db")},
            "api": {"listen": "127.0.0.1:0"},
        }
    )


async def test_the_state_file_of_a_plain_relay_is_set_aside_by_a_hub(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The hub begins with approvals off: nobody has told it what to make of this."""
    async with open_store_in(tmp_path) as store:
        await store.transact(record_event(1))
    async with start_relay(hub_without_broker(tmp_path), SystemClock()) as hub:
        assert await hub.relay.gate.approval_mode() == "off"
        assert await hub.relay.store.read(lambda tx: tx.occurrences.live_occurrences()) == []
    assert "was renamed to" in caplog.text


async def test_a_hub_counts_each_failed_connection_in_a_row(tmp_path: Path) -> None:
    """As docs/metrics.md says; it was never connected."""
    async with start_relay(hub_without_broker(tmp_path), SystemClock()) as hub:
        await eventually(lambda: hub.relay.source.failures >= 2)
