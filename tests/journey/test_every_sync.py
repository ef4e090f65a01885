"""Killed at any sync, or at any time, on the way from a vote to a StartRequest: nothing is sent without a quorum, nothing is forgotten.

`make chaos` kills at every sync of the path, and at twenty random moments a round; `make test` at some of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.errors import StoreError
from relay.outbox.file import open_for_reading
from relay.outbox.journal import JournalRow, read_rows, verify_journal
from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.journey.relay_process import RelayProcess, client, eventually, relay

CHAOS = bool(os.environ.get("RELAY_TEST_CHAOS"))
RULE = {
    "name": "two",
    "match": {"event_type": ["Reboot"]},
    "approve": {"votes": 2, "from": ["client:alice", "client:bob"]},
}
KEYS = {"alice": "imdsr_of-alice", "bob": "imdsr_of-bob"}
KILLS = random.SystemRandom().sample(range(1500), 20) if CHAOS else (0, 200, 500)
"""Milliseconds after the moment at which the first vote can come at the earliest."""


def _document(sim: Simulator) -> dict[str, Any]:
    clients = [client(name, key=key) for name, key in KEYS.items()]
    return {
        "scope": "west",
        "source": {"url": sim.url, "interval": "500ms"},
        "approvals": {"rules": [RULE], "tell_first": "0s"},
        "api": {"clients": clients},
    }


def journal(process: RelayProcess) -> list[JournalRow]:
    """What is on disk, its chain verified; nothing where the relay was killed before there was a journal."""
    try:
        connection = open_for_reading(process.store)
    except StoreError:
        return []
    try:
        verify_journal(connection)
        return list(read_rows(connection))
    finally:
        connection.close()


def check(process: RelayProcess, posts: int, lives: int) -> list[JournalRow]:
    """What must hold at every moment, from the journal alone and from what Azure was asked; returns the journal."""
    found = journal(process)
    claims = [(at, orjson.loads(row.body)) for at, row in enumerate(found) if row.kind == "claim"]
    assert posts <= len(claims), "a StartRequest without a claim on disk"
    assert posts <= lives, "two StartRequests in one life"
    for at, claim in claims:
        before = [(row.kind, orjson.loads(row.body)) for row in found[:at] if row.kind != "claim"]
        states = [event["data"]["revision"] for kind, event in before if kind.startswith("event.")]
        assert claim["revision"] == states[-1], "a claim for another revision"
        said = [
            (kind, event["data"])
            for kind, event in before
            if event["data"].get("revision") == claim["revision"]
        ]
        assert {data["principal"] for kind, data in said if kind == "approval.recorded"} == {
            "client:alice",
            "client:bob",
        }
        assert any(
            kind == "approval.granted" and data["approvalId"] == claim["approvalId"]
            for kind, data in said
        )
    return found


def has(found: Sequence[JournalRow], kind: str, revision: str | None = None) -> bool:
    """Whether this was told, of that revision where one is named."""
    return any(
        row.kind == kind
        and (revision is None or orjson.loads(row.body)["data"]["revision"] == revision)
        for row in found
    )


async def _call(
    process: RelayProcess, who: str, method: str, path: str, body: Any = None
) -> tuple[int, Any]:
    headers = {
        "Authorization": f"Bearer {KEYS[who]}",
        "Idempotency-Key": f"{who}-{body['revision']}" if body else "none",
    }
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.request(method, process.url + path, json=body, headers=headers) as answer,
        ):
            return answer.status, await answer.json()
    except (aiohttp.ClientError, TimeoutError):
        return 0, None


async def _vote(process: RelayProcess, event: Event) -> str | None:
    """Both vote for what they see; the revision, where the relay is there to be asked."""
    status, seen = await _call(process, "alice", "GET", f"/v1/events/{event.event_id}")
    if status != 200:
        return None
    for who in KEYS:
        await _call(
            process,
            who,
            "POST",
            "/v1/approvals",
            {"eventId": event.event_id, "decision": "approve", "revision": seen["revision"]},
        )
    return str(seen["revision"])


async def _granted(process: RelayProcess, event: Event) -> bool:
    seen = await _vote(process, event)
    return seen is not None and has(journal(process), "approval.granted", seen)


async def _lives_to_vote(process: RelayProcess, event: Event) -> None:
    """Vote as soon as the relay answers; return when it has ended, or has got Azure's answer."""
    assert process.process is not None
    voted = False
    async with asyncio.timeout(120):
        while process.process.returncode is None and not has(
            journal(process), "startrequest.accepted"
        ):
            voted = voted or await _vote(process, event) is not None
            await asyncio.sleep(0.05)


