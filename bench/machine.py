"""What a run was measured on: the machine and the versions, without the machine's name."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.rabbitmq import server_scripts

LIBRARIES = ("aiohttp", "aio-pika", "orjson", "pydantic")


def machine() -> str:
    """Return processor, cores, memory, kernel, and the file system of the state files."""
    cpu = re.search(
        r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores of {cpu[1] if cpu else platform.machine()}, {memory:.0f} GiB, "
        f"Linux {platform.release().partition('-')[0]}, state files on {_file_system()}"
    )


def versions() -> str:
    """Return the versions of the relay and of what it is built with."""
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return (
        f"imds-relay {version('imds-relay')}, Python {platform.python_version()}, SQLite "
        f"{sqlite3.sqlite_version}, {libraries}, RabbitMQ {_rabbitmq()}"
    )


def _file_system() -> str:
    """Return the type of the file system of temporary files. On tmpfs, fsync costs nothing."""
    found = subprocess.run(
        ["stat", "--file-system", "--format=%T", tempfile.gettempdir()],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()


def _rabbitmq() -> str:
    scripts = server_scripts()
    if scripts is None:
        return "none"
    found = subprocess.run(
        [scripts / "rabbitmqctl", "version"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip().splitlines()[-1] if found.stdout.strip() else "of unknown version"
