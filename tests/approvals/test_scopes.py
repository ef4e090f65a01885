"""The gate of a hub: each scope sends its StartRequests by itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from relay.errors import SourceUnavailable
from tests.approvals.builders import USER_REBOOT, build_event
from tests.approvals.running_gate import (
    TIMEOUT,
    ScopeOfFleet,
    running_hub,
)
from tests.clocks import ManualClock
from tests.eventually import eventually

OTHER_REBOOT = build_event("E-2", event_source="User")


# --- failures


async def test_each_scope_has_pauses_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    often = ScopeOfFleet(clock, "a", USER_REBOOT, answers=[TIMEOUT] * 4)
    slow = SourceUnavailable("expected 200, got 429", status=429, retry_after=20)
    once = ScopeOfFleet(clock, "b", USER_REBOOT, answers=[slow])
    fails_later = ScopeOfFleet(clock, "c", answers=[TIMEOUT])
    with caplog.at_level(logging.WARNING):
        async with running_hub(tmp_path, clock, often, once, fails_later) as harness:
            for sent, pause in enumerate((1, 2, 4), 1):
                await eventually(lambda sent=sent: len(often.sent) == sent)
                await harness.settle()
                clock.advance(pause - 0.1)
                await harness.settle()
                assert len(often.sent) == sent
                clock.advance(0.1)
            await eventually(lambda: len(often.sent) == 4)
            fails_later.document = (USER_REBOOT,)
            await fails_later.poll()
            await eventually(lambda: len(fails_later.sent) == 1)
            await harness.settle()
            clock.advance(1)  # the first pause of this scope, in the pause of 8 s of another
            (accepted,) = await harness.wait_for_events("startrequest.accepted")
            assert accepted.attributes["scope"] == "c"
            clock.advance(7)
            await harness.wait_for_events("startrequest.accepted", 2)
            assert (len(often.sent), len(once.sent)) == (5, 1)
            clock.advance(4.9)
            await harness.settle()
            assert len(once.sent) == 1
            clock.advance(0.1)
            await harness.wait_for_events("startrequest.accepted", 3)
    warnings = [text for text in caplog.messages if text.startswith("cannot send")]
    assert [text.partition("in scope ")[2][0] for text in warnings] == ["a", "b", "c"]


# --- the end
