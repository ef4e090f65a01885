"""Installs or names what the tests need, and then runs them.

`python -m tests.prerequisites <make target> <command> [argument …]`

It installs missing packages as root on Debian, without starting a service. If a required program
is missing elsewhere, it runs the make target in a container, where the same happens, or fails and
says what to install. It names missing programs that only some tests need; these are skipped. A
bare machine with Python, make and git has everything else: fonts come with Chromium, epmd with
RabbitMQ, and sh, bash, tar, mount and unshare with every Debian.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests import chromium as browser
from tests import firefox, rabbitmq

IMAGE = "docker.io/library/python:3.13-bookworm"
"""Debian with Python, make and git: a bare machine."""

COPY_AND_MAKE = (
    "mkdir /relay && cd /relay && tar -C /from --exclude=./.venv -cf - . "
    "| tar --no-same-owner -xf - && exec make --no-print-directory "
)

POLICY = Path("/usr/sbin/policy-rc.d")


@dataclass(frozen=True, slots=True)
class Need:
    """A program that tests run, and the package of Debian that has it."""

    name: str
    package: str
    find: Callable[[], Path | None]
    why: str
    required: bool = False
    """Whether tests fail without it. Else those that use it are skipped."""
    installed: bool = True
    """Whether this installs it; else it is a choice of whoever develops."""

    def described(self) -> str:
        """As a person reads it."""
        return f"{self.name} (package {self.package}: {self.why})"


def program(name: str) -> Callable[[], Path | None]:
    """Return what looks for a program on PATH."""

    def find() -> Path | None:
        path = shutil.which(name)
        return Path(path) if path else None

    return find


RABBITMQ = Need(
    "RabbitMQ",
    "rabbitmq-server",
    rabbitmq.server_scripts,
    "tests stop, kill and freeze one of their own; its service need not run",
    required=True,
)
NEEDS_OF_TESTS = (
    RABBITMQ,
    Need(
        "Chromium",
        "chromium",
        browser.executable,
        "tests look at the pages of the relay; Google Chrome will do",
        required=True,
    ),
    Need(
        "libatomic",
        "libatomic1",
        browser.driver,
        "the browser driver of Playwright is linked with it",
        required=True,
    ),
    Need("Firefox", "firefox-esr", firefox.executable, "a test looks at the page with it, too"),
    Need("strace", "strace", program("strace"), "tests kill the relay at an exact system call"),
    Need("curl", "curl", program("curl"), "tests run the commands of the documentation"),
    Need("bash", "bash", program("bash"), "the same tests"),
    Need("openssl", "openssl", program("openssl"), "a test makes the CA of docs/operations.md"),
    Need(
        "ip",
        "iproute2",
        program("ip"),
        "a test gives addresses to a network namespace, to see which the relay dials",
    ),
    Need("unshare", "util-linux", program("unshare"), "the same test"),
    Need("mount", "mount", program("mount"), "the same test, and as root those that fill a disk"),
    Need(
        "systemd-analyze",
        "systemd",
        program("systemd-analyze"),
        "a test asks it how exposed the unit is; nothing is started",
    ),
    Need(
        "promtool",
        "prometheus",
        program("promtool"),
        "tests evaluate the alert rules of deploy/prometheus; no service is started",
    ),
    Need(
        "Node",
        "nodejs",
        program("node"),
        "a test runs a receiver of docs/webhooks.md",
        installed=False,
    ),
    Need("npm", "npm", program("npm"), "a test runs examples/drain.mjs", installed=False),
    Need(
        "Go",
        "golang-go",
        program("go"),
        "tests run examples/drain.go and a receiver of docs/webhooks.md",
        installed=False,
    ),
)
NEEDS = {
    "test": NEEDS_OF_TESTS,
    "bench": (RABBITMQ,),
    "chaos": (RABBITMQ, *(need for need in NEEDS_OF_TESTS if need.name == "strace")),
}
"""By make target."""


def main() -> NoReturn:
    """Replace this process by the command, or by a container, or end with a sentence."""
    target, *command = sys.argv[1:]
    missing = missing_of(NEEDS[target])
    to_install = [need for need in missing if need.installed]
    if to_install and os.geteuid() == 0 and shutil.which("apt-get"):
        print(
            (
                f"Not installed: {listed(to_install)}. Installing Debian's packages, without "
                f"starting a service …"
            ),
            flush=True,
        )
        install_on_debian(
            [need.package for need in to_install if need.required],
            [need.package for need in to_install if not need.required],
        )
        missing = missing_of(NEEDS[target])
        if unmet := [need for need in missing if need.required]:
            sys.exit(
                f"These are still not found or do not start: {listed(unmet)}. "
                "Install them by hand, then try again."
            )
    elif required := [need for need in missing if need.required]:
        if engine := container_engine():
            print(
                (
                    f"Not installed: {listed(required)}. Running `make {target}` with {engine} "
                    f"in {IMAGE} …"
                ),
                flush=True,
            )
            run_in_container(engine, target)
        sys.exit(
            f"Not installed: {listed(required)}. Install them, or docker or podman, or run "
            f"as root on Debian to have it done."
        )
    if missing:
        print(
            f"Not installed, so the tests that use them are skipped: {listed(missing)}.", flush=True
        )
    os.execvp(command[0], command)


def missing_of(needs: Iterable[Need]) -> list[Need]:
    """Return those that are not on this machine."""
    return [need for need in needs if need.find() is None]


def listed(needs: Iterable[Need]) -> str:
    """Return them as a list in a sentence."""
    return ", ".join(need.described() for need in needs)


def install_on_debian(required: list[str], optional: list[str]) -> None:
    """Install Debian's packages as far as possible, and leave their services stopped.

    A policy file that was there before stays. An optional package that cannot be installed does
    not keep back a required one.
    """
    installs = [
        ["install", "-y", "--no-install-recommends", *packages]
        for packages in (required, optional)
        if packages
    ]
    with services_stopped():
        for arguments in (["update"], *installs):
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
                print(
                    f"{done.stdout}\napt-get {' '.join(arguments)} failed, see above.", flush=True
                )


@contextmanager
def services_stopped() -> Iterator[None]:
    """Let no package start its service; remove the policy file also after SIGTERM."""

    def end(*_: object) -> NoReturn:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    ours = not POLICY.exists()
    try:
        if ours:
            POLICY.write_text("#!/bin/sh\nexit 101\n")
            POLICY.chmod(0o755)
        yield
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, before)


def container_engine() -> str | None:
    """Return the first container engine that works for this user."""
    for name in ("docker", "podman"):
        if (
            shutil.which(name)
            and subprocess.run([name, "info"], check=False, capture_output=True).returncode == 0
        ):
            return name
    return None


def run_in_container(engine: str, target: str) -> NoReturn:
    """Run the make target on a copy of this tree in a container; the tree itself is only read."""
    here = f"{Path.cwd()}:/from:ro"
    os.execvp(
        engine,
        [
            engine,
            "run",
            "--rm",
            "--init",
            "--env",
            "CI",
            "--env",
            "ARGS",
            "--volume",
            here,
            IMAGE,
            "sh",
            "-ec",
            COPY_AND_MAKE + target,
        ],
    )


if __name__ == "__main__":
    main()
