"""POST /v1/approvals and PUT /v1/approvals/mode, line by line of docs/api.md."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relay.errors import Deferred
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
    await eventually(lambda: relay.azure.started == [(EVENT_ID,)])


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


async def test_a_recorded_vote_has_principal_channel_and_reason(relay: RunningRelay) -> None:
    await relay.decide(reason="drained")
    (recorded,) = await relay.recorded_events("approval.recorded")
    data = recorded["data"]
    assert (data["principal"], data["channel"], data["reason"], data["decision"]) == (
        "client:alice",
        "http",
        "drained",
        "approve",
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


async def test_another_body_under_a_known_id_is_409(relay: RunningRelay) -> None:
    await relay.decide(headers={"Idempotency-Key": "one"})
    other = await relay.decide("hold", headers={"Idempotency-Key": "one"})
    assert other.status == 409
    assert (await relay.decide(headers={"Idempotency-Key": "one"})).status == 202


async def test_request_ids_of_different_principals_are_independent(relay: RunningRelay) -> None:
    first = await relay.decide(by="alice", headers={"Idempotency-Key": "one"})
    second = await relay.decide(by="bob", headers={"Idempotency-Key": "one"})
    assert first.json["approvalId"] != second.json["approvalId"]


async def test_without_an_id_the_same_vote_twice_is_one_live_vote(relay: RunningRelay) -> None:
    first, second = await relay.decide(), await relay.decide(reason="said again")
    assert first.json == second.json
    assert len(await relay.recorded_events("approval.recorded")) == 1


async def test_a_hundred_copies_at_once_are_one_vote(relay: RunningRelay) -> None:
    answers = await asyncio.gather(
        *(relay.decide(headers={"Idempotency-Key": "one"}) for _ in range(40))
    )
    assert {answer.status for answer in answers} == {202}
    assert len({answer.json["approvalId"] for answer in answers}) == 1
    assert len(await relay.recorded_events("approval.recorded")) == 1


async def test_404_of_an_unknown_event(relay: RunningRelay) -> None:
    answer = await relay.decide(eventId="nobody-knows-it")
    assert answer.status == 404
    (refused,) = await relay.recorded_events("approval.refused")
    assert (refused["subject"], refused["data"]["eventType"]) == ("nobody-knows-it", None)


async def test_404_of_another_scope(relay: RunningRelay) -> None:
    assert (await relay.decide(scope="another-scope")).status == 404
    assert (await relay.decide(scope="prod-vmss-a-1f0c33ab")).status == 202


async def test_409_after_a_change_gives_the_current_revision(relay: RunningRelay) -> None:
    seen = make_event().revision
    changed = make_event(resources=("WestNO_0",))
    await relay.observe(changed)
    answer = await relay.decide(revision=seen)
    assert (answer.status, answer.json["revision"]) == (409, changed.revision)
    assert (await relay.decide(revision=changed.revision)).status == 202


async def test_409_after_the_event_started_or_ended(relay: RunningRelay) -> None:
    started = make_event(event_status="Started", not_before=None)
    await relay.observe(started)
    assert (await relay.decide(revision=started.revision)).status == 409
    await relay.observe()
    assert (await relay.decide(revision=started.revision)).status == 409


async def test_409_when_it_is_too_late(relay: RunningRelay) -> None:
    """``close_before`` is 60 s: of a vote it counts, of a hold it does not."""
    due = make_event().not_before_time
    assert due is not None
    left = (
        due - relay.clock.now()
    ).total_seconds()  # less than two hours by what the tests before took
    relay.clock.offset = left - 30
    assert (await relay.decide()).status == 409
    assert (await relay.decide("hold")).status == 202
    relay.clock.offset = left + 1
    assert (await relay.decide("hold", by="bob")).status == 409


async def test_403_says_why(relay: RunningRelay) -> None:
    for by, words in (("reader", "approve"), ("databases", "resources")):
        answer = await relay.decide(by=by)
        assert (answer.status, words in answer.json["detail"]) == (403, True), answer.json
    refusals = [
        event["data"]["refusal"] for event in await relay.recorded_events("approval.refused")
    ]
    assert len(refusals) == 2


async def test_403_if_no_rule_allows_it_or_the_rule_names_others(relay: RunningRelay) -> None:
    other = make_event(event_type="Redeploy")
    await relay.observe(other)
    assert (await relay.decide(revision=other.revision)).status == 403


async def test_404_comes_before_409_and_409_before_403_and_403_before_503(
    relay: RunningRelay,
) -> None:
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})
    assert (await relay.decide(by="reader", eventId="unknown")).status == 404
    assert (await relay.decide(by="reader", revision="stale")).status == 409
    assert (await relay.decide(by="reader")).status == 403
    assert (await relay.decide(by="alice")).status == 503


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
    await eventually(lambda: relay.azure.started == [(EVENT_ID,)])


async def test_release_answers_released_without_votes_and_pending_with_votes(
    relay: RunningRelay,
) -> None:
    await relay.decide("hold")
    assert (await relay.decide("release")).json["state"] == "released"
    await relay.decide("hold")
    await relay.decide("approve")
    assert (await relay.decide("release")).json["state"] == "pending"


async def test_each_holder_has_a_hold_and_an_operator_releases_all(
    relay: RunningRelay,
) -> None:
    await relay.decide("hold", by="bob")
    await relay.decide("hold", by="drain")
    assert (await relay.decide("release", by="bob")).json["state"] == "held"
    assert (await relay.decide("release", by="bob")).status == 403
    await relay.decide("hold", by="bob")
    assert (await relay.decide("release", by="alice")).json["state"] == "released"
    assert (await relay.decide("release", by="alice")).status == 409


async def test_a_hold_survives_a_change_and_needs_no_current_revision(relay: RunningRelay) -> None:
    assert (await relay.decide("hold", revision="long-gone")).json["state"] == "held"
    await relay.observe(make_event(resources=("WestNO_0",)))
    assert (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json["approval"]["state"] == "held"
    assert (await relay.decide("release", revision="long-gone")).json["state"] == "released"


async def test_a_hold_is_409_once_the_startrequest_is_on_its_way(relay: RunningRelay) -> None:
    relay.azure.may_answer.clear()
    await relay.decide(by="alice")
    await relay.decide(by="bob")
    await eventually(lambda: bool(relay.azure.started))
    assert (await relay.decide("hold", by="drain")).status == 409
    relay.azure.may_answer.set()


async def test_a_hold_stops_an_automatic_rule(tmp_path: Path) -> None:
    """It stops a grant until the StartRequest is claimed: `tell_first` leaves time for it."""
    async with run_relay(tmp_path, approvals={"tell_first": "30s"}) as relay:
        relay.sinks["box"].failure = Deferred(
            "busy", after=60
        )  # so that there is something left to tell first
        freeze = make_event(event_type="Freeze")
        await relay.observe(freeze)
        await eventually(lambda: relay.recorded_events("approval.granted"), bool)
        assert (await relay.decide("hold", revision=freeze.revision)).json["state"] == "held"
        relay.clock.offset = 31
        relay.gate.wake()
        assert (await relay.decide("release", revision=freeze.revision)).json["state"] == "granted"
        assert len(await relay.recorded_events("approval.granted")) == 1
        await eventually(lambda: relay.azure.started == [(EVENT_ID,)])


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
