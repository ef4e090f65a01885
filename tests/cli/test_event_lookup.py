"""A unique beginning of an EventId names the event."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relay.cli._events import with_short_event_ids
from relay.simulator import Plan
from tests.cli.running_relay import LOCAL_PRINCIPAL, running_relay

RULE = {"name": "one", "approve": {"votes": 2, "from": [LOCAL_PRINCIPAL, "client:alice"]}}


async def test_a_beginning_names_the_event_for_every_verb(tmp_path: Path) -> None:
    async with running_relay(tmp_path, rules=[RULE]) as relay:
        event = await relay.announce()
        await relay.announce(Plan(type="Freeze", resources=("db-1",), notice=900.0))
        beginning = event.event_id[:12].lower()
        for verb in ("show", "explain"):
            shown = await relay.run(verb, beginning, "--json")
            assert (shown.code, shown.json["eventId"]) == (0, event.event_id)
        for arguments in (
            ("approve", beginning, "--yes"),
            ("hold", beginning),
            ("release", beginning),
        ):
            answer = await relay.run(*arguments, "--json")
            assert (answer.code, answer.json["eventId"]) == (0, event.event_id), answer.err


async def test_an_empty_text_names_no_event(tmp_path: Path) -> None:
    async with running_relay(tmp_path, rules=[RULE]) as relay:
        for verb in ("show", "explain", "hold"):
            answer = await relay.run(verb, "")
            problem = "expected an EventId or a beginning of it, got an empty text"
            assert (answer.code, answer.err) == (2, f"imds-relay: {problem}\n")


async def test_a_beginning_of_several_event_ids_names_none(tmp_path: Path) -> None:
    async with running_relay(tmp_path, rules=[RULE]) as relay:
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
