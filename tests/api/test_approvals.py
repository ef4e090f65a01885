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


async def test_the_event_id_is_compared_without_case_and_shown_as_azure_wrote_it(
    relay: RunningRelay,
) -> None:
    assert (await relay.decide(eventId=EVENT_ID.lower())).json["eventId"] == EVENT_ID


async def test_the_decision_is_on_disk_before_the_answer(
    relay: RunningRelay, tmp_path: Path
) -> None:
    approval = (await relay.decide()).json["approvalId"]
    assert (
        approval.encode()
        in (tmp_path / "relay.db-wal").read_bytes() + (tmp_path / "relay.db").read_bytes()
    )


@pytest.mark.parametrize("header", ["Idempotency-Key", "webhook-id"])
async def test_a_repeat_gets_its_first_answer_again_and_does_nothing(
    relay: RunningRelay, header: str
) -> None:
    first = await relay.decide(headers={header: "one"})
    await relay.observe()  # the event has ended: a request of its own would get a 409
    again = await relay.decide(headers={header: "one"})
    assert (again.status, again.json) == (202, first.json)
    assert len(await relay.recorded_events("approval.recorded")) == 1
    assert await relay.recorded_events("approval.refused") == []


async def test_404_and_503_are_not_remembered(relay: RunningRelay) -> None:
    unknown = {
        "eventId": "D0000000-0000-0000-0000-000000000000",
        "revision": make_event(event_id="D0000000-0000-0000-0000-000000000000").revision,
    }
    assert (await relay.decide(headers={"Idempotency-Key": "one"}, **unknown)).status == 404
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})
    assert (await relay.decide(headers={"Idempotency-Key": "two"})).status == 503
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "on"})
    await relay.observe(make_event(), make_event(event_id=unknown["eventId"]))
    assert (await relay.decide(headers={"Idempotency-Key": "one"}, **unknown)).status == 202
    assert (await relay.decide(headers={"Idempotency-Key": "two"})).status == 202


async def test_404_of_an_unknown_event(relay: RunningRelay) -> None:
    answer = await relay.decide(eventId="nobody-knows-it")
    assert answer.status == 404
    (refused,) = await relay.recorded_events("approval.refused")
    assert (refused["subject"], refused["data"]["eventType"]) == ("nobody-knows-it", None)


async def test_409_after_a_change_gives_the_current_revision(relay: RunningRelay) -> None:
    seen = make_event().revision
    changed = make_event(resources=("WestNO_0",))
    await relay.observe(changed)
    answer = await relay.decide(revision=seen)
    assert (answer.status, answer.json["revision"]) == (409, changed.revision)
    assert (await relay.decide(revision=changed.revision)).status == 202


async def test_403_says_why(relay: RunningRelay) -> None:
    for by, words in (("reader", "approve"), ("databases", "resources")):
        answer = await relay.decide(by=by)
        assert (answer.status, words in answer.json["detail"]) == (403, True), answer.json
    refusals = [
        event["data"]["refusal"] for event in await relay.recorded_events("approval.refused")
    ]
    assert len(refusals) == 2


async def test_503_while_the_store_cannot_be_written(tmp_path: Path) -> None:
    async with run_relay(tmp_path) as relay:
        await relay.observe(make_event())
        relay.make_store_read_only()
        answer = await relay.decide()
        assert answer.status == 503
        assert (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json["votes"] == []


async def test_a_hold_stops_a_grant_and_its_release_weighs_the_votes_again(
    relay: RunningRelay,
) -> None:
    assert (await relay.decide("hold", by="bob")).json["state"] == "held"
    assert (await relay.decide(by="alice")).json["state"] == "held"
    assert (await relay.decide(by="bob")).json["state"] == "held"
    released = await relay.decide("release", by="bob")
    assert (released.status, released.json["state"]) == (202, "granted")
    await eventually(lambda: relay.azure.started == [EVENT_ID])


async def test_the_stricter_of_the_configured_and_the_requested_mode_holds(tmp_path: Path) -> None:
    async with run_relay(tmp_path, approvals={"dry_run": True}) as relay:
        for asked, holds in (("on", "dry-run"), ("off", "off"), ("dry-run", "dry-run")):
            answer = await relay.call("PUT", "/v1/approvals/mode", {"mode": asked})
            assert (answer.status, answer.json) == (200, {"mode": holds})


async def test_the_mode_is_remembered_across_a_restart(tmp_path: Path) -> None:
    async with run_relay(tmp_path) as relay:
        await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})
    async with run_relay(tmp_path) as relay:
        await relay.observe(make_event())
        assert (await relay.decide()).status == 503
        notes = await relay.store.read(
            lambda tx: tx._connection.execute(  # noqa: SLF001  # the row that only the audit shows
                "SELECT body FROM journal WHERE kind = 'mode'"
            ).fetchall()
        )
        assert b"client:alice" in notes[0][0]


async def test_a_dry_run_does_everything_except_the_post(relay: RunningRelay) -> None:
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "dry-run"})
    await relay.decide(by="alice")
    assert (await relay.decide(by="bob")).json["state"] == "granted"
    (granted,) = await relay.recorded_events("approval.granted")
    assert granted["data"]["dryRun"] is True
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "on"})
    assert relay.azure.started == []


@pytest.mark.parametrize("body", [{"mode": "ON"}, {}, {"mode": "on", "more": 1}, {"mode": None}])
async def test_a_wrong_mode_is_422(relay: RunningRelay, body: dict[str, object]) -> None:
    answer = await relay.call("PUT", "/v1/approvals/mode", body)
    assert (answer.status, answer.json["field"]) == (422, "more" if "more" in body else "mode")


async def test_a_get_approves_nothing(relay: RunningRelay) -> None:
    for method in ("GET", "HEAD", "DELETE", "PATCH", "OPTIONS", "PUT"):
        answer = await relay.call(method, "/v1/approvals", relay.decision_body())
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert await relay.recorded_events("approval.recorded") == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Idempotency-Key": ""},
        {"Idempotency-Key": "x" * 257},
        {"Idempotency-Key": "with space"},
        {"Idempotency-Key": "one", "webhook-id": "two"},
    ],
)
async def test_an_unusable_id_is_400(relay: RunningRelay, headers: dict[str, str]) -> None:
    assert (await relay.decide(headers=headers)).status == 400
