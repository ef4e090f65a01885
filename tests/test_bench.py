"""`make bench` can measure: one metric with few events, with the real relay and receiver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_command_prints_a_table() -> None:
    command = [sys.executable, "-m", "bench", "latency", "--scale", "0.002", "--repeat", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True, timeout=120)
    assert "| | relay | bare outbox | relay / bare outbox |" in run.stdout
