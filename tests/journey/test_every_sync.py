"""Kills between a vote and a StartRequest: no request without a quorum, and nothing is lost.

`make chaos-tests` kills at every sync and at twenty random moments, `make test` at some of them.
See docs/guarantees.md#every-startrequest-follows-from-the-journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.errors import StoreError
from relay.simulator import VM, Event, Plan, Setup, Simulator
from relay.store.journal import JournalRow
from tests.depth import CHAOS, depth
from tests.eventually import eventually
from tests.journey.relay_process import RelayProcess, client, relay
from tests.programs import killed_at_sync, needs_strace

RULE = {
    "name": "two",
    "match": {"event_type": ["Reboot"]},
    "approve": {"votes": 2, "from": ["client:alice", "client:bob"]},
}
KEYS = {"alice": "imdsr_bearer-test-key-of-alice", "bob": "imdsr_bearer-test-key-of-bob"}
KILLS = random.SystemRandom().sample(range(1500), 20) if CHAOS else (0, 400)
"""Milliseconds between the earliest possible first vote and the kill."""


def _document(sim: Simulator) -> dict[str, Any]:
    clients = [client(name, key=key) for name, key in KEYS.items()]
    return {
        "scope": "west",
        "source": {"url": sim.url, "interval": "500ms"},
        "approvals": {"rules": [RULE], "tell_first": "0s"},
        "api": {"clients": clients},
    }


def journal(process: RelayProcess) -> list[JournalRow]:
    """Verify the journal on disk and return its rows; none if the relay has not made it yet."""
    with contextlib.suppress(StoreError):
        return process.journal()
    return []


def check_journal(process: RelayProcess, posts: int, starts: int) -> list[JournalRow]:
    """Check that each StartRequest follows from the journal, and return the journal.

    ``posts``: how many StartRequests Azure got. ``starts``: how often the relay was started.
    """
    entries = journal(process)
    claims = [(at, orjson.loads(row.body)) for at, row in enumerate(entries) if row.kind == "claim"]
    assert posts <= len(claims), "a StartRequest without a claim on disk"
    assert posts <= starts, "two StartRequests after one start"
    for at, claim in claims:
        before = [(row.kind, orjson.loads(row.body)) for row in entries[:at] if row.kind != "claim"]
        states = [event["data"]["revision"] for kind, event in before if kind.startswith("event.")]
        assert claim["revision"] == states[-1], "a claim for another revision"
        about_claim = [
            (kind, event["data"])
            for kind, event in before
            if event["data"].get("revision") == claim["revision"]
        ]
        voters = {data["principal"] for kind, data in about_claim if kind == "approval.recorded"}
        assert voters == {"client:alice", "client:bob"}
        assert any(
            kind == "approval.granted" and data["approvalId"] == claim["approvalId"]
            for kind, data in about_claim
        )
    return entries


def has(entries: Sequence[JournalRow], kind: str, revision: str | None = None) -> bool:
    """Return whether the journal has a row of this kind, for the revision if it is given."""
    return any(
        row.kind == kind
        and (revision is None or orjson.loads(row.body)["data"]["revision"] == revision)
        for row in entries
    )


async def _call(
    process: RelayProcess, voter: str, method: str, path: str, body: Any = None
) -> tuple[int, Any]:
    headers = {
        "Authorization": f"Bearer {KEYS[voter]}",
        "Idempotency-Key": f"{voter}-{body['revision']}" if body else "none",
    }
    try:
        async with asyncio.timeout(30):
            return await process.call(method, path, body, headers)
    except (aiohttp.ClientError, TimeoutError):
        return 0, None


async def _vote(process: RelayProcess, event: Event) -> str | None:
    """Let both vote, and return the revision; None if the relay does not answer."""
    status, shown = await _call(process, "alice", "GET", f"/v1/events/{event.event_id}")
    if status != 200:
        return None
    vote = {"eventId": event.event_id, "decision": "approve", "revision": shown["revision"]}
    for voter in KEYS:
        await _call(process, voter, "POST", "/v1/approvals", vote)
    return str(shown["revision"])


async def _vote_until_granted(process: RelayProcess, event: Event) -> bool:
    revision = await _vote(process, event)
    return revision is not None and has(journal(process), "approval.granted", revision)


async def _vote_while_running(process: RelayProcess, event: Event) -> None:
    """Vote as soon as the relay answers. Return when it has ended or has Azure's answer."""
    assert process.process is not None
    voted = False
    async with asyncio.timeout(120):
        while process.process.returncode is None and not has(
            journal(process), "startrequest.accepted"
        ):
            voted = voted or await _vote(process, event) is not None
            await asyncio.sleep(0.05)


async def kill_and_restart(
    folder: Path,
    *,
    prefix: tuple[str, ...] = (),
    kill_after: float | None = None,
    changes: bool = False,
) -> bool:
    """Kill a relay on its way to a StartRequest; the restarted relay must complete it.

    Returns False if the first relay got Azure's answer before the kill. ``changes``: the event
    changes between the two runs, so no vote of the first run counts in the second.
    """
    async with Simulator(Setup(vms=(VM("vm-0"),))) as sim, relay(folder, _document(sim)) as process:
        if prefix:
            # strace counts system calls. Those that create the file must not be counted.
            await process.start()
            await process.kill()
            process.prefix = prefix
        event = sim.schedule(
            Plan(type="Reboot", resources=("vm-0",), lasts=None, starts_after=60.0)
        )
        await process.start(ready=False)
        assert process.process is not None
        voting = asyncio.create_task(_vote_while_running(process, event))
        if kill_after is not None:
            await asyncio.sleep(kill_after)
            await process.kill()
        await voting
        killed = not has(journal(process), "startrequest.accepted")
        await process.kill()
        before = check_journal(process, len(sim.start_requests), 1)
        if not killed:
            return False
        if changes:
            sim.update_event(event, resources=("vm-0", "vm-1"))
        process.prefix = ()
        await process.start()
        if changes or not has(before, "approval.granted"):
            await eventually(lambda: _vote_until_granted(process, event), every=0.2)
        await eventually(lambda: has(journal(process), "startrequest.accepted"), every=0.05)
        await sim.wait_until_approved(event, within=60)
        await process.kill()
        check_journal(process, len(sim.start_requests), 2)
        return True


@needs_strace
@pytest.mark.timeout(depth(1200, 180))
@pytest.mark.parametrize("changes", [False, True], ids=["the event stays", "the event changes"])
async def test_a_kill_at_a_sync_sends_nothing_without_a_quorum_and_loses_nothing(
    tmp_path: Path, changes: bool
) -> None:
    """Event, two votes, claim and answer are five writes, each after the one before it.

    At each, until a relay is not killed: then there was no further sync.
    """
    for sync in count(1) if CHAOS else (3 if changes else 4,):
        prefix = killed_at_sync(sync)
        if not await kill_and_restart(tmp_path / f"{sync}", prefix=prefix, changes=changes):
            print(f"syncs of the path: {sync - 1}")  # noqa: T201  # shown by pytest -s
            assert sync > 5
            return


@pytest.mark.timeout(300)
async def test_a_kill_at_any_time_sends_nothing_unasked_and_loses_nothing(tmp_path: Path) -> None:
    for number, milliseconds in enumerate(KILLS):
        await kill_and_restart(
            tmp_path / f"{number}", kill_after=0.6 + milliseconds / 1000, changes=number % 2 == 1
        )
