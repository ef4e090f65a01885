"""Measures the CPU time and memory of a relay process that polls and has no events."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from bench.figure import Figure
from relay.simulator import VM, Setup, Simulator
from tests.journey.relay_process import client, inbox, relay, webhook

WARM_UP = 5.0
DURATION = 30.0


async def measure(amqp_url: str) -> list[Figure]:
    """Warm up, then measure the process. Linux only: proc(5)."""
    async with inbox() as box, Simulator(Setup(vms=(VM("vm-0"),))) as sim:
        document = {
            "source": {"url": sim.url},
            "sinks": [
                {
                    "kind": "rabbitmq",
                    "name": "bus",
                    "url": amqp_url,
                    "exchange": "imds-relay.bench",
                },
                webhook(box.url),
            ],
            "api": {"clients": [client()]},
        }
        with tempfile.TemporaryDirectory() as directory:
            async with relay(Path(directory), document) as process:
                await process.start()
                pid = process.process.pid if process.process is not None else 0
                await asyncio.sleep(WARM_UP)
                cpu_before, started_at = _cpu(pid), time.perf_counter()
                await asyncio.sleep(DURATION)
                cpu_share = (_cpu(pid) - cpu_before) / (time.perf_counter() - started_at)
                memory = _memory(pid)
                await process.stop()
    return [
        Figure("idle relay, CPU", cpu_share * 100, "% of a core", "under 1.5"),
        Figure("idle relay, memory", memory, "MB", "under 80"),
    ]


def _cpu(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    """Return the resident memory of a process in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000
