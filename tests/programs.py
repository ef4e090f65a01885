"""Runs programs: of the examples and the documentation, in a namespace, or killed as they sync."""

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
needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace fails or kills at an exact system call"
)
_DEVICES = ("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
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


def killed_at_sync(number: int) -> tuple[str, ...]:
    """Return what to put before a command, so that its nth sync kills it, as a power cut would."""
    # -D: strace runs detached, so the process that is started is the program itself.
    trace = ("-e", "trace=fdatasync,fsync")
    inject = ("-e", f"inject=fdatasync,fsync:signal=SIGKILL:when={number}")
    return ("strace", "-D", "-f", "-qq", "-o", "/dev/null", *trace, *inject)


def run_in_namespace(module: str) -> None:
    """Run a module whose assertions are the test where it may set up addresses, or skip it."""
    missing = [program for program in ("unshare", "ip", "mount") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found (Debian: util-linux, iproute2)")
    network = ["unshare", "--net", "--mount"]
    problem = ""
    # Where user namespaces are switched off, root needs none.
    for unshare in ([*network, "--user", "--map-root-user"], network):
        tried = subprocess.run([*unshare, *_DEVICES], capture_output=True, text=True, check=False)
        problem = tried.stderr.strip()
        if tried.returncode == 0:
            break
    else:
        pytest.skip(f"no network namespace with a device can be made: {problem}")
    output_of(*unshare, sys.executable, "-m", module)
