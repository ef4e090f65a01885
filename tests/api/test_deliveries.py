"""Deliveries, dead letters, and what an operator asks of a sink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relay.errors import Deferred, Rejected
from tests.api.running_relay import EVENT_ID, Response, RunningRelay, make_event, run_relay
from tests.eventually import eventually


async def _listed(relay: RunningRelay, path: str, count: int, state: str) -> list[dict[str, Any]]:
    """The list, once it has so many entries of that state."""

    def are_listed(answer: Response) -> bool:
        return [delivery["state"] for delivery in answer.json["items"]].count(state) == count

    answer = await eventually(lambda: relay.call("GET", path), are_listed)
    items: list[dict[str, Any]] = answer.json["items"]
    return items


async def test_deliveries_are_listed_newest_first_with_their_outcome(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=("good", "bad")) as relay:
        relay.sinks["bad"].failure = Deferred("it is down", status=503)
        await relay.observe(make_event())
        await _listed(relay, "/v1/deliveries", 1, "delivered")
        listed = await eventually(
            lambda: _listed(relay, "/v1/deliveries", 1, "waiting"),
            lambda items: all(delivery["attempts"] for delivery in items),
        )
        bad, good = sorted(listed, key=lambda delivery: str(delivery["sink"]))
        outcome = good["state"], good["attempts"], good["reason"], good["lastStatus"]
        assert outcome == ("delivered", 1, None, 204)
        assert (good["eventId"], good["type"]) == (EVENT_ID, "io.imdsrelay.event.scheduled.v1")
        assert good["settled"] is not None
        assert good["nextAttempt"] is None
        assert (bad["reason"], bad["lastStatus"], bad["settled"]) == ("it is down", 503, None)
        assert bad["nextAttempt"] is not None


async def test_a_dead_letter_is_listed_with_its_reason_and_goes_again(relay: RunningRelay) -> None:
    await eventually(lambda: bool(relay.sinks["box"].delivered))
    relay.sinks["box"].failure = Rejected("it is not wanted", status=400)
    await relay.observe(make_event(resources=("WestNO_0",)))
    (dead_letter,) = await _listed(relay, "/v1/dead-letters", 1, "parked")
    assert dead_letter["type"] == "io.imdsrelay.event.updated.v1"
    assert (dead_letter["reason"], dead_letter["lastStatus"]) == ("it is not wanted", 400)
    relay.sinks["box"].failure = None
    number = dead_letter["id"]
    answer = await relay.call("POST", f"/v1/dead-letters/{number}/redeliver")
    sent_again = {"id": number, "sink": "box", "state": "waiting"}
    assert (answer.status, answer.json) == (202, sent_again)
    await eventually(lambda: "event.updated" in relay.sinks["box"].delivered_names())
    assert await _listed(relay, "/v1/dead-letters", 0, "parked") == []
    for other in (number, number + 1):
        answer = await relay.call("POST", f"/v1/dead-letters/{other}/redeliver")
        assert answer.status == 404


async def test_an_id_of_no_delivery_or_dead_letter_is_404(relay: RunningRelay) -> None:
    """Entry 1 was delivered."""
    await eventually(lambda: bool(relay.sinks["box"].delivered))
    for number in ("999", "0", "-1", "x", "1x", "9" * 18, "9" * 30, "%D9%A1", "1%2F2"):
        assert (await relay.call("GET", f"/v1/deliveries/{number}")).status == 404, number
        again = await relay.call("POST", f"/v1/dead-letters/{number}/redeliver")
        assert again.status == 404, number
    assert (await relay.call("POST", "/v1/dead-letters/1/redeliver")).status == 404


async def test_a_dead_letter_of_a_sink_that_is_gone_is_409(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=("old",)) as relay:
        relay.sinks["old"].failure = Rejected("no")
        await relay.observe(make_event())
        (dead_letter,) = await _listed(relay, "/v1/dead-letters", 1, "parked")
    async with run_relay(tmp_path, sinks=("new",)) as relay:
        answer = await relay.call("POST", f"/v1/dead-letters/{dead_letter['id']}/redeliver")
        assert (answer.status, "old" in answer.json["detail"]) == (409, True)
        assert len(await _listed(relay, "/v1/dead-letters", 1, "parked")) == 1


async def test_a_delivery_about_no_event_has_no_event_id(relay: RunningRelay) -> None:
    await relay.call("POST", "/v1/sinks/box/ping")
    items = await _listed(relay, "/v1/deliveries", 2, "delivered")
    assert [(delivery["type"], delivery["eventId"]) for delivery in items] == [
        ("io.imdsrelay.relay.ping.v1", None),
        ("io.imdsrelay.event.scheduled.v1", EVENT_ID),
    ]


async def test_a_paused_sink_gets_nothing_until_resumed_also_over_a_restart(tmp_path: Path) -> None:
    async with run_relay(tmp_path) as relay:
        paused = (await relay.call("POST", "/v1/sinks/box/pause")).json
        box = {"name": "box", "kind": "box", "state": "paused", "failing": False, "waiting": 0}
        assert paused == box | {"reason": "paused by client:alice"}
        await relay.observe(make_event())
    async with run_relay(tmp_path) as relay:
        assert (await relay.call("GET", "/readyz")).json["sinks"]["paused"] == ["box"]
        assert relay.sinks["box"].delivered == []
        resumed = (await relay.call("POST", "/v1/sinks/box/resume")).json
        assert (resumed["state"], resumed["reason"]) == ("on", None)
        await eventually(lambda: relay.sinks["box"].delivered_names() == ["event.scheduled"])


async def test_an_unknown_sink_is_404(relay: RunningRelay) -> None:
    for name in ("unknown", "BOX", "box%00", "%2e%2e"):
        for verb in ("ping", "pause", "resume"):
            assert (await relay.call("POST", f"/v1/sinks/{name}/{verb}")).status == 404, name
    answer = await relay.call("POST", "/v1/dead-letters/redeliver", {"sink": "nope"})
    assert answer.status == 404
    assert answer.json["detail"] == "no sink 'nope' in the configuration; there is box"


async def test_while_the_store_cannot_be_written_operations_are_503(relay: RunningRelay) -> None:
    relay.make_store_read_only()
    for verb in ("ping", "pause"):
        assert (await relay.call("POST", f"/v1/sinks/box/{verb}")).status == 503
    assert (await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})).status == 503
    assert relay.dispatcher.workers[0].state == "on"


# --- the log of attempts, and dead letters that go out again


async def test_a_delivery_has_every_try_with_outcome_time_status_and_answer(tmp_path: Path) -> None:
    async with run_relay(tmp_path) as relay:
        relay.sinks["box"].failure = Deferred("it is down", status=503, answer="come back later")
        await relay.observe(make_event())

        async def read_delivery() -> dict[str, Any]:
            delivery: dict[str, Any] = (await relay.call("GET", "/v1/deliveries/1")).json
            return delivery

        await eventually(read_delivery, lambda delivery: delivery["attempts"] >= 1)
        relay.sinks["box"].failure = None
        delivered = await eventually(read_delivery, lambda found: found["state"] == "delivered")
        first, last = delivered["log"][0], delivered["log"][-1]
        assert (first["number"], first["outcome"], first["status"]) == (1, "deferred", 503)
        assert (first["reason"], first["answer"]) == ("it is down", "come back later")
        assert 0 <= first["tookSeconds"] < 60
        assert (last["number"], last["outcome"]) == (delivered["attempts"], "delivered")
        assert (last["status"], last["reason"]) == (204, None)


@pytest.mark.parametrize("body", [{"until": "2026-04-11T22:26:58Z"}, {"sink": 1}])
async def test_a_wrong_field_redelivers_nothing(relay: RunningRelay, body: dict[str, Any]) -> None:
    answer = await relay.call("POST", "/v1/dead-letters/redeliver", body)
    assert (answer.status, answer.json["field"]) == (422, next(iter(body)))
