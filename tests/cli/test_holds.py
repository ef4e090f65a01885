"""The verbs about standing holds."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.approvals.request import HOLD_NOTICE
from relay.cli._options import AZURE_PROCEEDS
from relay.simulator import Plan
from tests.cli.command import run_command
from tests.cli.running_relay import LOCAL_PRINCIPAL, RunningRelay, running_relay

RULES = [
    {"name": "users", "match": {"event_source": ["User"]}, "approve": "automatic"},
    {
        "name": "one",
        "approve": {"votes": 1, "from": [LOCAL_PRINCIPAL], "remind": "5m"},
        "runbook": "https://wiki.example.com/one",
    },
]


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    async with running_relay(tmp_path, rules=RULES) as relay:
        yield relay


async def test_a_standing_hold_from_the_command_line_until_its_end(relay: RunningRelay) -> None:
    assert (await relay.run("holds")).out == "no standing holds\n"
    added = await relay.run(
        "holds", "add", "--type", "Reboot", "--resource", "db-*", "--for", "2h", "--reason", "sale"
    )
    assert (added.code, added.err.strip()) == (0, AZURE_PROCEEDS)
    hold_id = re.search(
        r"standing hold (\w{8}) holds event_type Reboot; resources db-\*", added.out
    )
    assert hold_id is not None
    event = await relay.announce(Plan(type="Reboot", source="User", resources=("db-1",)))
    shown = await relay.get_event(event)
    assert shown["approval"]["state"] == "held"
    whose = rf"standing hold {hold_id[1]} of {LOCAL_PRINCIPAL} until .* \(sale\)"
    for verb in ("show", "explain"):
        text = (await relay.run(verb, event.event_id)).out
        assert re.search(rf"held by +{whose}; .*{re.escape(HOLD_NOTICE)}", text)
    listed = await relay.run("holds")
    assert re.search(rf"{hold_id[1]} +active .*{LOCAL_PRINCIPAL} .*db-\*", listed.out)
    assert AZURE_PROCEEDS in listed.err
    ended = await relay.run("holds", "end", hold_id[1], "--reason", "sold out")
    assert f"standing hold {hold_id[1]} is ended" in ended.out
    await relay.wait_for_webhook("startrequest.accepted", event.event_id)
    assert (await relay.run("holds")).out == "no standing holds\n"
    over = (await relay.run("holds", "--over", "--json")).json["items"]
    assert [(hold["state"], hold["endedBy"]) for hold in over] == [("ended", LOCAL_PRINCIPAL)]
    assert f"ended by {LOCAL_PRINCIPAL}" in (await relay.run("holds", "--over")).out
    again = await relay.run("holds", "end", hold_id[1])
    assert (again.code, "no such standing hold that is not over" in again.err) == (1, True)


async def test_a_vote_under_a_standing_hold_says_whose_it_is(relay: RunningRelay) -> None:
    await relay.run("holds", "add", "--every-event", "--for", "2h", "--reason", "sale")
    event = await relay.announce()
    voted = await relay.run("approve", event.event_id, "--yes")
    assert re.search(rf"held \(1 of 1 vote\): standing hold \w+ of {LOCAL_PRINCIPAL}", voted.out)
    assert "runbook" in voted.err
    shown = (await relay.run("show", event.event_id)).out
    held = f"It is held by {LOCAL_PRINCIPAL} until"
    assert f"{LOCAL_PRINCIPAL} voted to approve, 1 of 1. {held}" in shown
    await relay.run("hold", event.event_id)
    released = await relay.run("release", event.event_id)
    assert re.search(r"released; standing hold \w+ of .* still holds it", released.out)


async def test_explain_shows_the_runbook_and_when_people_are_reminded(relay: RunningRelay) -> None:
    event = await relay.announce()
    explained = (await relay.run("explain", event.event_id)).out
    assert re.search(r"runbook +https://wiki.example.com/one", explained)
    assert re.search(r"reminder +.*\(in (9|10) min\)", explained)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--for", "1h"], "expected conditions"),
        (["--for", "1h"], "or --every-event, got neither"),
        (["--type", "Reboot", "--every-event", "--for", "1h"], "or --every-event, got both"),
        (["--type", "Reboot"], "expected one of --for and --ends, got neither"),
        (["--type", "Reboot", "--for", "1h", "--ends", "2026-01-01"], "--ends, got both"),
        (["--type", "Reboot", "--for", "soon"], "--for: expected a duration"),
        (["--type", "Reboot", "--for", "999999999999d"], "--for: expected a time that"),
        (["--type", "Reboot", "--ends", "soon"], "--ends: expected a time"),
    ],
)
def test_a_wrong_call_names_what_was_expected(arguments: list[str], problem: str) -> None:
    result = run_command(
        *("holds", "add", "--reason", "r", *arguments),
        *("--url", "http://127.0.0.1:9", "--key", "k"),
    )
    assert (result.code, problem in result.err) == (2, True), result.err
