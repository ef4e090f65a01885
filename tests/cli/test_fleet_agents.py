"""``fleet agents``: who a hub has heard of, for people and for programs."""

from __future__ import annotations

import re
from pathlib import Path

from relay.fleet.hub.hub import UPKEEP_INTERVAL
from relay.fleet.hub.roster import FRESH_FOR
from relay.fleet.messages import Pulse
from relay.fleet.routing import AuthorizedSender
from tests.api.measured_relay import run_measured_relay
from tests.api.running_relay import RunningRelay, run_relay
from tests.cli.command import CommandResult, run_async


async def agents(relay: RunningRelay, *arguments: str) -> CommandResult:
    url, key = f"http://127.0.0.1:{relay.server.port}", "bearer-test-key-of-reader"
    return await run_async("fleet", "agents", *arguments, "--url", url, "--key", key)


async def test_the_agents_are_shown_and_scopes_of_which_nobody_is_heard(tmp_path: Path) -> None:
    async with run_measured_relay(tmp_path) as measured:
        relay, roster = measured.running, measured.hub.roster
        assert (await agents(relay)).out == "no agent has been heard of\n"
        roster.note_listening(relay.clock.now())
        pulse = Pulse(version="1.2", zone="2", names=(), live=(), poll_age=0.4, clock_offset=-1.5)
        for scope in ("vmss-a-1", "vmss-a-2"):
            sender = AuthorizedSender(scope, "vm-0", "vmss-a")
            roster.note_message(sender, "VM_0", relay.clock.now(), pulse)
        shown = (await agents(relay)).out
        row = r"vmss-a-1 +VM_0 +fresh +.* +1\.2 +2 +-1\.5 s +0 s before\n"
        assert re.search(row, shown)
        assert shown.endswith("2 agents in 2 scopes\n")
        assert "vmss-a-2" not in (await agents(relay, "--scope", "vmss-a-1")).out

        for _ in range(int(FRESH_FOR.total_seconds() / UPKEEP_INTERVAL) + 1):
            relay.clock.offset += UPKEEP_INTERVAL
            roster.note_listening(relay.clock.now())
        told = "no agent of scope vmss-a-2 is heard of: none of its events starts or ends\n"
        assert told in (await agents(relay)).out
        assert (await agents(relay, "--json")).json["silentScopes"] == ["vmss-a-1", "vmss-a-2"]


async def test_a_relay_that_is_no_hub_has_no_agents(tmp_path: Path) -> None:
    async with run_relay(tmp_path) as relay:
        result = await agents(relay)
    assert (result.code, "this relay is no hub: it has no agents" in result.err) == (1, True)
