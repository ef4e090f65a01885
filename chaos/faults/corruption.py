"""Bytes of the state file are flipped while the relay does not run.

What was in the file may be lost: the relay sets it aside, begins a new one with approvals off, and
says so. So these trials are judged by what must hold even then: the relay runs again and passes on
what happens from then on, and nothing is started without a quorum. SQLite does not see damage
inside a row. If that is a row of the journal, the chain of hashes must not hold.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from chaos.faults import Fault, Place
from chaos.judge import Counts, read_journal
from chaos.load import CLIENTS, KEYS, RULE
from relay.simulator import VM, Event, Plan, Setup, Simulator
from relay.store.journal import JournalRow
from tests.eventually import eventually
from tests.journey.relay_process import Inbox, RelayProcess, client, inbox, relay, webhook

EVENTS = 30
"""Events that the file holds when it is damaged. Every second has one of two votes."""


async def _flip_bytes(place: Place, rounds: int) -> Counts:
    counts = Counts(rounds=rounds)
    async with inbox() as box, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        document = {
            "scope": "chaos",
            "relay": "vm-0",
            "source": {"url": azure.url, "interval": "500ms"},
            "sinks": [webhook(box.url)],
            "approvals": {"tell_first": "0s", "rules": [RULE]},
            "api": {"clients": [*CLIENTS, client("operator")]},
        }
        async with relay(place.folder, document) as process:
            await process.start()
            events = [
                azure.schedule(Plan(resources=("vm-0",), notice=7 * 86_400.0, lasts=None))
                for _ in range(EVENTS)
            ]
            await eventually(lambda: len(box.by_subject()) >= EVENTS)
            for event in events[::2]:
                await _vote(process, event)
            await process.stop()
            rows = read_journal(process.store)
            good = {path: path.read_bytes() for path in process.directory.glob("relay.db*")}
            for _ in range(rounds):
                place.advance()
                for path in process.directory.glob("*.db*"):
                    path.unlink()
                for path, content in good.items():
                    path.write_bytes(content)
                offset = await asyncio.to_thread(_flip_byte, process.store, place.chance)
                problems = [
                    await _judge_audit(process.store, rows),
                    await _judge(process, azure, box, counts),
                ]
                counts.problems += [f"byte {offset}: {each}" for each in problems if each]
        counts.start_requests = len(azure.start_requests)
        counts.without_grant = counts.start_requests  # no event has both votes
    return counts


async def _vote(process: RelayProcess, event: Event) -> None:
    headers = {"Authorization": f"Bearer {KEYS['alice']}"}
    _, shown = await process.call("GET", f"/v1/events/{event.event_id}", None, headers)
    vote = {"eventId": event.event_id, "decision": "approve", "revision": shown["revision"]}
    status, answer = await process.call("POST", "/v1/approvals", vote, headers)
    assert status == 202, answer


async def _judge_audit(file: Path, rows: Sequence[JournalRow]) -> str | None:
    """Return what is wrong with it; ``rows`` are those of the journal before."""
    audit = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "relay", "audit", "--store", str(file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await audit.communicate()
    if audit.returncode not in (0, 1) or b"Traceback" in output:
        return f"the audit failed with {audit.returncode}: {output[-600:]!r}"
    if audit.returncode == 0 and read_journal(file) != rows:
        return "the journal was changed, and the audit does not say so"
    return None


async def _judge(process: RelayProcess, azure: Simulator, box: Inbox, counts: Counts) -> str | None:
    """Start the relay on the damaged file; return what it does not do that it must."""
    await process.start(ready=False)
    event = azure.schedule(Plan(resources=("vm-0",), notice=7 * 86_400.0, lasts=None))
    counts.offered += 1
    try:
        await eventually(lambda: box.types_of(event.event_id) == ["event.scheduled"], within=60)
    except (TimeoutError, AssertionError):
        counts.lost += 1
        return f"an event did not arrive afterwards; the log ends with {process.log[-600:]!r}"
    finally:
        azure.cancel(event.event_id)
        await process.kill()
    counts.delivered += 1
    counts.recorded += 1
    return None


def _flip_byte(file: Path, chance: random.Random) -> int:
    content = bytearray(file.read_bytes())
    offset = chance.randrange(len(content))
    content[offset] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return offset


FAULTS = (
    Fault(
        name="store-corrupted",
        text="one bit of the state file is flipped while the relay does not run; the relay must "
        "run again, pass on what happens then to a webhook, and start nothing; and "
        "`imds-relay audit` must see each change of a row of the journal",
        quick=10,
        full=200,
        run=_flip_bytes,
        rounds_of_a_trial=50,
    ),
)
