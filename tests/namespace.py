"""Runs a program of the tests in a network namespace of its own, where it may set up addresses."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

_DEVICES = ("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")


def run_in_namespace(module: str) -> None:
    """Run a module whose assertions are the test. Skips where there are no such namespaces."""
    missing = [program for program in ("unshare", "ip", "mount") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found (Debian: util-linux, iproute2)")
    network = ["unshare", "--net", "--mount"]
    problem = ""
    # Where user namespaces are switched off, root needs none.
    for unshare in ([*network, "--user", "--map-root-user"], network):
        tried = subprocess.run([*unshare, *_DEVICES], capture_output=True, text=True, check=False)
        problem = tried.stderr.strip()
        if tried.returncode == 0:
            break
    else:
        pytest.skip(f"no network namespace with a device can be made: {problem}")
    command = [*unshare, sys.executable, "-m", module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
