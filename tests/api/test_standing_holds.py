"""The calls about standing holds, and what other answers say about them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.approvals.request import HOLD_NOTICE
from relay.events.timestamps import format_rfc3339
from relay.fleet.messages import VoteMessage
from relay.fleet.votes import VoteForwarder
from tests.api.running_relay import AUTOMATIC, EVENT_ID, RunningRelay, make_event, run_relay
from tests.eventually import eventually

FREEZE = make_event(event_type="Freeze")
VOTE = {"name": "one", "approve": {"votes": 1, "from": ["client:alice"]}}


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay that starts each Freeze, and with a vote of alice everything else."""
    approvals = {"rules": [AUTOMATIC, VOTE], "tell_first": "0s"}
    async with run_relay(tmp_path, approvals=approvals) as relay:
        yield relay


async def test_a_standing_hold_from_its_making_to_its_end(relay: RunningRelay) -> None:
    made = await relay.hold_ahead(match={"event_type": ["Freeze"]})
    assert (made.status, made.json["notice"]) == (201, HOLD_NOTICE)
    path = f"/v1/standing-holds/{made.json['holdId']}"
    await relay.observe(FREEZE)
    shown = (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json["approval"]
    whose = {
        "holdId": made.json["holdId"],
        "principal": "client:alice",
        "until": made.json["ends"],
        "reason": "sale",
    }
    assert (shown["state"], shown["standingHolds"]) == ("held", [whose])
    explained = (await relay.call("GET", f"/v1/events/{EVENT_ID}/rule")).json
    assert (explained["standingHolds"], explained["holdMeans"]) == ([whose], HOLD_NOTICE)
    assert (await relay.call("GET", path)).json["state"] == "active"
    ended = await relay.call("POST", f"{path}/end", {"reason": "over"})
    assert (ended.status, ended.json["endedBy"]) == (200, "client:alice")
    await eventually(lambda: relay.azure.started == [EVENT_ID])
    assert (await relay.call("GET", path)).json["state"] == "ended"
    (event,) = await relay.recorded_events("standing-hold.ended")
    assert (event["subject"], event["data"]["endReason"]) == (made.json["holdId"], "over")
    await eventually(lambda: "standing-hold.ended" in relay.sinks["box"].delivered_names())


async def test_the_list_has_what_is_not_over_unless_asked_for_all(relay: RunningRelay) -> None:
    first = (await relay.hold_ahead()).json["holdId"]
    later = format_rfc3339(relay.clock.now() + timedelta(seconds=300))
    second = (await relay.hold_ahead(starts=later)).json["holdId"]
    await relay.call("POST", f"/v1/standing-holds/{first}/end", {})
    listed = (await relay.call("GET", "/v1/standing-holds", by="reader")).json["items"]
    assert [(hold["holdId"], hold["state"]) for hold in listed] == [(second, "upcoming")]
    listed = (await relay.call("GET", "/v1/standing-holds?over=true")).json["items"]
    assert [hold["state"] for hold in listed] == ["upcoming", "ended"]
    assert (await relay.call("GET", "/v1/standing-holds?over=maybe")).status == 422
    assert (await relay.call("GET", "/v1/standing-holds/none")).status == 404


@pytest.mark.parametrize("bound", [{"min": -5.0}, {"max": 8.5}, {"max": f"{9 * 10**305}s"}])
async def test_a_duration_that_could_not_be_read_again_turns_no_approvals_off(
    relay: RunningRelay, bound: dict[str, Any]
) -> None:
    assert (await relay.hold_ahead(match={"duration": bound})).status == 422
    assert (await relay.call("GET", "/v1/standing-holds")).json["items"] == []
    await relay.observe(make_event())
    assert (await relay.decide()).status == 202


async def test_only_operators_make_or_end_one_and_rights_come_first(relay: RunningRelay) -> None:
    hold_id = (await relay.hold_ahead()).json["holdId"]
    for by in ("bob", "reader"):
        for path in ("/v1/standing-holds", f"/v1/standing-holds/{hold_id}/end"):
            answer = await relay.call("POST", path, {"match": "wrong"}, by=by)
            assert (answer.status, "may not operate" in answer.json["detail"]) == (403, True)
    assert len(await relay.recorded_events("standing-hold.created")) == 1
    assert await relay.recorded_events("standing-hold.ended") == []


async def test_a_repeat_gets_the_first_answer(relay: RunningRelay) -> None:
    headers = {"Idempotency-Key": "k"}
    body: dict[str, Any] = {"ends": format_rfc3339(relay.clock.now() + timedelta(seconds=600))}
    first = await relay.hold_ahead(headers=headers, **body)
    second = await relay.hold_ahead(headers=headers, **body)
    assert (second.status, second.json) == (201, first.json)
    assert len(await relay.recorded_events("standing-hold.created")) == 1
    assert (await relay.hold_ahead(headers=headers, **body, reason="other")).status == 409
    end = f"/v1/standing-holds/{first.json['holdId']}/end"
    # The same key for another call is another request.
    assert (await relay.call("POST", end, {}, headers=headers)).status == 409
    headers = {"Idempotency-Key": "e"}
    ended = [await relay.call("POST", end, {}, headers=headers) for _ in range(2)]
    assert [answer.status for answer in ended] == [200, 200]
    other = f"/v1/standing-holds/{(await relay.hold_ahead()).json['holdId']}/end"
    assert (await relay.call("POST", other, {}, headers=headers)).status == 409  # with that body
    assert (await relay.call("POST", end, {})).status == 409


async def test_an_agent_says_that_the_hub_has_the_standing_holds(relay: RunningRelay) -> None:
    async def publish(_vote: VoteMessage) -> None:
        raise AssertionError("nothing is asked of the hub")

    agent = VoteForwarder(relay.gate.engine, publish)
    relay.server.state.relay = replace(relay.relay, gate=agent)
    path = "/v1/standing-holds"
    answers = [
        await relay.hold_ahead(),
        await relay.call("GET", path),
        await relay.call("GET", f"{path}/h"),
        await relay.call("POST", f"{path}/h/end", {}),
    ]
    assert {(answer.status, answer.json["detail"]) for answer in answers} == {
        (409, "this relay is an agent: standing holds are on the hub")
    }
    relay.server.state.relay = relay.relay
