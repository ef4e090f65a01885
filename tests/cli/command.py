"""Runs the command line: in a process of its own, or in this process, which is faster."""

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
from aiohttp.test_utils import TestServer

from relay.cli import main
from tests.forked_relay import Process, start_relay

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output, parsed as JSON."""
        return orjson.loads(self.out)


def environment(**more: str) -> dict[str, str]:
    """Return the environment without a relay's variables, and with the project on the path."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("IMDS_RELAY_")
    }
    return {**inherited, "PYTHONPATH": str(ROOT), **more}


def run_process(*arguments: str, cwd: Path | None = None, **more: str) -> CommandResult:
    """Run the command in a process of its own, and check that it shows no traceback."""
    result = run_program(sys.executable, "-m", "relay", *arguments, cwd=cwd, **more)
    assert "Traceback" not in result.err, result.err
    return result


def run_program(*command: str, cwd: Path | None = None, **more: str) -> CommandResult:
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return CommandResult(result.returncode, result.stdout, result.stderr)


def run_command(*arguments: str) -> CommandResult:
    """Run the command in this process. Standard input is no terminal, so it asks nothing."""
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
    return CommandResult(ended.value.code, out.getvalue(), err.getvalue())


async def run_async(*arguments: str) -> CommandResult:
    """Run the command in a thread, for a test whose event loop serves the command."""
    return await asyncio.to_thread(run_command, *arguments)


@contextmanager
def default_sigint() -> Iterator[None]:
    """Let new processes obey SIGINT. A shell ignores it for tests that run in the background."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@asynccontextmanager
async def start_process(
    *arguments: str, cwd: Path | None = None, more: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """Start the command in a process of its own. It is killed in the end if it still runs."""
    with default_sigint():
        process = await start_relay(
            *arguments, environment=environment(**(more or {})), cwd=cwd, limit=2**22
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def read_until(stream: asyncio.StreamReader | None, text: str) -> str:
    """Return everything up to the line that holds the text. Fails if the stream ends first."""
    assert stream is not None
    output = ""
    async with asyncio.timeout(60):
        while text not in output:
            line = await stream.readline()
            assert line, f"the stream ended without {text!r}: {output}"
            output += line.decode()
    return output


@asynccontextmanager
async def serve_handler(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """Yield the URL of a server that answers every call with this handler."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(application) as server:
        yield str(server.make_url("")).removesuffix("/")