async def story(
    folder: Path,
    *,
    prefix: tuple[str, ...] = (),
    kill_after: float | None = None,
    changes: bool = False,
) -> bool:
    """One life that ends badly, and one that must bring it to an end; whether the first one was killed on its way.

    ``changes``: the event changes between the two, so that nothing of the first counts in the second.
    """
    async with Simulator(Setup(vms=(VM("vm-0"),))) as sim, relay(folder, _document(sim)) as process:
        if prefix:
            # strace counts for each thread: what makes the file would use up the numbers of what writes it.
            await process.start()
            await process.kill()
            process.prefix = prefix
        event = sim.schedule(
            Plan(type="Reboot", resources=("vm-0",), lasts=None, starts_after=60.0)
        )
        await process.start(ready=False)
        assert process.process is not None
        living = asyncio.create_task(_lives_to_vote(process, event))
        if kill_after is not None:
            await asyncio.sleep(kill_after)
            await process.kill()
        await living
        killed = not has(journal(process), "startrequest.accepted")
        await process.kill()
        before = check(process, len(sim.start_requests), 1)
        if not killed:
            return False
        if changes:
            sim.update(event, resources=("vm-0", "vm-1"))
        process.prefix = ()
        await process.start()
        if changes or not has(before, "approval.granted"):
            await eventually(lambda: _granted(process, event), every=0.2)
        await eventually(lambda: has(journal(process), "startrequest.accepted"), every=0.05)
        await sim.approved(event, within=60)
        await process.kill()
        check(process, len(sim.start_requests), 2)
        return True


def _killed_at(sync: int) -> tuple[str, ...]:
    # -D: the tracer stands aside, so that the process that is started is the relay itself.
    inject = f"inject=fdatasync,fsync:signal=SIGKILL:when={sync}"
    return (
        "strace",
        "-D",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=fdatasync,fsync",
        "-e",
        inject,
    )


needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None,
    reason="strace kills at an exact system call; kills at any time are tried too",
)


@needs_strace
@pytest.mark.skipif(CHAOS, reason="every sync is tried")
@pytest.mark.parametrize("sync", [3, 4, 5])
async def test_killed_at_a_sync_nothing_is_sent_without_a_quorum_and_nothing_is_forgotten(
    tmp_path: Path, sync: int
) -> None:
    """Event, two votes, claim and answer are five writes that wait for each other."""
    assert await story(tmp_path / "relay", prefix=_killed_at(sync), changes=sync == 3)


@needs_strace
@pytest.mark.skipif(not CHAOS, reason="takes minutes: make chaos")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("changes", [False, True], ids=["as it was", "changed meanwhile"])
async def test_killed_at_every_single_sync_of_the_path(tmp_path: Path, changes: bool) -> None:
    """Until one life gets through: then there was no further sync on the path."""
    for sync in count(1):
        if not await story(tmp_path / f"{sync}", prefix=_killed_at(sync), changes=changes):
            print(f"syncs of the path: {sync - 1}")  # noqa: T201  # a number for whoever reads with -s
            assert sync > 5  # event, two votes, claim and answer
            return


@pytest.mark.timeout(300)
async def test_killed_at_any_time_nothing_is_sent_without_a_quorum_and_nothing_is_forgotten(
    tmp_path: Path,
) -> None:
    for number, milliseconds in enumerate(KILLS):
        await story(
            tmp_path / f"{number}", kill_after=0.6 + milliseconds / 1000, changes=number % 3 == 2
        )
