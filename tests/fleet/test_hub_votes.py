"""A machine of a fleet votes for itself: for its own resource, in its own scope alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.fleet.hub.votes import USER_BURST
from relay.fleet.messages import VoteMessage
from relay.fleet.routing import AuthorizedSender
from relay.rate_limits import CALLER_BURST
from tests import hostile
from tests.fleet.voting_hub import ONE, OPS, A, B, VotingHub, reboot, rules, voting_hub


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[VotingHub]:
    """A hub whose only rule asks each machine for its vote."""
    async with voting_hub(tmp_path) as running:
        yield running


# --- each machine for its own resource


async def test_an_event_starts_when_each_of_its_machines_has_voted(hub: VotingHub) -> None:
    """The event has the names of one notation, and two of the relays those of the other."""
    event = reboot("vmss_0", "VMSS_1", "vmss_18")
    await hub.observe(A, event)
    first = await hub.vote("vmss_0", event)
    assert first.status == 202
    assert first.request_id == "one"
    assert (first.body["state"], first.body["votes"], first.body["rule"]) == ("pending", 1, "all")
    assert (await hub.vote("vmss000001", event)).body["state"] == "pending"
    assert (await hub.status(event)).uncovered_resources == ("vmss_18",)
    assert hub.agents.started == []
    assert (await hub.vote("vmss00000i", event)).body["state"] == "granted"
    assert await hub.wait_until_started(1) == [(A, "E-1")]
    votes = hub.recorded("approval.recorded")
    assert [(vote["data"]["principal"], vote["data"]["channel"]) for vote in votes] == [
        (f"vm:{A}/vmss_0", "fleet"),
        (f"vm:{A}/vmss000001", "fleet"),
        (f"vm:{A}/vmss00000i", "fleet"),
    ]
    assert {vote["scope"] for vote in votes} == {A}


async def test_a_machine_cannot_vote_for_another(hub: VotingHub) -> None:
    event = reboot("vmss_0", "vmss_1")
    await hub.observe(A, event)
    answer = await hub.vote("vmss_7", event)
    assert answer.status == 403
    assert answer.body["detail"] == (
        f"vm:{A}/vmss_7 may decide for itself only, and the event does not name it"
    )
    assert (await hub.status(event)).vote_count == 0
    (refused,) = hub.recorded("approval.refused")
    assert refused["data"]["principal"] == f"vm:{A}/vmss_7"


# --- without each_resource


# --- scopes


async def test_a_vote_counts_in_the_scope_of_its_sender_alone(hub: VotingHub) -> None:
    """Both scopes have the same EventId, and a machine of the same name."""
    event = reboot("vmss_0")
    await hub.observe(A, event)
    await hub.observe(B, event)
    assert (await hub.vote("vmss_0", event, sender_scope=B)).body["state"] == "granted"
    assert await hub.wait_until_started(1) == [(B, "E-1")]
    assert (await hub.status(event, A)).vote_count == 0


@pytest.mark.parametrize("changes", [{}, {"scope": B}, {"scope": A}, {"eventId": f"E-1@{B}"}])
async def test_an_event_of_another_scope_is_unknown_to_a_machine(
    hub: VotingHub, changes: dict[str, str]
) -> None:
    event = reboot("vmss_0")
    await hub.observe(B, event)
    answer = await hub.vote("vmss_0", event, **changes)
    assert (answer.status, dict(answer.body)) == (
        404,
        {"detail": "no such event in this scope; see GET /v1/events, or `imds-relay events`"},
    )
    assert (await hub.status(event, B)).decisions == ()
    (refused,) = hub.recorded("approval.refused")
    assert refused["data"]["principal"] == f"vm:{A}/vmss_0"


@pytest.mark.parametrize("decision", ["approve", "hold", "release"])
async def test_a_body_that_names_another_scope_is_refused_where_both_have_the_event(
    hub: VotingHub, decision: str
) -> None:
    event = reboot("vmss_0", "vmss_1")
    await hub.observe(A, event)
    await hub.observe(B, event)
    for scope in (A, B):
        await hub.vote("vmss_0", event, "hold", sender_scope=scope)
    answer = await hub.vote("vmss_0", event, decision, request_id="two", scope=B)
    assert answer.status == 404
    assert [len((await hub.status(event, scope)).decisions) for scope in (A, B)] == [1, 1]
    assert (await hub.vote("vmss_0", event, decision, request_id="three", scope=A)).status == 202


# --- ids of requests


async def test_a_repeat_gets_its_first_answer(hub: VotingHub) -> None:
    event = reboot("vmss_0", "vmss_1")
    await hub.observe(A, event)
    first = await hub.vote("vmss_0", event)
    await hub.vote("vmss_1", event)
    assert await hub.vote("vmss_0", event) == first
    assert len(hub.recorded("approval.recorded")) == 2


async def test_the_id_of_another_machine_is_no_repeat(hub: VotingHub) -> None:
    """A machine learns nothing of the answer to another, and takes no id away from it."""
    event = reboot("vmss_0", "vmss_1")
    await hub.observe(A, event)
    await hub.observe(B, event)
    approvals = set()
    for relay, scope in (("vmss_0", A), ("vmss_1", A), ("vmss_0", B)):
        answer = await hub.vote(relay, event, sender_scope=scope, request_id="same")
        assert answer.status == 202
        approvals.add(answer.body["approvalId"])
    assert len(approvals) == 3
    assert (await hub.vote("vmss_7", event, request_id="same")).status == 403


# --- holds


async def test_a_machine_holds_an_event_that_names_it_and_releases_its_own_hold(
    tmp_path: Path,
) -> None:
    """The hold stops the whole event, because Azure cannot start a part of it."""
    async with voting_hub(tmp_path, rules(ONE)) as hub:
        event = reboot("vmss_0", "vmss_1")
        await hub.observe(A, event)
        assert (await hub.vote("vmss_1", event, "hold")).body["state"] == "held"
        assert (await hub.decide_as(OPS, event)).body["state"] == "held"
        foreign = await hub.vote("vmss_0", event, "release")
        assert (foreign.status, foreign.body["detail"].split(";")[0]) == (
            403,
            "somebody else took the hold",
        )
        assert hub.agents.started == []
        answer = await hub.vote("vmss_1", event, "release", request_id="two")
        assert answer.body["state"] == "granted"
        assert await hub.wait_until_started(1) == [(A, "E-1")]


async def test_a_machine_cannot_hold_an_event_that_does_not_name_it(hub: VotingHub) -> None:
    event = reboot("vmss_0")
    await hub.observe(A, event)
    assert (await hub.vote("vmss_1", event, "hold")).status == 403
    assert (await hub.status(event)).active_holds == ()


# --- what is refused before it is decided


async def test_a_malformed_vote_gets_the_problem_of_the_api_and_is_not_recorded(
    hub: VotingHub,
) -> None:
    event = reboot("vmss_0")
    await hub.observe(A, event)
    assert (await hub.vote("vmss_0", event, request_id="two words")).status == 400
    whole = {"eventId": event.event_id, "decision": "approve", "revision": event.revision}
    for field, value in hostile.WRONG_FIELDS:
        hub.clock.advance(60)
        body = hostile.with_wrong_field(whole, field, value)
        vote = VoteMessage(request_id="one", user="local:root", body=body)
        answer = await hub.answer(AuthorizedSender(A, "vmss_0", "vmss"), vote)
        assert answer is not None
        assert (answer.status, answer.body["field"]) == (422, field), value
        assert answer.body["detail"]
    assert hub.recorded("approval.refused") == hub.recorded("approval.recorded") == []


# --- floods


async def test_a_machine_over_its_rate_gets_429_and_delays_no_other(hub: VotingHub) -> None:
    event = reboot("vmss_0", "vmss_1")
    await hub.observe(A, event)
    for number in range(CALLER_BURST):
        await hub.vote("vmss_0", event, request_id=f"{number}", revision="of yesterday")
    recorded = len(hub.recorded("approval.refused"))
    for number in range(CALLER_BURST):
        answer = await hub.vote("vmss_0", event, request_id=f"more-{number}")
        assert (answer.status, dict(answer.body)) == (
            429,
            {"detail": f"too many votes of vm:{A}/vmss_0: wait, and try again"},
        )
    assert len(hub.recorded("approval.refused")) == recorded
    assert hub.recorded("approval.recorded") == []
    assert (await hub.vote("vmss_1", event)).status == 202
    hub.clock.advance(1)
    assert (await hub.vote("vmss_0", event, request_id="later")).status == 202


async def test_a_flood_gets_no_answer_in_the_end_and_then_one_a_second(hub: VotingHub) -> None:
    """An answer is a confirmed message: a flood of them would delay the other machines."""
    event = reboot("vmss_0", "vmss_1")
    await hub.observe(A, event)
    body = {"eventId": "E-1", "decision": "approve", "revision": event.revision}
    vote = VoteMessage(request_id="one", user="local:root", body=body)
    flooding, quiet = AuthorizedSender(A, "vmss_0", "vmss"), AuthorizedSender(A, "vmss_1", "vmss")

    async def flood(count: int) -> list[int | None]:
        answers = [await hub.answer(flooding, vote) for _ in range(count)]
        return [None if answer is None else answer.status for answer in answers]

    statuses = await flood(3 * CALLER_BURST)
    assert statuses == [202] * CALLER_BURST + [429] * CALLER_BURST + [None] * CALLER_BURST
    answer = await hub.answer(quiet, vote)
    assert answer is not None
    assert answer.status == 202
    hub.clock.advance(1)
    assert (await flood(20))[10:] == [429] + [None] * 9


async def test_a_user_that_makes_up_relays_is_limited_too_and_delays_no_other_user(
    hub: VotingHub,
) -> None:
    event = reboot("vmss_0", "vmss_1")
    await hub.observe(A, event)
    statuses = [
        (await hub.vote(f"made-up-{number}", event, decision="none")).status
        for number in range(USER_BURST + CALLER_BURST - 1)
    ]
    assert statuses == [422] * USER_BURST + [429] * (CALLER_BURST - 1)
    answer = await hub.vote("vmss_0", event)
    assert (answer.status, answer.body["detail"]) == (
        429,
        "too many votes of user vmss: wait, and try again",
    )
    assert (await hub.vote("vmss_0", event, user="another")).status == 202


# --- the message
