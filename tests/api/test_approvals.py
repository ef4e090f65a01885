"""POST /v1/approvals and PUT /v1/approvals/mode, line by line of docs/api.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.running_relay import EVENT_ID, RunningRelay, make_event, run_relay
from tests.eventually import eventually


async def test_a_vote_is_recorded_and_the_last_one_needed_grants(relay: RunningRelay) -> None:
    first = await relay.decide(by="alice")
    assert first.status == 202
    assert first.json == {
        "approvalId": first.json["approvalId"],
        "eventId": EVENT_ID,
        "decision": "approve",
        "state": "pending",
        "votes": 1,
        "required": 2,
        "rule": "two",
    }
    second = await relay.decide(by="bob")
    assert (second.json["state"], second.json["votes"]) == ("granted", 2)
    await eventually(lambda: relay.azure.started == [EVENT_ID])


@pytest.mark.parametrize("header", ["Idempotency-Key", "webhook-id"])
async def test_a_repeat_only_gets_its_first_answer(relay: RunningRelay, header: str) -> None:
    first = await relay.decide(headers={header: "one"})
    await relay.observe()  # the event has ended: a request of its own would get a 409
    again = await relay.decide(headers={header: "one"})
    assert (again.status, again.json) == (202, first.json)
    assert len(await relay.recorded_events("approval.recorded")) == 1
    assert await relay.recorded_events("approval.refused") == []


async def test_409_after_a_change_gives_the_current_revision(relay: RunningRelay) -> None:
    seen = make_event().revision
    changed = make_event(resources=("WestNO_0",))
    await relay.observe(changed)
    answer = await relay.decide(revision=seen)
    assert (answer.status, answer.json["revision"]) == (409, changed.revision)
    assert (await relay.decide(revision=changed.revision)).status == 202


async def test_the_stricter_of_the_configured_and_the_requested_mode_holds(tmp_path: Path) -> None:
    async with run_relay(tmp_path, approvals={"dry_run": True}) as relay:
        for asked, holds in (("on", "dry-run"), ("off", "off"), ("dry-run", "dry-run")):
            answer = await relay.call("PUT", "/v1/approvals/mode", {"mode": asked})
            assert (answer.status, answer.json) == (200, {"mode": holds})


@pytest.mark.parametrize("body", [{"mode": "ON"}, {}, {"mode": "on", "more": 1}, {"mode": None}])
async def test_a_wrong_mode_is_422(relay: RunningRelay, body: dict[str, object]) -> None:
    answer = await relay.call("PUT", "/v1/approvals/mode", body)
    assert (answer.status, answer.json["field"]) == (422, "more" if "more" in body else "mode")


async def test_a_get_approves_nothing(relay: RunningRelay) -> None:
    for method in ("GET", "HEAD", "DELETE", "PATCH", "OPTIONS", "PUT"):
        answer = await relay.call(method, "/v1/approvals", relay.decision_body())
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert await relay.recorded_events("approval.recorded") == []


async def test_an_unusable_id_is_400(relay: RunningRelay) -> None:
    for headers in (
        {"Idempotency-Key": ""},
        {"Idempotency-Key": "x" * 257},
        {"Idempotency-Key": "with space"},
        {"Idempotency-Key": "one", "webhook-id": "two"},
    ):
        assert (await relay.decide(headers=headers)).status == 400, headers
