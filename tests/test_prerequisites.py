"""What the tests need is installed on Debian as far as possible; the policy file does not stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import os, sys
from pathlib import Path
from tests import prerequisites
from tests.prerequisites import Need, program
prerequisites.POLICY = Path(sys.argv.pop(1))
prerequisites.NEEDS = {"test": (
    Need("needed", "needed", program("needed"), "every test", required=True),
    Need("optional", "optional", program("optional"), "one test"),
)}
os.geteuid = lambda: 0
prerequisites.main()
"""


def start(folder: Path, apt_get: str) -> subprocess.Popen[str]:
    """Run the installation with this script in place of apt-get; then `echo the tests run`."""
    tool = folder / "apt-get"
    tool.write_text(f"#!/bin/sh\ncd {folder}\n{apt_get}\n")
    tool.chmod(0o755)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, folder / "policy-rc.d", "test", "echo", "the tests run"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


INSTALL = """test -e policy-rc.d || exit 1
for name; do
  case $name in {}) echo "#!/bin/sh" >$name; chmod +x $name ;; esac
done
"""


@pytest.mark.parametrize("installed", ["needed", "needed|optional"])
def test_only_a_required_need_that_stays_unmet_ends_the_run(installed: str, tmp_path: Path) -> None:
    optional = "optional" in installed
    failing = "" if optional else 'case "$*" in *optional*) echo no such package; exit 100;; esac'
    with start(tmp_path, INSTALL.format(installed) + failing) as run:
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 0, said
    assert said.endswith("the tests run\n")
    assert ("the tests that use them are skipped: optional" in said) is not optional
    assert ("no such package" in said) is not optional
    assert not (tmp_path / "policy-rc.d").exists()


def test_a_required_need_that_stays_unmet_ends_the_run(tmp_path: Path) -> None:
    with start(tmp_path, "echo no mirror; exit 100") as run:
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "no mirror" in said
    assert "still not found or do not start: needed (package needed: every test)." in said
    assert "the tests run" not in said


def test_sigterm_during_the_installation_leaves_no_policy_file(tmp_path: Path) -> None:
    with start(tmp_path, "touch begun; exec sleep 60 >/dev/null 2>&1") as run:
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (tmp_path / "policy-rc.d").exists()
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
    assert not (tmp_path / "policy-rc.d").exists()
