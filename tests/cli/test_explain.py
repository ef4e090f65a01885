"""``explain EVENT``: which rule decides, what is missing, until when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cli.command import run_async
from tests.cli.running_relay import ALICE_KEY, LOCAL_PRINCIPAL, running_relay

FREEZE = {
    "name": "freeze",
    "match": {"event_type": ["Freeze"], "event_source": ["Platform"]},
    "approve": "automatic",
}
EACH: dict[str, Any] = {
    "name": "each",
    "match": {
        "time": {
            "days": ["mon", "tue", "wed", "thu", "fri", "sat", "sun"],
            "from": "00:00",
            "to": "24:00",
        }
    },
    "approve": {
        "each_resource": True,
        "votes": 2,
        "from": [LOCAL_PRINCIPAL, "client:alice"],
        "expires": "5m",
        "close_before": "60s",
    },
}


async def test_explain_says_which_rule_decides_what_is_missing_until_when(tmp_path: Path) -> None:
    async with running_relay(tmp_path, rules=[FREEZE, EACH]) as relay:
        event = await relay.announce()
        explanation = (await relay.run("explain", event.event_id, "--json")).json
        assert (explanation["rule"], explanation["state"]) == ("each", "pending")
        assert (explanation["votes"], explanation["missing"]) == (0, 2)
        assert explanation["mayVote"] == sorted(["client:alice", LOCAL_PRINCIPAL])
        assert explanation["uncoveredResources"] == ["db-0", "db-1"]
        assert explanation["closes"] < explanation["notBefore"]
        rules = [(each["name"], each["unmet"], each["decides"]) for each in explanation["rules"]]
        assert rules == [("freeze", ["event_type"], False), ("each", [], True)]
        alice = ("--url", relay.url, "--key", ALICE_KEY)
        assert (await run_async("approve", event.event_id, "--yes", *alice)).code == 0
        output = (await relay.run("explain", event.event_id)).out
        for words in (
            "rule each",
            "1 of 2 votes",
            f"1 vote, from {LOCAL_PRINCIPAL}",
            "does not match: event_type",
            "client:alice, good until",
            "closes",
        ):
            assert words in output, output
        await relay.run("hold", event.event_id)
        held = (await relay.run("explain", event.event_id)).out
        assert "Azure proceeds at NotBefore regardless" in held


async def test_explain_of_an_event_without_a_rule_or_of_no_event_says_so(tmp_path: Path) -> None:
    async with running_relay(tmp_path, rules=[]) as relay:
        event = await relay.announce()
        assert "no rule: it is not approved" in (await relay.run("explain", event.event_id)).out
        unknown = await relay.run("explain", "nope")
        assert (unknown.code, "no such event" in unknown.err) == (1, True)
