"""docs/windows.md: what runs without the parts of Python that Windows lacks. This is no Windows."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cli.command import CommandResult, run_process

WITHOUT_POSIX = Path(__file__).parent / "without_posix"


def run(*arguments: str, cwd: Path | None = None) -> CommandResult:
    """Run the command in a process that lacks these parts."""
    path = f"{WITHOUT_POSIX}{os.pathsep}{Path(__file__).parents[1]}"
    return run_process(*arguments, cwd=cwd, PYTHONPATH=path)


def test_the_main_job_is_done_from_end_to_end() -> None:
    """Polling, API, approval, StartRequest, state file and webhook."""
    result = run("demo")
    assert result.code == 0, result.err
    assert "approved by client:operator, completed" in result.out


def test_a_local_socket_is_refused_with_a_remedy_only_if_one_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text("{scope: s, relay: r, api: {socket: relay.sock, listen: '127.0.0.1:0'}}")
    result = run("run", cwd=tmp_path)
    assert result.code == 2
    assert "api.socket: this system has no local sockets" in result.err
    assert "use api.listen with clients" in result.err
    file.write_text(
        "{scope: s, relay: r, api: {listen: '127.0.0.1:0'}, approvals: {rules: "
        "[{name: all, approve: automatic}]}}"
    )
    checked = run("check", cwd=tmp_path)
    assert (checked.code, checked.err) == (0, "")
    asked = run("events", cwd=tmp_path)
    assert asked.code == 2
    assert "this system has no local sockets: give --url and a key" in asked.err
