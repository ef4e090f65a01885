"""Runs a whole relay in this process, with a simulated Azure and chat sinks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from relay.simulator import Simulator
from tests.journey.relay_process import KEY
from tests.relay_in_process import RelayInProcess, document_of, relay_in_process, simulated

ALICE = {"name": "alice", "key": KEY, "can": ["read", "approve", "hold", "operate"]}
BOB = {"name": "bob", "key": "bearer-test-key-of-bob", "can": ["read", "approve", "hold"]}


def rule(votes: int, *voters: str, **quorum: Any) -> dict[str, Any]:
    """Make a rule by which reboots need so many votes of these principals."""
    return {
        "name": "reboots",
        "match": {"event_type": ["Reboot"]},
        "approve": {"votes": votes, "from": list(voters), **quorum},
    }


@asynccontextmanager
async def stage(
    directory: Path,
    sinks: Sequence[Mapping[str, Any]],
    *,
    approvals: Mapping[str, Any],
    public_url: str | None = "https://relay.example.com",
    azure: Simulator | None = None,
    **api: Any,
) -> AsyncIterator[RelayInProcess]:
    """Run a relay with these sinks. Over the same directory it is the same relay, started again.

    ``azure`` is a simulator that outlives the relay; by default each relay has its own. ``api``
    holds further fields of the section ``api``.
    """
    async with AsyncExitStack() as stack:
        if azure is None:
            azure = await stack.enter_async_context(simulated())
        document = document_of(
            directory,
            azure,
            scope="prod",
            sinks=list(sinks),
            approvals={"tell_first": "0s", **approvals},
            api={"listen": "127.0.0.1:0", "clients": [ALICE, BOB], "public_url": public_url, **api},
        )
        yield await stack.enter_async_context(relay_in_process(azure, document))
