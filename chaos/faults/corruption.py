"""Bytes of the state file are flipped while the relay does not run.

What was in the file may be lost: the relay sets it aside, begins a new one with approvals off, and
says so. So these trials are judged by what must hold even then: the relay runs again and passes on
what happens from then on, and nothing is started without a quorum. SQLite does not see damage
inside a row. If that is a row of the journal, `imds-relay audit` names it.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from chaos.faults import Fault, Place
from chaos.judge import Counts
from chaos.load import CLIENTS, RULE
from relay.simulator import VM, Plan, Setup, Simulator
from tests.journey.relay_process import (
    Inbox,
    RelayProcess,
    client,
    eventually,
    inbox,
    relay,
    webhook,
)

EVENTS = 30
"""Events that the file holds when it is damaged."""


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
            for _ in range(EVENTS):
                azure.schedule(Plan(resources=("vm-0",), notice=7 * 86_400.0, lasts=None))
            await eventually(lambda: len(box.by_subject()) >= EVENTS)
            await process.stop()
            good = {path: path.read_bytes() for path in _state_files(process)}
            for _ in range(rounds):
                place.advance()
                for path in _all_files(process):
                    path.unlink()
                for path, content in good.items():
                    path.write_bytes(content)
                offset = await asyncio.to_thread(_flip_byte, process.store, place.chance)
                problem = await _judge(process, azure, box, counts)
                if problem is not None:
                    counts.problems.append(f"byte {offset}: {problem}")
        counts.start_requests = len(azure.start_requests)
        counts.without_grant = counts.start_requests  # nobody voted
    return counts


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


def _state_files(process: RelayProcess) -> list[Path]:
    return sorted(process.directory.glob("relay.db*"))


def _all_files(process: RelayProcess) -> list[Path]:
    return [path for path in process.directory.iterdir() if ".db" in path.name]


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
        "run again, pass on what happens then to a webhook, and start nothing; its journals are "
        "not verified here, as `imds-relay audit` is what names such damage",
        quick=10,
        full=200,
        run=_flip_bytes,
        rounds_of_a_trial=50,
    ),
)
