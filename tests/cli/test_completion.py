"""Shells complete verbs and options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.command import environment


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
