"""What a run was measured on, without the machine's name, and what a process has used.

Linux only: proc(5), clock_getcpuclockid(3).
"""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tests.rabbitmq import server_scripts


def machine() -> str:
    """Return processor, cores, memory, kernel, and the file system of the state files."""
    cpu = re.search(
        r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    # On tmpfs, fsync costs nothing.
    files = _output("stat", "--file-system", "--format=%T", tempfile.gettempdir())
    return (
        f"{os.cpu_count()} cores of {cpu[1] if cpu else platform.machine()}, {memory:.0f} GiB, "
        f"Linux {platform.release().partition('-')[0]}, state files on {files}"
    )


def versions() -> str:
    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("aiohttp", "aio-pika", "orjson", "pydantic")
    )
    scripts = server_scripts()
    rabbitmq = _output(str(scripts / "rabbitmqctl"), "version") if scripts else "none"
    return (
        f"imds-relay {version('imds-relay')}, Python {platform.python_version()}, SQLite "
        f"{sqlite3.sqlite_version}, {libraries}, RabbitMQ {rabbitmq}"
    )


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or ["of unknown version"])[-1]


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
