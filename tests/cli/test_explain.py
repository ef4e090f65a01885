"""``explain EVENT``: which rule decides, what is missing, until when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cli.command import called
from tests.cli.running_relay import KEY, ME, alive

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
        "from": [ME, "client:alice"],
        "expires": "5m",
        "close_before": "60s",
    },
}


async def test_explain_says_which_rule_decides_what_is_missing_and_until_when(
    tmp_path: Path,
) -> None:
    async with alive(tmp_path, rules=[FREEZE, EACH]) as relay:
        event = await relay.announced()
        found = (await called("explain", event.event_id, "-c", relay.config, "--json")).json
        assert (found["rule"], found["state"], found["votes"], found["missing"]) == (
            "each",
            "pending",
            0,
            2,
        )
        assert found["mayVote"] == sorted(["client:alice", ME])
        assert found["uncoveredResources"] == ["db-0", "db-1"]
        assert found["closes"] < found["notBefore"]
        assert [(one["name"], one["unmet"], one["decides"]) for one in found["rules"]] == [
            ("freeze", ["event_type"], False),
            ("each", [], True),
        ]
        assert (
            await called("approve", event.event_id, "--yes", "--url", relay.url, "--key", KEY)
        ).code == 0
        said = (await called("explain", event.event_id, "-c", relay.config)).out
        for words in (
            "rule each",
            "1 of 2 votes",
            f"1 vote, from {ME}",
            "does not match: event_type",
            "client:alice, good until",
            "closes",
        ):
            assert words in said, said
        await called("hold", event.event_id, "-c", relay.config)
        assert (
            "Azure proceeds at NotBefore regardless"
            in (await called("explain", event.event_id, "-c", relay.config)).out
        )


async def test_explain_of_an_event_without_a_rule_says_so(tmp_path: Path) -> None:
    async with alive(tmp_path, rules=[]) as relay:
        event = await relay.announced()
        assert (
            "no rule: it is not approved"
            in (await called("explain", event.event_id, "-c", relay.config)).out
        )
        assert (await called("explain", "nope", "-c", relay.config)).code == 1
