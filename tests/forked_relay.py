"""Starts `python -m relay` as a fork of a process that has imported the relay already.

An import takes half a second of CPU time, and the tests start hundreds of relays and commands. A
server imports the relay once. For each start it forks a process. That process gets its own
arguments, environment, folder, standard streams and signals, and then runs the module `relay`.

Only pytest forks: its `conftest` calls `enable`. Benchmarks and trials that use the same helpers
start a new interpreter, because they measure it. All forks of a server have one hash seed, so what
depends on the order of a set must not be tested by two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent

_OWN_VARIABLES = ("IMDS_RELAY_", "NOTIFY_SOCKET", "PYTEST_CURRENT_TEST")
"""How the names of variables begin that no module reads when it is imported."""

_MAX_REQUEST = 128 * 1024
_REPORT = struct.Struct("!q")
"""A report of the server: the process id first, then the exit code or minus the signal."""


class ForkedProcess:
    """A fork, with as much of `asyncio.subprocess.Process` as the tests use."""

    def __init__(self, pid: int, reports: socket.socket) -> None:
        """Await the report about its end in the running event loop."""
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._reports = reports
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(reports, self._read_exit_code)

    def _read_exit_code(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reports)
        self._ended.set()
        with self._reports:
            self.returncode = _read_report(self._reports)

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
    output: int | None = None,
    limit: int = 2**16,
) -> Process:
    """Start `python -m relay` with arguments.

    Both output streams go to the file descriptor ``output``. Without it, both are pipes, and
    ``limit`` is the number of bytes that a reader of a pipe buffers.
    """
    server = _server_for(environment)
    if server is None:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relay", *arguments),
            cwd=cwd,
            env=environment,
            stdout=asyncio.subprocess.PIPE if output is None else output,
            stderr=asyncio.subprocess.PIPE if output is None else output,
            limit=limit,
        )
    with open(os.devnull, "rb") as nothing:  # noqa: ASYNC230, PTH123  # it never blocks
        if output is not None:
            streams = (nothing.fileno(), output, output)
            return await _fork(server, arguments, environment, cwd, streams)
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        try:
            streams = (nothing.fileno(), its_out, its_err)
            process = await _fork(server, arguments, environment, cwd, streams)
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(its_out)
            os.close(its_err)
    process.stdout = await _stream_reader(out, limit)
    process.stderr = await _stream_reader(err, limit)
    return process


async def _fork(
    server: _Server,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    cwd: Path | None,
    streams: tuple[int, int, int],
) -> ForkedProcess:
    # The first fork waits until the server has imported the relay.
    pid, reports = await asyncio.to_thread(server.fork, arguments, environment, cwd, streams)
    return ForkedProcess(pid, reports)


async def _stream_reader(pipe: int, limit: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader, loop=loop), os.fdopen(pipe, "rb", 0)
    )
    return reader


def _read_report(reports: socket.socket) -> int:
    report = reports.recv(_REPORT.size)
    assert report, "the server of forked relays has ended"
    number: int = _REPORT.unpack(report)[0]
    return number


class _Server:
    """A process that has imported the relay. It forks when it is asked to, and ends with us."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._requests, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its_end.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
            )

    def has_same_environment(self, environment: Mapping[str, str]) -> bool:
        """Return whether a start with these variables imports the relay as the server did."""
        return _read_at_import(environment) == _read_at_import(self._environment)

    def fork(
        self,
        arguments: tuple[str, ...],
        environment: Mapping[str, str],
        cwd: Path | None,
        streams: tuple[int, int, int],
    ) -> tuple[int, socket.socket]:
        """Fork a relay. Return its process id, and the socket that will give its exit code.

        ``streams`` are the file descriptors of its standard input, output and error.
        """
        request = json.dumps([arguments, dict(environment), str(cwd or Path.cwd())]).encode()
        reports, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            socket.send_fds(self._requests, [request], [*streams, its_end.fileno()])
        return _read_report(reports), reports

    def end(self) -> None:
        self._requests.close()
        self._process.wait()


_server: _Server | None = None
_is_enabled = False


def enable() -> None:
    """Let `start_relay` fork from now on. The server starts with the first relay."""
    global _is_enabled  # noqa: PLW0603  # a worker of pytest has one server
    _is_enabled = True


def disable() -> None:
    """End the server. `start_relay` starts a new interpreter from now on."""
    global _is_enabled, _server  # noqa: PLW0603  # as above
    _is_enabled = False
    if _server is not None:
        _server.end()
        _server = None


def _server_for(environment: Mapping[str, str]) -> _Server | None:
    """Return the server, or None if a relay with these variables needs a new interpreter."""
    global _server  # noqa: PLW0603  # as above
    if not _is_enabled:
        return None
    if _server is None:
        _server = _Server()
    return _server if _server.has_same_environment(environment) else None


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    # Whoever runs the tests may have a path of their own. Only a test that sets another needs it.
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OWN_VARIABLES) and not (name == "PYTHONPATH" and value in paths)
    }


def _serve(requests: socket.socket) -> list[str] | None:
    """Fork for each request. Return None at the end, and the arguments in each fork.

    Between the server and a fork stands a process that waits for the end of the fork.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        request, files, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 4)
        if not request:
            return None
        if os.fork():
            for file in files:
                os.close(file)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream, file in enumerate(files[:3]):
            os.dup2(file, stream)
            os.close(file)
        reports = socket.socket(fileno=files[3])
        pid = os.fork()
        if pid == 0:
            reports.close()
            arguments: list[str]
            arguments, environment, cwd = json.loads(request)
            os.chdir(cwd)
            sys.path[0] = cwd
            os.environ.clear()
            os.environ.update(environment)
            return arguments
        os.closerange(0, 3)  # a pipe ends with the fork
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        reports.send(_REPORT.pack(pid))
        _, status = os.waitpid(pid, 0)
        reports.send(_REPORT.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)


def _main() -> None:
    from relay.cli import make_app  # noqa: PLC0415  # only the server imports it

    make_app()  # imports the modules of all verbs
    import_module("relay.app")
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        arguments = _serve(requests)
    if arguments is not None:
        sys.argv[1:] = arguments
        runpy.run_module("relay", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
