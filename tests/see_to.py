"""Sees to what the tests need and then runs them: `python -m tests.see_to <make target> <command> [argument …]`.

RabbitMQ is taken where it is installed. Else, as root on Debian, its package is installed without starting its service; else the
make target runs in a container, in which the same happens; else this fails and says what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from tests.rabbitmq import server_scripts

IMAGE = "docker.io/library/python:3.13-bookworm"
"""Debian with Python, make and git: a bare machine."""

COPY_AND_MAKE = (
    "mkdir /relay && cd /relay && tar -C /from --exclude=./.venv -cf - . | tar --no-same-owner -xf - && exec make --no-print-directory "
)

POLICY = Path("/usr/sbin/policy-rc.d")


def main() -> NoReturn:
    """Replace this process by the command, or by a container, or end with a sentence."""
    target, *command = sys.argv[1:]
    if server_scripts() is None:
        if os.geteuid() == 0 and shutil.which("apt-get"):
            install_on_debian()
        elif engine := container_engine():
            run_in_container(engine, target)
        else:
            sys.exit(
                "The tests stop, kill and freeze a RabbitMQ of their own, and none is installed. Install the package rabbitmq-server "
                "(its service need not run), or docker or podman, or run as root on Debian to have it installed."
            )
    os.execvp(command[0], command)


def install_on_debian() -> None:
    """Install Debian's package and leave its service stopped; a policy file that was there before stays."""
    print("RabbitMQ is not installed: installing Debian's package rabbitmq-server, without starting its service …", flush=True)
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", "rabbitmq-server"]):
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
                sys.exit(f"{done.stdout}\napt-get {arguments[0]} failed, see above. Install rabbitmq-server by hand, then try again.")
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
    print(f"RabbitMQ is not installed: running `make {target}` with {engine} in {IMAGE} …", flush=True)
    here = f"{Path.cwd()}:/from:ro"
    os.execvp(
        engine,
        [engine, "run", "--rm", "--init", "--env", "CI", "--env", "ARGS", "--volume", here, IMAGE, "sh", "-ec", COPY_AND_MAKE + target],
    )


if __name__ == "__main__":
    main()
