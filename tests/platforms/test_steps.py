"""A step of the scripts `containers` and `unit` fails when any command of its function fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

STEPS = Path(__file__).with_name("steps.sh")
FUNCTION = "work() { echo begun; false; echo went on; }\n"


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that uses the steps, as the scripts beside this file do."""
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n. '{STEPS}'\n{script}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("call", ["step it work", "step it wait_for 0 work"])
def test_a_step_fails_when_a_command_before_the_last_fails(call: str) -> None:
    ran = run(f"{FUNCTION}{call}\necho after the step")
    assert ran.returncode == 1
    assert ran.stdout.startswith("it … failed\n")
    assert "begun" in ran.stdout
    assert "went on" not in ran.stdout
    assert "after the step" not in ran.stdout


def test_a_step_in_which_all_succeeds_is_ok() -> None:
    ran = run(
        "work() { true; true; }\nstep it work\nstep wait wait_for 0 work\necho after the steps"
    )
    assert ran.stdout == "it … ok\nwait … ok\nafter the steps\n"
    assert ran.returncode == 0


def test_a_command_that_must_fail_may_fail_before_the_last() -> None:
    assert run(f"{FUNCTION}step it fails work").stdout == "it … ok\n"
    ran = run("step it fails true")
    assert ran.stdout == "it … failed\nsucceeded, and must not: true\n"
    assert ran.returncode == 1
