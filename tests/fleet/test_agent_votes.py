"""Decisions of local programs: the agent passes them to the hub, and the hub's answer back."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.fleet import votes
from relay.fleet.messages import VoteMessage
from relay.simulator import VM, Setup, Simulator
from tests.eventually import eventually
from tests.fleet.hub_side import AGENT_USER, SCOPE, HubSide, hub_side, running_agent
from tests.rabbitmq import Broker

BODY = {"eventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123", "decision": "approve", "revision": "r1"}
RECORDED = {
    "approvalId": "a1",
    "eventId": BODY["eventId"],
    "decision": "approve",
    "state": "granted",
    "votes": 1,
    "required": 1,
    "rule": "databases",
}


@dataclass
class Rig:
    """An agent, and a program on its VM that calls it."""

    hub: HubSide
    session: aiohttp.ClientSession

    async def call(
        self, method: str, path: str, body: Any, request_id: str | None = None
    ) -> tuple[int, Any]:
        headers = {"Idempotency-Key": request_id} if request_id is not None else {}
        url = f"http://agent{path}"
        async with self.session.request(method, url, json=body, headers=headers) as response:
            return response.status, orjson.loads(await response.read())

    async def vote(self, request_id: str | None = "id-1", **changes: Any) -> tuple[int, Any]:
        return await self.call("POST", "/v1/approvals", {**BODY, **changes}, request_id)


@pytest.fixture
async def running(own_broker: Broker, tmp_path: Path) -> AsyncIterator[Rig]:
    folder, socket = tmp_path, tmp_path / "api.sock"
    async with hub_side(own_broker) as hub, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        api = {"listen": "127.0.0.1:0", "socket": str(socket)}
        async with (
            running_agent(hub, azure.url, folder, api=api),
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session,
        ):
            await hub.wait_for_listener()
            yield Rig(hub, session)


async def test_a_local_program_gets_the_answer_of_the_hub(running: Rig) -> None:
    call = asyncio.create_task(running.vote(reason="drained", ticket="CHG-7"))
    (vote,) = await running.hub.wait_for(VoteMessage)
    assert vote.request_id == "id-1"
    assert vote.user == f"local:{getpass.getuser()}"
    assert vote.body == {**BODY, "reason": "drained", "ticket": "CHG-7"}
    received = running.hub.reports[0]
    assert (received.key, received.user) == (f"vote.{SCOPE}.vm-0", AGENT_USER)
    await running.hub.answer_vote(vote, 202, RECORDED)
    assert await call == (202, RECORDED)


async def test_a_refusal_of_the_hub_is_the_answer_with_its_reason(running: Rig) -> None:
    call = asyncio.create_task(running.vote())
    (vote,) = await running.hub.wait_for(VoteMessage)
    await running.hub.answer_vote(
        vote, 409, {"detail": "it has changed", "revision": "r2", "headers": {"X": "y"}, "x": 1}
    )
    status, problem = await call
    assert status == 409
    assert (problem["detail"], problem["revision"]) == ("it has changed", "r2")
    assert set(problem) == {"type", "title", "status", "detail", "revision"}


@pytest.mark.parametrize(("status", "expected"), [(200, 503), (302, 503), (499, 503), (502, 502)])
async def test_an_answer_that_is_neither_recorded_nor_refused_is_an_error(
    running: Rig, status: int, expected: int
) -> None:
    call = asyncio.create_task(running.vote())
    (vote,) = await running.hub.wait_for(VoteMessage)
    await running.hub.answer_vote(vote, status, {})
    assert (await call)[0] == expected


async def test_silence_is_no_answer_and_the_same_id_may_be_tried_again(
    running: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(votes, "ANSWER_TIMEOUT", 0.5)
    status, problem = await running.vote()
    assert status == 503
    assert "the same id" in problem["detail"]
    (late,) = await running.hub.wait_for(VoteMessage)
    monkeypatch.setattr(votes, "ANSWER_TIMEOUT", 60.0)
    await running.hub.answer_vote(late, 202, RECORDED)  # nobody waits for it any more
    call = asyncio.create_task(running.vote())
    await running.hub.wait_for(VoteMessage, 2)
    repeated = running.hub.contents(VoteMessage)[1]
    assert (repeated.request_id, repeated.body) == (late.request_id, late.body)
    if not call.done():  # the late answer may be the one to the repeat, which is the same
        await running.hub.answer_vote(repeated, 202, RECORDED)
    assert await call == (202, RECORDED)


async def test_an_answer_to_another_request_is_not_taken(running: Rig) -> None:
    first = asyncio.create_task(running.vote("id-1"))
    second = asyncio.create_task(running.vote("id-2"))
    await running.hub.wait_for(VoteMessage, 2)
    by_id = {vote.request_id: vote for vote in running.hub.contents(VoteMessage)}
    await running.hub.answer_vote(by_id["id-2"], 403, {"detail": "not yours"})
    await running.hub.answer_vote(by_id["id-1"], 202, RECORDED)
    assert (await first)[0] == 202
    assert (await second)[0] == 403


async def test_without_the_broker_the_answer_is_503_at_once(
    running: Rig, own_broker: Broker
) -> None:
    await asyncio.to_thread(own_broker.kill)
    await eventually(lambda: _is_unavailable(running))
    status, problem = await running.vote()
    assert (status, "could not be asked" in problem["detail"]) == (503, True)


async def _is_unavailable(running: Rig) -> bool:
    _, problem = await running.vote()
    return "could not be asked" in problem["detail"]


async def test_the_mode_is_set_on_the_hub(running: Rig) -> None:
    status, problem = await running.call("PUT", "/v1/approvals/mode", {"mode": "on"})
    assert status == 409
    assert "hub" in problem["detail"]
