"""The plan for an event and a sink, as the API tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.errors import Deferred
from tests.api.running_relay import EVENT_ID, Running, event, running, until


async def test_the_plan_says_that_a_sink_wants_an_event_and_when_it_would_be_tried(
    relay: Running,
) -> None:
    told = (await relay.call("GET", f"/v1/sinks/box/plan?event={EVENT_ID.lower()}")).json
    assert (told["sink"], told["eventId"], told["type"], told["whyNot"]) == (
        "box",
        EVENT_ID,
        "io.imdsrelay.event.scheduled.v1",
        None,
    )
    transient, slow = told["plan"]
    assert (transient["failure"], slow["failure"]) == ("transient", "slow")
    assert [one["pauseSeconds"] for one in transient["tries"]][:4] == [0.5, 1.0, 2.0, 4.0]
    assert transient["ends"] == "given up after 86400 s"
    assert slow["ends"] == "refused, and no NotBefore ahead to keep trying for"


async def test_the_plan_goes_on_from_the_tries_that_there_were(tmp_path: Path) -> None:
    async with running(tmp_path) as relay:
        relay.boxes["box"].trouble = Deferred("down")
        await relay.see(event())

        async def look() -> int:
            told = (await relay.call("GET", f"/v1/sinks/box/plan?event={EVENT_ID}")).json
            assert told["waiting"]
            attempts: int = told["attempts"]
            return attempts

        attempts = await until(look, lambda found: found >= 2)
        told = (await relay.call("GET", f"/v1/sinks/box/plan?event={EVENT_ID}")).json
        assert told["plan"][0]["tries"][0]["pauseSeconds"] >= 0.5 * 2**attempts


@pytest.mark.parametrize(
    ("query", "status"),
    [("", 422), ("?event=", 422), ("?event=a&event=b", 422), ("?event=unknown", 404)],
)
async def test_what_names_no_event_has_no_plan(relay: Running, query: str, status: int) -> None:
    assert (await relay.call("GET", f"/v1/sinks/box/plan{query}")).status == status


async def test_an_unknown_sink_has_no_plan(relay: Running) -> None:
    assert (await relay.call("GET", f"/v1/sinks/none/plan?event={EVENT_ID}")).status == 404
