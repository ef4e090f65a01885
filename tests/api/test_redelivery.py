"""The log of attempts, and dead letters that go out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relay.errors import Deferred, Rejected
from tests.api.running_relay import RunningRelay, make_event, run_relay
from tests.eventually import eventually


async def _parked(relay: RunningRelay, count: int) -> list[dict[str, Any]]:
    async def read_dead_letters() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await relay.call("GET", "/v1/dead-letters")).json["items"]
        return items

    return await eventually(read_dead_letters, lambda items: len(items) == count)


async def test_a_delivery_shows_every_try_with_outcome_time_status_and_answer(
    tmp_path: Path,
) -> None:
    async with run_relay(tmp_path) as relay:
        relay.sinks["box"].failure = Deferred("it is down", status=503, answer="come back later")
        await relay.observe(make_event())

        async def read_delivery() -> dict[str, Any]:
            delivery: dict[str, Any] = (await relay.call("GET", "/v1/deliveries/1")).json
            return delivery

        await eventually(read_delivery, lambda delivery: delivery["attempts"] >= 1)
        relay.sinks["box"].failure = None
        delivery = await eventually(
            read_delivery, lambda delivery: delivery["state"] == "delivered"
        )
        first, last = delivery["log"][0], delivery["log"][-1]
        assert (first["number"], first["outcome"], first["status"]) == (1, "deferred", 503)
        assert (first["reason"], first["answer"]) == ("it is down", "come back later")
        assert 0 <= first["tookSeconds"] < 60
        assert (last["number"], last["outcome"], last["status"], last["reason"]) == (
            delivery["attempts"],
            "delivered",
            204,
            None,
        )


@pytest.mark.parametrize("number", ["999", "0", "-1", "x", "9" * 18, "9" * 30])
async def test_an_id_of_no_delivery_is_404(relay: RunningRelay, number: str) -> None:
    assert (await relay.call("GET", f"/v1/deliveries/{number}")).status == 404


async def test_dead_letters_of_a_sink_or_all_are_redelivered(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=("one", "two")) as relay:
        for box in relay.sinks.values():
            box.failure = Rejected("no")
        await relay.observe(make_event(), make_event(event_id="other", event_type="Redeploy"))
        await _parked(relay, 4)
        for box in relay.sinks.values():
            box.failure = None
        done = await relay.call("POST", "/v1/dead-letters/redeliver", {"sink": "one"})
        assert (done.status, done.json) == (202, {"redelivered": 2})
        await eventually(lambda: len(relay.sinks["one"].delivered) == 2)
        done = await relay.call("POST", "/v1/dead-letters/redeliver", {})
        assert done.json == {"redelivered": 2}
        await eventually(lambda: len(relay.sinks["two"].delivered) == 2)


async def test_an_unknown_sink_is_404_and_the_known_sinks_are_listed(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=("one", "two")) as relay:
        answer = await relay.call("POST", "/v1/dead-letters/redeliver", {"sink": "nope"})
        assert (answer.status, answer.json["detail"]) == (
            404,
            "no sink 'nope' in the configuration; there are one, two",
        )


@pytest.mark.parametrize("body", [{"until": "2026-04-11T22:26:58Z"}, {"sink": 1}])
async def test_a_wrong_field_redelivers_nothing(relay: RunningRelay, body: dict[str, Any]) -> None:
    answer = await relay.call("POST", "/v1/dead-letters/redeliver", body)
    assert (answer.status, answer.json["field"]) == (422, next(iter(body)))
