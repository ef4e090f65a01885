"""GET /v1/events and GET /v1/events/{eventId}: the shapes that docs/api.md fixes, and pages."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.events.timestamps import format_rfc3339, parse_timestamp
from tests.api.running_relay import EVENT_ID, Answer, Running, event, eventually, running, until

DELIVERY = (
    "id",
    "sink",
    "eventId",
    "type",
    "state",
    "attempts",
    "nextAttempt",
    "reason",
    "lastStatus",
    "recorded",
    "settled",
)


async def test_an_event_is_its_data_and_how_it_stands(relay: Running) -> None:
    (one,) = (await relay.call("GET", "/v1/events")).json["items"]
    due = event().not_before_time
    assert due is not None
    moments = {name: one.pop(name) for name in ("firstSeen", "lastChanged")}
    assert all(
        parse_timestamp(text) is not None and text.endswith("Z") for text in moments.values()
    )
    assert one == {
        **event().fields(),
        "documentIncarnation": 1,
        "revision": event().revision,
        "occurrence": 1,
        "outcome": None,
        "approval": {
            "state": "pending",
            "rule": "two",
            "votes": 0,
            "required": 2,
            "missing": 2,
            "closes": format_rfc3339(due - timedelta(seconds=60)),
        },
    }


async def test_one_event_has_history_votes_and_deliveries_too(relay: Running) -> None:
    vote = (await relay.decide(reason="drained")).json["approvalId"]
    await eventually(lambda: len(relay.boxes["box"].got) == 2)
    listed = (await relay.call("GET", "/v1/events")).json["items"][0]
    one = await _settled(relay)
    history, votes, deliveries = (one.pop(name) for name in ("history", "votes", "deliveries"))
    assert one == listed
    assert [said["type"] for said in history] == [
        "io.imdsrelay.event.scheduled.v1",
        "io.imdsrelay.approval.recorded.v1",
    ]
    assert history[1]["data"]["reason"] == "drained"
    (told,) = votes
    at = parse_timestamp(told.pop("at"))
    assert at is not None
    assert told == {
        "approvalId": vote,
        "decision": "approve",
        "principal": "client:alice",
        "channel": "http",
        "revision": event().revision,
        "counts": True,
    }
    newest, oldest = deliveries
    assert set(newest) == set(DELIVERY)
    assert (newest["id"] > oldest["id"], newest["eventId"], newest["sink"]) == (
        True,
        EVENT_ID,
        "box",
    )
    assert (newest["state"], newest["attempts"], newest["lastStatus"], newest["nextAttempt"]) == (
        "delivered",
        1,
        204,
        None,
    )


async def test_holds_and_releases_are_among_the_votes(relay: Running) -> None:
    await relay.decide("hold")
    await relay.decide("release")
    votes = (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json["votes"]
    assert [(one["decision"], one["counts"]) for one in votes] == [
        ("hold", False),
        ("release", False),
    ]


@pytest.mark.parametrize("path", [EVENT_ID.lower(), EVENT_ID.replace("-", "%2D")])
async def test_the_id_in_the_path_has_no_case_and_may_be_quoted(relay: Running, path: str) -> None:
    assert (await relay.call("GET", f"/v1/events/{path}")).json["eventId"] == EVENT_ID


async def test_an_event_id_may_hold_anything(relay: Running) -> None:
    odd = event(event_id="a/b?c#d é%")
    await relay.see(odd)
    assert (await relay.call("GET", "/v1/events/a%2Fb%3Fc%23d%20%C3%A9%25")).json[
        "eventId"
    ] == "a/b?c#d é%"


@pytest.mark.parametrize(
    "path", ["unknown", "%FF%FE", "%00", "x" * 5000, "..%2f..%2fetc", "%E2%80%AE"]
)
async def test_an_unknown_event_is_404(relay: Running, path: str) -> None:
    assert (await relay.call("GET", f"/v1/events/{path}")).status == 404


async def test_an_event_that_has_ended_keeps_its_last_words_and_a_new_one_begins_afresh(
    relay: Running,
) -> None:
    await relay.decide()
    await relay.see()
    ended = (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json
    assert (ended["outcome"], ended["approval"]["state"], ended["occurrence"]) == (
        "canceled",
        "none",
        1,
    )
    assert [said["type"].split(".")[-2] for said in ended["history"]][:2] == [
        "scheduled",
        "recorded",
    ]
    await until(
        lambda: relay.call("GET", f"/v1/events/{EVENT_ID}"),
        lambda found: "approval.voided" in found.json["history"][-1]["type"],
    )
    await relay.see(event())
    again = (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json
    assert (again["outcome"], again["occurrence"], again["votes"]) == (None, 2, [])
    assert len(again["history"]) == 1
    assert all(one["recorded"] >= again["firstSeen"] for one in again["deliveries"])
    assert [one["occurrence"] for one in (await relay.call("GET", "/v1/events")).json["items"]] == [
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"event_type": "Redeploy"}, "none"),
        ({"event_type": "Freeze"}, "accepted"),
        ({"event_status": "Started", "not_before": None}, "none"),
    ],
    ids=["no rule", "automatic", "started"],
)
async def test_the_state_of_an_approval(
    relay: Running, changes: dict[str, Any], state: str
) -> None:
    await relay.see(event(**changes))
    await until(
        lambda: relay.call("GET", f"/v1/events/{EVENT_ID}"),
        lambda answer: answer.json["approval"]["state"] == state,
    )


async def test_a_list_comes_in_pages_without_gap_or_repeat(tmp_path: Path) -> None:
    async with running(tmp_path, sinks=()) as relay:
        many = [event(event_id=f"event-{number}", event_type="Redeploy") for number in range(201)]
        await relay.see(*many)
        pages, cursor = [], ""
        while True:
            page = (await relay.call("GET", f"/v1/events{cursor}")).json
            pages.append([one["eventId"] for one in page["items"]])
            if page["next"] is None:
                break
            cursor = f"?cursor={page['next']}"
            await relay.see(
                *many, event(event_id=f"later-{len(pages)}", event_type="Redeploy")
            )  # what comes meanwhile is newer
        assert [len(page) for page in pages] == [100, 100, 1]
        assert [name for page in pages for name in page] == [one.event_id for one in reversed(many)]


async def test_a_page_that_is_just_full_has_none_after_it(tmp_path: Path) -> None:
    async with running(tmp_path, sinks=()) as relay:
        await relay.see(
            *(event(event_id=f"event-{number}", event_type="Redeploy") for number in range(100))
        )
        page = (await relay.call("GET", "/v1/events")).json
        assert (len(page["items"]), page["next"]) == (100, None)


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1.5", "9" * 19, "1&cursor=2", "%D9%A1", "1%00"])
@pytest.mark.parametrize("path", ["/v1/events", "/v1/deliveries", "/v1/dead-letters"])
async def test_a_cursor_that_is_none_is_422(relay: Running, path: str, cursor: str) -> None:
    answer = await relay.call("GET", f"{path}?cursor={cursor}")
    assert (answer.status, answer.json["field"]) == (422, "cursor")


async def test_head_answers_as_get_does_without_the_body(relay: Running) -> None:
    got, head = [await relay.call(method, "/v1/events") for method in ("GET", "HEAD")]
    assert (head.status, head.body, head.headers["Content-Length"]) == (
        200,
        b"",
        str(len(got.body)),
    )


async def _settled(relay: Running) -> dict[str, Any]:
    """The event, once what was delivered is also written down as delivered."""

    def delivered(answer: Answer) -> bool:
        return all(one["state"] == "delivered" for one in answer.json["deliveries"])

    found: dict[str, Any] = (
        await until(lambda: relay.call("GET", f"/v1/events/{EVENT_ID}"), delivered)
    ).json
    return found
