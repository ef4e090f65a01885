"""Decisions at a hub that knows the same EventId in two scopes: each is about one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import orjson
import pytest

from relay.approvals.request import Caller, Rights
from tests.api.message_links import chat_of, message_links, shown_card
from tests.api.running_relay import EVENT_ID, Response, RunningRelay, make_event, run_relay
from tests.eventually import eventually

A, B = "vmss-a-1f0c33ab", "vmss-b-9d2e77c0"
VOTERS = ["client:alice", "client:drain", "client:bob", "slack:T024/U7"]
ONE_VOTE = {"name": "one", "approve": {"votes": 1, "from": VOTERS}}


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A hub whose agents of both scopes show the event."""
    async with run_relay(tmp_path, is_hub=True, approvals={"rules": [ONE_VOTE]}) as running:
        for scope in (A, B):
            await running.observe_in(scope, make_event())
        yield running


async def started_in(hub: RunningRelay, *scopes: str) -> None:
    """Check that the event was started in these scopes and in no other."""
    await eventually(lambda: len(hub.azure.started_in) >= len(scopes))
    assert hub.azure.started_in == list(scopes)
    grants = await hub.recorded_events("approval.granted")
    assert [grant["scope"] for grant in grants] == list(scopes)


async def send(hub: RunningRelay, way: str, **changes: str) -> Response:
    if way == "http":
        return await hub.call("POST", "/v1/approvals", hub.decision_body(**changes))
    return await hub.post_callback(orjson.dumps(hub.decision_body(**changes)))


WAYS = pytest.mark.parametrize("way", ["http", "callback"])


@WAYS
async def test_an_event_id_that_begins_like_another_is_not_it(tmp_path: Path, way: str) -> None:
    async with run_relay(tmp_path, is_hub=True, approvals={"rules": [ONE_VOTE]}) as hub:
        await hub.observe_in(B, make_event(event_id=f"{EVENT_ID}@x"))
        assert (await hub.call("GET", f"/v1/events/{EVENT_ID}")).status == 404
        await hub.observe_in(A, make_event())
        assert (await send(hub, way)).status == 202
        await started_in(hub, A)


async def test_without_a_scope_an_event_id_of_two_scopes_is_refused(hub: RunningRelay) -> None:
    answers = [await send(hub, "http"), await send(hub, "callback")]
    for answer in (*answers, await hub.call("GET", f"/v1/events/{EVENT_ID}")):
        assert (answer.status, answer.json["field"]) == (422, "scope")
        assert answer.json["detail"].endswith(f"known in several: {A}, {B}")
    assert await hub.recorded_events("approval.recorded") == []


@WAYS
@pytest.mark.parametrize(("scope", "other"), [(A, B), (B, A)])
async def test_the_scope_of_the_body_chooses_the_event(
    hub: RunningRelay, way: str, scope: str, other: str
) -> None:
    answer = await send(hub, way, scope=scope)
    assert (answer.status, answer.json["state"]) == (202, "granted")
    await started_in(hub, scope)
    body = (await hub.call("GET", f"/v1/events/{EVENT_ID}?scope={other}")).json
    assert body["approval"]["state"] == "pending"


async def test_a_link_of_a_message_is_about_the_scope_of_the_message(hub: RunningRelay) -> None:
    for scope in (A, B):
        links = await message_links(hub, event_id=f"{EVENT_ID}@{scope}")
        assert f"/#/event/{quote(scope, safe='')}/{EVENT_ID}/approve/" in links["approve"]


@pytest.mark.parametrize("scope", [A, B])
async def test_a_button_is_about_the_scope_of_its_message(hub: RunningRelay, scope: str) -> None:
    card = await shown_card(hub, f"{EVENT_ID}@{scope}", in_chat=True)
    approve = next(button for button in card.buttons if button.decision == "approve")
    answer = await chat_of(hub).decisions.decide(
        Caller("slack:T024/U7", "slack", Rights(frozenset({"approve"}))),
        event_id=approve.event_id,
        decision="approve",
        revision=approve.revision,
        request_id="a click",
    )
    assert (answer.status, answer.body["state"]) == (202, "granted")
    await started_in(hub, scope)
