"""What another process has used: CPU time and memory.

Linux only: proc(5), clock_getcpuclockid(3).
"""

from __future__ import annotations

import time
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, also of those that have ended."""
    clock = (~pid << 3) | 2  # what clock_getcpuclockid(3) returns on Linux
    return time.clock_gettime(clock)


def peak_memory(pid: int) -> float:
    """Return the largest resident memory that a process had, in megabytes (10^6 bytes)."""
    return _kibibytes(Path(f"/proc/{pid}/status"), "VmHWM:") * 1024 / 1e6


def resident_memory(pid: int) -> tuple[float, float]:
    """Return the resident memory of a process, and its share of it (PSS), in megabytes."""
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    return _kibibytes(rollup, "Rss:") * 1024 / 1e6, _kibibytes(rollup, "Pss:") * 1024 / 1e6


def _kibibytes(file: Path, field: str) -> int:
    lines = file.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
