"""Runs programs of the examples and of the documentation."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LOCKED = ("go.mod", "go.sum", "package.json", "package-lock.json")


@asynccontextmanager
async def running(
    *command: str | Path,
    cwd: Path | None = None,
    stderr: int | None = None,
    stops: bool = False,
    **variables: str,
) -> AsyncIterator[asyncio.StreamReader]:
    """Run a program, and yield what it prints. With ``stops``, SIGTERM has to end it in order."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        limit=2**20,
    )
    assert process.stdout is not None
    try:
        yield process.stdout
        if stops:
            process.terminate()
            async with asyncio.timeout(60):
                assert await process.wait() == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def output_of(*command: str | Path, given: str = "", cwd: Path | None = None) -> str:
    """Run a program that must succeed, with this text as its input; return what it prints."""
    done = subprocess.run(
        command, input=given, cwd=cwd, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command_of(name: str, folder: Path, packages: Path | None = None) -> list[str]:
    """Return the command that runs an example in Python, JavaScript or Go.

    What is fetched, at the versions that ``packages`` locks, and built for it goes into the folder.
    """
    if name.endswith(".py"):
        return [sys.executable, str(EXAMPLES / name)]
    tool, fetch = "go", ["go", "mod", "download"]
    if name.endswith(".mjs"):
        tool = "npm" if packages else "node"
        fetch = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    shutil.copy(EXAMPLES / name, folder)
    if packages is not None:
        for file in LOCKED:
            shutil.copy(packages / file, folder)
        got = subprocess.run(fetch, cwd=folder, check=False, capture_output=True, text=True)
        if got.returncode:
            pytest.skip(f"its packages could not be fetched: {got.stderr}")
    if name.endswith(".mjs"):
        return ["node", str(folder / name)]
    output_of("go", "build", "-o", "program", name, cwd=folder)
    return [str(folder / "program")]
