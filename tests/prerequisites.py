"""Installs or names the programs that tests run, and then becomes the command that needs them.

`python -m tests.prerequisites <make target> <command> [argument …]`

As root on Debian it installs missing packages, without starting a service. Elsewhere it says what
to install: nothing runs without what is required, and some tests are skipped without the rest.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests import chromium, rabbitmq

Needs = Mapping[str, Callable[[], object]]
"""Packages of Debian, each with what finds it."""
RABBITMQ: Needs = {"rabbitmq-server": rabbitmq.server_scripts}
# The browser driver of Playwright is linked with libatomic.
REQUIRED: Needs = {**RABBITMQ, "chromium": chromium.executable, "libatomic1": chromium.driver}
_PROGRAMS = "iproute2:ip util-linux:unshare systemd:systemd-analyze prometheus:promtool \
firefox-esr:firefox-esr strace:strace curl:curl bash:bash openssl:openssl mount:mount"
PROGRAMS = dict(each.split(":") for each in _PROGRAMS.split())
OPTIONAL: Needs = {package: partial(shutil.which, name) for package, name in PROGRAMS.items()}
CHOICES: Needs = {name: partial(shutil.which, name) for name in ("node", "npm", "go", "helm")}
"""What is never installed: whoever develops may have it."""
POLICY = Path("/usr/sbin/policy-rc.d")


def main() -> NoReturn:
    """Replace this process by the command, or end with a sentence."""
    target, *command = sys.argv[1:]
    tests = target == "test"
    required, optional = (
        (REQUIRED, OPTIONAL) if tests else (RABBITMQ, {"strace": OPTIONAL["strace"]})
    )
    if os.geteuid() == 0 and shutil.which("apt-get"):
        install(missing(required))
        install(missing(optional))  # what cannot be had keeps back nothing that is required
    if lacking := missing(required):
        sys.exit(f"Not installed: {lacking}. Install it, or run as root on Debian to have it done.")
    if lacking := missing({**optional, **CHOICES} if tests else optional):
        print(f"Not installed, so tests that use them are skipped: {lacking}.", flush=True)
    os.execvp(command[0], command)


def missing(needs: Needs) -> str:
    """Return those that are not on this machine."""
    return " ".join(name for name, find in needs.items() if not find())


def install(packages: str) -> None:
    """Install Debian's packages, if that is possible, and leave their services stopped."""
    if not packages:
        return
    print(f"Installing {packages}, without starting a service …", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    apt = f"apt-get -qq update; apt-get -qq install -y --no-install-recommends {packages}"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    ours = not POLICY.exists()
    try:
        if ours:
            POLICY.write_text("#!/bin/sh\nexit 101\n")
            POLICY.chmod(0o755)
        subprocess.run(["sh", "-c", f"({apt}) >/dev/null"], check=False, env=environment)
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
