"""Runs the command line as a person or a script does: in a process of its own, or in this one where that is as good."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from relay.cli import main

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed for programs."""
        return orjson.loads(self.out)


def environment(**more: str) -> dict[str, str]:
    """The environment without what would configure a relay, with the project importable from any directory."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("IMDS_RELAY_")
    }
    return {**inherited, "PYTHONPATH": str(ROOT), **more}


def run(*arguments: str, cwd: Path | None = None, given: str = "", **more: str) -> Ended:
    """Run the command in a process of its own. No command shows a traceback, so that is looked for each time."""
    done = subprocess.run(
        [sys.executable, "-m", "relay", *arguments],
        cwd=cwd,
        env=environment(**more),
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


def typed(*arguments: str) -> Ended:
    """Run the command in this process, which is faster. Nothing can be asked: standard input is no terminal."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["imds-relay", *arguments])
        patch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, out.getvalue(), err.getvalue())


async def called(*arguments: str) -> Ended:
    """As `typed`, for a test whose event loop the command talks to."""
    return await asyncio.to_thread(typed, *arguments)


def names_in(folder: Path) -> list[str]:
    """What a command left in a folder."""
    return sorted(file.name for file in folder.iterdir())


@contextmanager
def obeying_ctrl_c() -> Iterator[None]:
    """A process that starts meanwhile obeys SIGINT, also where these tests run in the background: there a shell has it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@asynccontextmanager
async def running(
    *arguments: str, cwd: Path | None = None, more: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command in a process of its own, to be watched and signalled; killed in the end if it still runs."""
    with obeying_ctrl_c():
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "relay",
            *arguments,
            cwd=cwd,
            env=environment(**(more or {})),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=2**22,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def said(stream: asyncio.StreamReader | None, text: str, *, within: float = 60.0) -> str:
    """Everything up to the line that holds the text. Fails where it does not come."""
    assert stream is not None
    found = ""
    async with asyncio.timeout(within):
        while text not in found:
            line = await stream.readline()
            assert line, f"it ended without saying {text!r}: {found}"
            found += line.decode()
    return found


@asynccontextmanager
async def answering(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """A server that answers everything with this handler; yields its URL."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
