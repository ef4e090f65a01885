"""`make bench` can measure: one metric with few events, with the real relay and receiver."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.programs import output_of

ROOT = Path(__file__).parents[1]


def test_the_command_prints_a_table() -> None:
    options = ("latency", "--scale", "0.002", "--repeat", "1")
    printed = output_of(sys.executable, "-m", "bench", *options, cwd=ROOT)
    assert "| | relay | bare outbox | relay / bare outbox |" in printed
