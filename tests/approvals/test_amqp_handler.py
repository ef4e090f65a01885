"""What becomes of a message that cannot be decided: it waits, or it is dead-lettered."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import orjson
import pytest

from relay.amqp.message_verification import UnparsedApprovalMessage, UnusableMessage
from relay.approvals.amqp_handler import AmqpApprovalHandler
from relay.approvals.standing_holds import StandingHoldBody
from tests.approvals.builders import REDEPLOY, build_caller
from tests.approvals.running_gate import GateHarness, running_gate


def damage(harness: GateHarness, kind: str) -> None:
    """Write as another program does, while the relay runs."""
    with contextlib.closing(sqlite3.connect(harness.path)) as file:
        file.execute("DROP TRIGGER journal_is_append_only")
        assert file.execute("UPDATE journal SET hash = 'x' WHERE kind = ?", (kind,)).rowcount == 1
        file.commit()


async def decide(harness: GateHarness) -> bool:
    """Decide a message with a vote; return whether it is settled."""
    handler = AmqpApprovalHandler(
        callers={"drain": build_caller("alice", channel="amqp")},
        gate=harness.gate,
        store=harness.store,
        clock=harness.clock,
    )
    vote = {"eventId": "E-1", "decision": "approve", "revision": REDEPLOY.revision}
    message = UnparsedApprovalMessage("drain", None, "m", orjson.dumps(vote))
    return await handler.read(message).decide()


async def test_a_message_about_an_event_whose_rows_are_damaged_is_dead_lettered(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path, REDEPLOY) as harness:
        assert (await harness.submit("hold", of=REDEPLOY)).accepted
        damage(harness, "approval.recorded")
        with pytest.raises(UnusableMessage, match=r"^journal: .* approvals of this event are off"):
            await decide(harness)


async def test_a_message_waits_while_damage_turns_all_approvals_off(tmp_path: Path) -> None:
    """It was read before anybody saw the damage."""
    async with running_gate(tmp_path, REDEPLOY) as harness:
        body = StandingHoldBody.model_validate(
            {"match": {}, "ends": "2026-04-12T12:00:00Z", "reason": "x"}
        )
        assert (await harness.hold_ahead(body)).accepted
        damage(harness, "standing-hold.created")
        assert await decide(harness) is False
