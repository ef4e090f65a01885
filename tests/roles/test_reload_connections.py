"""Connections over which others decide follow a reload."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from cryptography import x509

from relay.app import RunningRelay
from relay.clock import SystemClock
from relay.config import Config, LoadedConfig
from relay.errors import ReloadRefused
from relay.roles.reload import Reloader
from relay.simulator import Plan
from tests.certificates import Authority
from tests.counting_proxy import counting_proxy
from tests.eventually import eventually
from tests.fleet.running_fleet import DOMAINS, running_fleet
from tests.journey.bus import Bus, define_users, unused_exchange
from tests.journey.relay_process import client
from tests.rabbitmq import Broker
from tests.roles.reloadable_relay import reloadable_relay


async def test_approvals_over_amqp_follow_the_clients(own_broker: Broker, tmp_path: Path) -> None:
    define_users(own_broker)
    bus = Bus(own_broker, unused_exchange("reload"))
    sink = {"kind": "rabbitmq", "name": "bus", "exchange": bus.exchange}
    sink["url"] = own_broker.amqp_url()
    rule = {"name": "reboots", "approve": {"votes": 1, "from": ["client:drain"]}}

    def api(user: str) -> dict[str, Any]:
        drain = client("drain", key="a-third-key-for-tests-only", amqp_user=user)
        return {"listen": "127.0.0.1:0", "clients": [client("operator"), drain]}

    async with counting_proxy(own_broker.amqp_url()) as (proxy, url):
        approvals: dict[str, Any] = {"tell_first": "0s", "rules": [rule], "amqp": {"url": url}}
        async with reloadable_relay(
            tmp_path, scope="journey", sinks=[sink], approvals=approvals, api=api("drain")
        ) as relay:

            async def is_consuming() -> bool:
                link = relay.running.server.state.relay
                assert link is not None
                is_up = link.approvals_link is not None and link.approvals_link.is_connected
                return is_up and await bus.waiting() == (0, 1)

            await eventually(is_consuming, every=0.1)
            event = relay.reboot()
            await eventually(lambda: _is_known(relay, event), every=0.1)
            decision = {"eventId": event.event_id, "decision": "approve"}
            decision["revision"] = (await relay.event(event))["revision"]
            await relay.reload(api=api("holder"))
            await bus.send(decision, "old user", user="drain")
            rejections = relay.running.server.state.rates.rejections
            await eventually(lambda: rejections.count == 1)
            assert relay.starts(event) == 0
            await bus.send(decision, "new user", user="holder")
            await eventually(lambda: relay.starts(event) == 1)
            await eventually(lambda: (proxy.accepted, proxy.open) == (2, 1))
            await relay.reload(approvals={**approvals, "amqp": None})
            await eventually(lambda: proxy.open == 0)
            assert (await relay.call("GET", "/readyz"))[0] == 200


async def _is_known(relay: Any, event: Any) -> bool:
    return "revision" in await relay.event(event)


async def test_new_connections_get_the_new_certificate_and_old_ones_stay(tmp_path: Path) -> None:
    authority = Authority("tests")
    name = x509.DNSName("localhost")
    for file in ("one", "other"):
        (tmp_path / f"{file}.pem").write_bytes(authority.issue(file, [name]))
    trust = ssl.create_default_context(cadata=authority.pem.decode())

    def api(file: str | None) -> dict[str, Any]:
        pem = str(tmp_path / f"{file}.pem")
        tls = {"cert_file": pem, "key_file": pem} if file is not None else None
        return {"listen": "127.0.0.1:0", "clients": [client("operator")], "tls": tls}

    async def name_shown(port: int) -> str:
        _, writer = await asyncio.open_connection("localhost", port, ssl=trust)
        certificate = writer.get_extra_info("peercert")
        writer.close()
        names = dict(pair for part in certificate["subject"] for pair in part)
        return str(names["commonName"])

    async with (
        reloadable_relay(tmp_path) as relay,
        aiohttp.ClientSession(f"http://127.0.0.1:{relay.running.server.port}") as kept,
    ):
        port = relay.running.server.port

        async def health(session: aiohttp.ClientSession) -> Any:
            async with session.get("/healthz") as response:
                return orjson.loads(await response.read())

        assert await health(kept) == {"status": "ok"}
        await relay.reload(api=api("one"))
        assert await name_shown(port) == "one"
        await relay.reload(api=api("other"))
        assert await name_shown(port) == "other"
        assert await health(kept) == {"status": "ok"}  # over the connection of before
        await relay.reload(api=api(None))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as new:
            assert await health(new) == {"status": "ok"}


def reloader(running: RunningRelay, before: Config, after: dict[str, Any]) -> Reloader:
    loaded = LoadedConfig(Config.model_validate(after), None)
    return Reloader(running, LoadedConfig(before, None), lambda: loaded, SystemClock(), nullcontext)


async def test_a_hub_and_an_agent_reload_their_own_part(own_broker: Broker, tmp_path: Path) -> None:
    scopes = {"vmss-a-11111111": ["vm-a"], "vmss-a-22222222": ["vm-b"]}
    other = ("vmss-a-22222222", "vm-b")
    narrow = {**DOMAINS[0], "scopes": ["vmss-a-1*"]}
    async with running_fleet(
        own_broker, tmp_path, scopes, domains=[narrow], without_agents=["vm-b"]
    ) as fleet:
        hub = fleet.running_hub
        agent = await fleet.start_agent(*other)
        event = fleet.azures[other[0]].schedule(Plan(resources=("vm-b",), lasts=None))
        await eventually(lambda: hub.server.state.rates.rejections.count > 0)
        assert [known.name for known in fleet.roster] == ["vm-a"]
        document = fleet.hub_document(tmp_path / "hub.db")
        before = Config.model_validate(document)
        document["fleet"]["domains"] = [{**DOMAINS[0], "scopes": ["vmss-a-*"]}]
        changes = await reloader(hub, before, document).reload("a test")
        assert [*changes] == [f"fleet.domains.{DOMAINS[0]['user']}"]
        fleet.azures[other[0]].start(event)
        await eventually(lambda: "event.started" in fleet.inbox.types_of(event.event_id))

        # An agent changes its own part, and its link to the hub needs a restart.
        document = fleet.agent_document(*other)
        before = Config.model_validate(document)
        document["source"]["interval"] = "600ms"
        assert len(await reloader(agent, before, document).reload("a test")) == 1
        document["fleet"]["exchange"] = "another"
        with pytest.raises(ReloadRefused) as refused:
            await reloader(agent, before, document).reload("a test")
        assert refused.value.restart_keys == ["fleet.exchange"]
