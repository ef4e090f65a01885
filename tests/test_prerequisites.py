"""What the tests need is installed on Debian as far as possible; the policy file does not stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, shutil, sys
from pathlib import Path
from tests import prerequisites
prerequisites.POLICY = Path(sys.argv.pop(1))
prerequisites.REQUIRED = {"needed": lambda: shutil.which("needed")}
prerequisites.OPTIONAL = {"strace": lambda: shutil.which("optional")}
prerequisites.CHOICES = {}
os.geteuid = lambda: 0
prerequisites.main()
"""
APT = """#!/bin/sh
cd {folder}
case $* in *install*) test -e policy-rc.d ;; esac || exit 1
case $* in *{has}*) echo "#!/bin/sh" >{has}; chmod +x {has} ;; *) echo no mirror >&2; exit 100
esac
"""


@pytest.mark.parametrize(("has", "code"), [("needed", 0), ("strace", 1)])
def test_what_is_required_is_installed_or_ends_the_run(has: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "apt-get").write_text(APT.format(folder=tmp_path, has=has))
    (tmp_path / "apt-get").chmod(0o755)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "policy-rc.d", "test", "echo", "the tests run"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == code, run.stdout
    assert run.stdout.endswith("the tests run\n") is (code == 0)
    assert ("Not installed: needed. Install it" in run.stdout) is (code == 1)
    assert "no mirror" in run.stdout
    assert not (tmp_path / "policy-rc.d").exists()
