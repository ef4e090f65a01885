"""`make bench` can measure: one metric with few events, with the real relay and receiver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson

ROOT = Path(__file__).parents[1]


def test_the_command_prints_json_for_programs() -> None:
    command = [sys.executable, "-m", "bench", "flood", "--scale", "0.002", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120)
    (section,) = (measured["section"] for measured in orjson.loads(run.stdout).values())
    assert section["rows"]
    assert all(0 < row["values"]["relay"][0] < 60_000 for row in section["rows"])
