"""GET /v1/events and GET /v1/events/{eventId}: the shapes that docs/api.md fixes, and pages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from relay.events.timestamps import format_rfc3339, parse_timestamp
from tests.api.running_relay import EVENT_ID, SCOPE, Response, RunningRelay, make_event
from tests.eventually import eventually

DELIVERY = {
    *("id", "sink", "eventId", "type", "state", "attempts", "nextAttempt", "reason"),
    *("lastStatus", "recorded", "settled"),
}


async def test_an_event_has_its_data_and_the_state_of_its_approval(relay: RunningRelay) -> None:
    (item,) = (await relay.call("GET", "/v1/events")).json["items"]
    due = make_event().not_before_time
    assert due is not None
    for name in ("firstSeen", "lastChanged"):
        moment = item.pop(name)
        assert parse_timestamp(moment) is not None
        assert moment.endswith("Z")
    assert item == {
        **make_event().to_cloudevent_data(),
        "documentIncarnation": 1,
        "means": "Each machine is rebooted: what is in memory is lost; it takes about 5 s.",
        "revision": make_event().revision,
        "scope": SCOPE,
        "occurrence": 1,
        "outcome": None,
        "approval": {
            "state": "pending",
            "rule": "two",
            "votes": 0,
            "required": 2,
            "missing": 2,
            "closes": format_rfc3339(due - timedelta(seconds=60)),
            "waitingFor": [],
            "voted": [],
            "mayVote": ["client:alice", "client:bob", "client:drain"],
            "holds": [],
            "decisions": ["approve", "hold"],
            "standingHolds": [],
            "runbook": None,
        },
    }


async def test_one_event_has_history_votes_and_deliveries_too(relay: RunningRelay) -> None:
    approval_id = (await relay.decide(reason="drained", ticket="CHG-7")).json["approvalId"]
    await eventually(lambda: len(relay.sinks["box"].delivered) == 2)
    listed = (await relay.call("GET", "/v1/events")).json["items"][0]
    details = await _settled(relay)
    history, votes, deliveries = (details.pop(name) for name in ("history", "votes", "deliveries"))
    assert details.pop("next") is None
    said = "client:alice voted to approve, 1 of 2 (“drained”, ticket CHG-7)."
    assert details.pop("said")[-1] == said
    assert details == listed
    assert names(history) == ["event.scheduled", "approval.recorded"]
    assert history[1]["data"]["reason"] == "drained"
    (vote,) = votes
    assert parse_timestamp(vote.pop("at")) is not None
    assert vote == {
        "approvalId": approval_id,
        "decision": "approve",
        "principal": "client:alice",
        "channel": "http",
        "revision": make_event().revision,
        "reason": "drained",
        "ticket": "CHG-7",
        "counts": True,
    }
    newest, oldest = deliveries
    assert newest.keys() == DELIVERY
    assert newest["id"] > oldest["id"]
    assert (newest["eventId"], newest["sink"], newest["state"]) == (EVENT_ID, "box", "delivered")
    assert (newest["attempts"], newest["lastStatus"], newest["nextAttempt"]) == (1, 204, None)


async def test_holds_and_releases_are_among_the_votes(relay: RunningRelay) -> None:
    await relay.decide("hold")
    await relay.decide("release")
    votes = (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json["votes"]
    counts = [(vote["decision"], vote["counts"]) for vote in votes]
    assert counts == [("hold", False), ("release", False)]


async def test_a_vote_of_a_dry_run_counts_in_none_but_a_dry_run(relay: RunningRelay) -> None:
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "dry-run"})
    await relay.decide()
    for mode, counts in (("dry-run", True), ("on", False)):
        await relay.call("PUT", "/v1/approvals/mode", {"mode": mode})
        (vote,) = (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json["votes"]
        assert vote["counts"] is counts


async def test_the_quoted_id_in_a_path_has_no_case_and_can_be_any_text(relay: RunningRelay) -> None:
    odd = "a/b?c#d é%"
    await relay.observe(make_event(), make_event(event_id=odd))
    for path, event_id in (
        (EVENT_ID.lower(), EVENT_ID),
        (EVENT_ID.replace("-", "%2D"), EVENT_ID),
        ("a%2Fb%3Fc%23d%20%C3%A9%25", odd),
    ):
        assert (await relay.call("GET", f"/v1/events/{path}")).json["eventId"] == event_id
    for path in ("unknown", "%FF%FE", "%00", "x" * 5000, "..%2f..%2fetc", "%E2%80%AE"):
        assert (await relay.call("GET", f"/v1/events/{path}")).status == 404, path


async def test_an_ended_event_keeps_its_data_and_the_next_one_is_fresh(relay: RunningRelay) -> None:
    await relay.decide()
    await relay.observe()
    ended = (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json
    assert (ended["outcome"], ended["occurrence"]) == ("canceled", 1)
    assert ended["approval"]["state"] == "none"
    assert names(ended["history"])[:2] == ["event.scheduled", "approval.recorded"]
    await eventually(
        lambda: relay.call("GET", f"/v1/events/{EVENT_ID}"),
        lambda answer: names(answer.json["history"])[-1] == "approval.voided",
    )
    await relay.observe(make_event())
    again = (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json
    assert (again["outcome"], again["occurrence"], again["votes"]) == (None, 2, [])
    assert len(again["history"]) == 1
    assert all(delivery["recorded"] >= again["firstSeen"] for delivery in again["deliveries"])
    listed = (await relay.call("GET", "/v1/events")).json["items"]
    assert [item["occurrence"] for item in listed] == [2, 1]


async def test_an_invalid_cursor_is_422(relay: RunningRelay) -> None:
    for cursor in ("", "x", "-1", "1.5", "9" * 19, "1&cursor=2", "%D9%A1", "1%00"):
        for path in ("/v1/events", "/v1/deliveries", "/v1/dead-letters"):
            answer = await relay.call("GET", f"{path}?cursor={cursor}")
            assert (answer.status, answer.json["field"]) == (422, "cursor"), (path, cursor)


async def test_head_answers_as_get_does_without_the_body(relay: RunningRelay) -> None:
    got, head = [await relay.call(method, "/v1/events") for method in ("GET", "HEAD")]
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(got.body))


def names(history: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("io.imdsrelay.").removesuffix(".v1") for event in history]


async def _settled(relay: RunningRelay) -> dict[str, Any]:
    """The event, once what was delivered is also written down as delivered."""

    def delivered(answer: Response) -> bool:
        return all(delivery["state"] == "delivered" for delivery in answer.json["deliveries"])

    details: dict[str, Any] = (
        await eventually(lambda: relay.call("GET", f"/v1/events/{EVENT_ID}"), delivered)
    ).json
    return details
