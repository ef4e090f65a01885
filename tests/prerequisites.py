"""Sees to what the tests need and then runs them: `python -m tests.prerequisites <make target> <command> [argument …]`.

RabbitMQ and Chromium are taken where they are installed. Else, as root on Debian, their packages are installed, without starting a
service; else the make target runs in a container, in which the same happens; else this fails and says what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests import browser, rabbitmq

IMAGE = "docker.io/library/python:3.13-bookworm"
"""Debian with Python, make and git: a bare machine."""

COPY_AND_MAKE = (
    "mkdir /relay && cd /relay && tar -C /from --exclude=./.venv -cf - . | tar --no-same-owner -xf - && exec make --no-print-directory "
)

POLICY = Path("/usr/sbin/policy-rc.d")


@dataclass(frozen=True, slots=True)
class Need:
    """A program that tests run, and the package of Debian that has it."""

    name: str
    package: str
    found: Callable[[], Path | None]
    why: str


RABBITMQ = Need(
    "RabbitMQ", "rabbitmq-server", rabbitmq.server_scripts, "tests stop, kill and freeze one of their own; its service need not run"
)
CHROMIUM = Need("Chromium", "chromium", browser.executable, "tests look at the pages of the relay; Google Chrome will do")
NEEDS = {"test": (RABBITMQ, CHROMIUM), "bench": (RABBITMQ,), "chaos": (RABBITMQ,)}
"""By make target."""


def main() -> NoReturn:
    """Replace this process by the command, or by a container, or end with a sentence."""
    target, *command = sys.argv[1:]
    if missing := [need for need in NEEDS[target] if need.found() is None]:
        names = " and ".join(need.name for need in missing)
        if os.geteuid() == 0 and shutil.which("apt-get"):
            print(f"Not installed: {names}. Installing Debian's packages, without starting a service …", flush=True)
            install_on_debian([need.package for need in missing])
        elif engine := container_engine():
            print(f"Not installed: {names}. Running `make {target}` with {engine} in {IMAGE} …", flush=True)
            run_in_container(engine, target)
        else:
            sys.exit(
                f"Not installed: {names}. Install {' and '.join(f'{need.package} ({need.why})' for need in missing)}, "
                "or docker or podman, or run as root on Debian to have it done."
            )
    os.execvp(command[0], command)


def install_on_debian(packages: list[str]) -> None:
    """Install Debian's packages and leave their services stopped; a policy file that was there before stays."""
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", "-qq", *arguments],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
            if done.returncode:
                sys.exit(
                    f"{done.stdout}\napt-get {arguments[0]} failed, see above. Install {' and '.join(packages)} by hand, then try again."
                )
    finally:
        if ours:
            POLICY.unlink()


def container_engine() -> str | None:
    """Return the first container engine that works for this user."""
    for name in ("docker", "podman"):
        if shutil.which(name) and subprocess.run([name, "info"], check=False, capture_output=True).returncode == 0:
            return name
    return None


def run_in_container(engine: str, target: str) -> NoReturn:
    """Run the make target on a copy of this tree in a container; the tree itself is only read."""
    here = f"{Path.cwd()}:/from:ro"
    os.execvp(
        engine,
        [engine, "run", "--rm", "--init", "--env", "CI", "--env", "ARGS", "--volume", here, IMAGE, "sh", "-ec", COPY_AND_MAKE + target],
    )


if __name__ == "__main__":
    main()
