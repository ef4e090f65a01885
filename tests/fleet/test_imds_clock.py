"""The time that agents give to what they report: that of IMDS."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from relay.clock import SystemClock
from relay.fleet.agent.agent import ImdsClock
from tests.clocks import NOON


class Vm:
    """A VM whose clock says ``now``, and knows how far IMDS is ahead of that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = NOON
        self.skew: float | None = None
        monkeypatch.setattr(SystemClock, "now", lambda _: self.now)
        self.clock = ImdsClock(lambda: self.skew)

    def read(self, seconds: float, skew: float | None) -> float:
        """Return the time of a read, in seconds after noon by the clock of IMDS."""
        self.now, self.skew = NOON + timedelta(seconds=seconds), skew
        return (self.clock.now() - NOON).total_seconds()


@pytest.fixture
def vm(monkeypatch: pytest.MonkeyPatch) -> Vm:
    return Vm(monkeypatch)


def test_a_wrong_clock_is_put_right_by_what_imds_says(vm: Vm) -> None:
    assert vm.read(1, None) == 1
    assert vm.read(2, 600.0) == 602
    assert vm.read(3, 0.0) == 3
    assert vm.read(4, -600.0) == -596


def test_a_later_read_has_a_later_time_though_a_date_has_no_fraction(vm: Vm) -> None:
    """Else the hub would take the report of that read for a repeat."""
    assert vm.read(1.0, 600.9) == 601.9
    assert vm.read(1.5, 600.0) == 601.900001
    assert vm.read(1.5, 600.0) == 601.900002
    assert vm.read(3.0, 600.0) == 603.0
    assert vm.read(3.0, 600.0) == 603.000001


def test_an_imds_clock_is_a_clock_of_this_machine() -> None:
    """`wait_for_event` makes no tasks for it."""
    clock = ImdsClock(lambda: None)
    assert isinstance(clock, SystemClock)
    assert abs((clock.now() - datetime.now(UTC)).total_seconds()) < 60
