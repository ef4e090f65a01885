"""Shells complete verbs, options and names."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import environment, run_async, run_command
from tests.cli.running_relay import RunningRelay, running_relay


def complete(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what bash would offer at the end of a line."""
    words = line.split(" ")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv("_IMDS_RELAY_COMPLETE", "complete_bash")
    try:
        result = run_command()
    finally:
        monkeypatch.delenv("_IMDS_RELAY_COMPLETE")
    assert result.err == ""
    return result.out.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("imds-relay expl", ["explain"]),
        ("imds-relay fleet def", ["definitions"]),
        ("imds-relay events --sc", ["--scope"]),
        ("imds-relay approvals d", ["dry-run"]),
        ("imds-relay schema event.sch", ["event.scheduled"]),
        ("imds-relay redeliver --type relay.p", ["relay.ping"]),
        ("imds-relay simulate user-reb", ["user-reboot"]),
        ("imds-relay events --profile w", ["west"]),
        ("imds-relay ping d", ["drain"]),
        ("imds-relay redeliver --sink ", ["drain", "bus"]),
        ("imds-relay show ", []),
    ],
)
def test_a_shell_completes_what_is_known_without_a_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "imds-relay").mkdir()
    (tmp_path / "imds-relay/west.yaml").touch()
    (tmp_path / "relay.yaml").write_text(
        "sinks: [{name: drain, secrets_file: /no/such}, {name: bus}]"
    )
    assert complete(line, monkeypatch) == offered


def test_what_cannot_be_read_completes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("sinks: 5", "sinks: [5]", "[", "sinks:"):
        (tmp_path / "relay.yaml").write_text(text)
        assert complete("imds-relay ping ", monkeypatch) == []


async def test_event_ids_come_from_the_relay_of_this_machine(tmp_path: Path) -> None:
    async with running_relay(tmp_path) as relay:
        event = await relay.announce()
        assert await offered_events(relay, f"show -c {relay.config} ") == [event.event_id]
        beginning = event.event_id[:6].lower()
        (offered,) = await offered_events(relay, f"approve -c {relay.config} {beginning}")
        assert offered == beginning + event.event_id[6:]
        # A key goes out only when a verb runs.
        assert await offered_events(relay, f"show --url {relay.url} ") == []
        assert (await run_async("events", "-c", relay.config)).code == 0


async def offered_events(relay: RunningRelay, line: str) -> list[str]:
    """Return what zsh would offer, from a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "relay",
        cwd=relay.store.parent,
        env=environment(
            _TYPER_COMPLETE_ARGS=f"imds-relay {line}",
            _TYPER_COMPLETE_FISH_ACTION="get-args",
            _IMDS_RELAY_COMPLETE="complete_fish",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert err == b""
    return out.decode().split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "relay", "--show-completion", shell],
        env=environment(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert f"_IMDS_RELAY_COMPLETE=complete_{shell}" in result.stdout


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """The whole way: the script that the command prints, in a real bash."""
    command = tmp_path / "imds-relay"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m relay "$@"\n')
    command.chmod(0o755)
    program = (
        'eval "$(imds-relay --show-completion)"\n'
        "COMP_WORDS=(imds-relay expl); COMP_CWORD=1\n"
        '_imds_relay_completion imds-relay; echo "${COMPREPLY[@]}"\n'
    )
    result = subprocess.run(
        ["bash", "--norc", "-c", program],
        env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}", SHELL="/bin/bash"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (result.stdout, result.stderr) == ("explain\n", "")
