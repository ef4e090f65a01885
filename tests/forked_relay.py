"""Starts `python -m relay` as a fork of a process that has imported the relay already.

An import takes half a second of CPU time, and the tests start hundreds of relays and commands. The
fork server of multiprocessing imports the relay once. Each fork gets its own arguments,
environment, folder, standard streams and signals, and then runs the module `relay`.

Only pytest forks: its `conftest` says so. Benchmarks and trials that use the same helpers start a
new interpreter, because they measure it. All forks of a server have one hash seed, so what depends
on the order of a set must not be tested by two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

ROOT = Path(__file__).parent.parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.imported_relay"])

may_fork = False
"""Whether relays are forks. The server starts with the first of them."""

_OWN_VARIABLES = ("IMDS_RELAY_", "NOTIFY_SOCKET", "PYTEST_CURRENT_TEST")
"""How the names of variables begin that no module reads when it is imported."""


class ForkedProcess:
    """A fork, with as much of `asyncio.subprocess.Process` as the tests use."""

    def __init__(self, fork: ForkServerProcess) -> None:
        """Await its end in the running event loop."""
        assert fork.pid is not None
        self.pid = fork.pid
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._fork = fork
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(fork.sentinel, self._note_end)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fork.sentinel)
        self._ended.set()

    @property
    def returncode(self) -> int | None:
        return self._fork.exitcode

    def send_signal(self, signal: int, /) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        assert self.stdout is not None
        assert self.stderr is not None
        out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, err


Process = asyncio.subprocess.Process | ForkedProcess


async def start_relay(
    *arguments: str,
    environment: Mapping[str, str],
    cwd: Path | None = None,
    prefix: Sequence[str] = (),
    output: Path | None = None,
    limit: int = 2**16,
) -> Process:
    """Start `python -m relay` with arguments, and with a prefix before the command.

    Both output streams go to the end of the file ``output``. Without it, both are pipes, and
    ``limit`` is the number of bytes that a reader of a pipe buffers.
    """
    if prefix or not may_fork or _read_at_import(environment) != _environment_of_server():
        with (output or Path(os.devnull)).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(*prefix, sys.executable, "-m", "relay", *arguments),
                cwd=cwd,
                env=environment,
                stdout=log if output else asyncio.subprocess.PIPE,
                stderr=log if output else asyncio.subprocess.PIPE,
                limit=limit,
            )
    pipes = [] if output else [FORKS.Pipe(duplex=False) for _ in ("stdout", "stderr")]
    its_ends = [its_end for _, its_end in pipes]
    run = (arguments, dict(environment), cwd or Path.cwd(), output, its_ends)
    fork = FORKS.Process(target=_run_relay, args=run, daemon=True)
    await asyncio.to_thread(fork.start)  # the first waits until the server has imported the relay
    for its_end in its_ends:
        its_end.close()
    process = ForkedProcess(fork)
    if pipes:
        process.stdout, process.stderr = [await _reader_of(pipe, limit) for pipe, _ in pipes]
    return process


async def _reader_of(pipe: Connection, limit: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), pipe)
    return reader


@functools.cache
def _environment_of_server() -> dict[str, str]:
    return _read_at_import(os.environ)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    # Whoever runs the tests may have a path of their own. Only a test that sets another needs it.
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OWN_VARIABLES) and not (name == "PYTHONPATH" and value in paths)
    }


def _run_relay(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    output: Path | None,
    pipes: Sequence[Connection],
) -> None:
    """Become a relay, in the fork."""
    if output is not None:
        with output.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    for stream, pipe in enumerate(pipes, start=1):
        os.dup2(pipe.fileno(), stream)
        pipe.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = arguments
    sys.path[0] = str(cwd)
    runpy.run_module("relay", run_name="__main__", alter_sys=True)
