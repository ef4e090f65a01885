"""What the command says of events under rules, limits and standing holds, and how one is named."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.approvals.request import HOLD_NOTICE
from relay.cli._options import AZURE_PROCEEDS
from relay.cli.events import with_short_event_ids
from relay.sentences import LIMIT_NOTICE
from relay.simulator import Plan
from tests.cli.command import run_async
from tests.cli.running_relay import ALICE_KEY, LOCAL_PRINCIPAL, running_relay


def votes_rule(votes: int, *others: str, **more: Any) -> dict[str, Any]:
    quorum = {"votes": votes, "from": [LOCAL_PRINCIPAL, *others], **more.pop("approve", {})}
    return {"name": "all", "approve": quorum, **more}


# --- how an event is named


async def test_a_beginning_names_the_event_for_every_verb(tmp_path: Path) -> None:
    async with running_relay(tmp_path) as relay:
        event = await relay.announce()
        await relay.announce(Plan(type="Freeze", resources=("db-1",), notice=900.0))
        beginning = event.event_id[:12].lower()
        for verb in ("show", "explain", "approve", "hold", "release"):
            yes = ["--yes"] if verb == "approve" else []
            answer = await relay.run(verb, beginning, "--json", *yes)
            assert (answer.code, answer.json["eventId"]) == (0, event.event_id), answer.err
        for verb in ("show", "explain", "hold"):
            answer = await relay.run(verb, "")
            problem = "expected an EventId or a beginning of it, got an empty text"
            assert (answer.code, answer.err) == (2, f"imds-relay: {problem}\n")


async def test_a_beginning_of_several_event_ids_names_none(tmp_path: Path) -> None:
    async with running_relay(tmp_path) as relay:
        first = await relay.announce()
        others = [first]
        # The first characters of EventIds are random, so some soon begin alike.
        while all(other.event_id[0] != others[-1].event_id[0] for other in others[:-1]):
            others.append(await relay.announce(Plan(resources=("db-1",), notice=900.0)))
        alike = [each for each in others if each.event_id[0] == others[-1].event_id[0]]
        answer = await relay.run("approve", others[-1].event_id[0], "--yes")
        assert answer.code == 1
        assert f"begins {len(alike)} EventIds" in answer.err
        unasked = await relay.run("approve", others[-1].event_id[0])
        assert (unasked.code, unasked.err) == (1, answer.err)
        assert all(each.event_id in answer.err for each in alike)
        assert not relay.azure.start_requests


def test_a_table_shows_a_unique_beginning_of_each_event_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    ids = ["C7061BAC-AFDC", "c7061bac-4513", "A16123F0-B24B", "short", None]
    page = with_short_event_ids({"items": [{"eventId": each} for each in ids], "next": None})
    shown = [item["eventId"] for item in page["items"]]
    assert shown == ["C7061BAC-AFDC", "c7061bac-4513", "A16123F0", "short", None]


# --- explain


async def test_explain_says_which_rule_decides_what_is_missing_until_when(tmp_path: Path) -> None:
    match = {"event_type": ["Freeze"], "event_source": ["Platform"]}
    freeze = {"name": "freeze", "match": match, "approve": "automatic"}
    days = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
    always = {"time": {"days": days, "from": "00:00", "to": "24:00"}}
    quorum = {"each_resource": True, "expires": "5m", "close_before": "60s"}
    each_rule = votes_rule(2, "client:alice", match=always, approve=quorum)
    async with running_relay(tmp_path, rules=[freeze, each_rule]) as relay:
        event = await relay.announce()
        explanation = (await relay.run("explain", event.event_id, "--json")).json
        assert (explanation["rule"], explanation["state"]) == ("all", "pending")
        assert (explanation["votes"], explanation["missing"]) == (0, 2)
        assert explanation["mayVote"] == sorted(["client:alice", LOCAL_PRINCIPAL])
        assert explanation["uncoveredResources"] == ["db-0", "db-1"]
        assert explanation["closes"] < explanation["notBefore"]
        rules = [(each["name"], each["unmet"], each["decides"]) for each in explanation["rules"]]
        assert rules == [("freeze", ["event_type"], False), ("all", [], True)]
        alice = ("--url", relay.url, "--key", ALICE_KEY)
        assert (await run_async("approve", event.event_id, "--yes", *alice)).code == 0
        output = (await relay.run("explain", event.event_id)).out
        for words in (
            "rule all",
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


# --- limits


async def test_every_verb_says_for_what_an_event_waits(tmp_path: Path) -> None:
    limit = {"name": "databases", "match": {"resources": ["db-*"]}, "max": 1, "rest": "2m"}
    wait = f"limit databases, 1 machine at once: db-0; {LIMIT_NOTICE}"
    async with running_relay(tmp_path, rules=[votes_rule(1)], limits=[limit]) as relay:
        busy = relay.azure.schedule(
            Plan(type="Reboot", resources=("db-0",), started=True, lasts=None)
        )
        await relay.wait_for_webhook("event.started", busy.event_id)
        event = await relay.announce(Plan(type="Reboot", resources=("db-1",), notice=900.0))
        voted = await relay.run("approve", event.event_id, "--yes")
        assert voted.out == f"approved, and waiting (1 of 1 vote) for {wait}\n"
        listed = (await relay.run("events")).out
        assert "waiting, 1 of 1 vote, for limit databases, rule all" in listed
        shown = (await relay.run("show", event.event_id)).out
        assert wait in shown
        assert re.search(
            r"approval\.recorded .* voted to approve, 1 of 1\. "
            r"It is approved, and waits for limit databases",
            shown,
        )
        explained = (await relay.run("explain", event.event_id)).out
        assert re.search(rf"waits for +{re.escape(wait)}", explained)
        await relay.run("hold", event.event_id)
        released = await relay.run("release", event.event_id)
        assert released.out == f"released and approved, and waiting for {wait}\n"
        relay.azure.end(busy)
        await relay.wait_for_webhook("event.ended", busy.event_id)
        shown = (await relay.run("show", event.event_id)).out
        assert "machine at once: db-0 until " in shown


# --- standing holds


async def test_a_standing_hold_from_the_command_line_until_its_end(tmp_path: Path) -> None:
    users = {"name": "users", "match": {"event_source": ["User"]}, "approve": "automatic"}
    async with running_relay(tmp_path, rules=[users]) as relay:
        assert (await relay.run("holds")).out == "no standing holds\n"
        conditions = ("--type", "Reboot", "--resource", "db-*")
        added = await relay.run("holds", "add", *conditions, "--for", "2h", "--reason", "sale")
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


async def test_a_vote_under_a_standing_hold_says_whose_it_is(tmp_path: Path) -> None:
    runbook = "https://wiki.example.com/one"
    rule = votes_rule(1, approve={"remind": "5m"}, runbook=runbook)
    async with running_relay(tmp_path, rules=[rule]) as relay:
        event = await relay.announce()
        explained = (await relay.run("explain", event.event_id)).out
        assert re.search(rf"runbook +{runbook}", explained)
        assert re.search(r"reminder +.*\(in (9|10) min\)", explained)
        await relay.run("holds", "add", "--every-event", "--for", "2h", "--reason", "sale")
        voted = await relay.run("approve", event.event_id, "--yes")
        whose = rf"standing hold \w+ of {LOCAL_PRINCIPAL}"
        assert re.search(rf"held \(1 of 1 vote\): {whose}", voted.out)
        assert "runbook" in voted.err
        shown = (await relay.run("show", event.event_id)).out
        held = f"It is held by {LOCAL_PRINCIPAL} until"
        assert f"{LOCAL_PRINCIPAL} voted to approve, 1 of 1. {held}" in shown
        await relay.run("hold", event.event_id)
        released = await relay.run("release", event.event_id)
        assert re.search(rf"released; {whose} .*still holds it", released.out)
