"""`python -m tests.platforms [release …]`: runs `make demo` and `make test` on bare machines.

Each release gets a fresh copy of a root file system with Python, make and git, and a fresh clone of
the last commit. The variable ARGS goes to the tests. Only a run of all releases writes the page
docs/platforms.md.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from tests.platforms import page, roots
from tests.platforms.page import Row, Step, duration
from tests.platforms.roots import ISOLATED, RELEASES, Copy, Release

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDED = {
    "debootstrap": "debootstrap",
    "git": "git",
    "mount": "mount",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
"""Programs, and the packages of Debian that have them."""
STOPPED = "stopped"
"""The result of tests that somebody ended before they were through."""
TOOLS = {
    "containers": ("podman", "buildah", "iptables", "ip", "nsenter"),
    "unit": ("systemd-nspawn", "nsenter", "pgrep"),
}
"""Programs beside this file that run on this machine, and the tools that each needs.

Each takes the paths of fresh copies, and prints its steps: `unit` takes a copy of each release,
`containers` takes those of PYTHON and BROKER.
"""
PYTHON, BROKER = RELEASES[1:]
"""The releases that stand in for the images of Python 3.13 and RabbitMQ 4.3."""
EVERY_SECONDS = 60
SECONDS = {"demo": 3600.0, "test": 4 * 3600.0, "containers": 3600.0, "unit": 3600.0}
"""How long a step may take."""
VERSIONS = """
import json, platform, re, shutil, sqlite3, ssl, subprocess
def package(name):
    command = ["dpkg-query", "--show", "--showformat=${Version}", name]
    version = subprocess.run(command, capture_output=True, text=True).stdout
    return re.sub(r"^[0-9]+:|[-+~].*", "", version) or "none"
names = {"RabbitMQ": "rabbitmq-server", "Erlang": "erlang-base", "Chromium": "chromium"}
versions = {title: package(name) for title, name in names.items()}
versions["Python"] = platform.python_version()
versions["SQLite"] = sqlite3.sqlite_version
versions["OpenSSL"] = ssl.OPENSSL_VERSION.split()[1]
print(json.dumps(versions))
"""


def main() -> None:
    """Run the named releases, or all, one after the other. Exit with 1 if a step failed."""
    releases = chosen(sys.argv[1:])
    if missing := what_is_missing():
        sys.exit(f"make platforms: {'; '.join(missing)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cache = roots.default_cache()
    try:
        with alone(cache):
            rows = [run(cache, release) for release in releases]
            beside = containers(cache)
    except KeyboardInterrupt:
        sys.exit(
            "make platforms: stopped; everything it started has ended, and its copy is removed"
        )
    print(f"\n{page.table([row.cells() for row in rows])}\nContainers: {beside.cell()}")
    if os.environ.get("ARGS") or any(
        step.result.startswith(STOPPED) for row in rows for step in row.steps.values()
    ):
        print("Not all tests ran: docs/platforms.md stays as it was.")
    else:
        page.write(rows, beside)
        print("docs/platforms.md has this table.")
    if not all(
        step.ok for step in (beside, *(step for row in rows for step in row.steps.values()))
    ):
        sys.exit(1)


def chosen(names: list[str]) -> list[Release]:
    """Return the releases of these suites, or all."""
    known = {release.suite: release for release in RELEASES}
    if unknown := [name for name in names if name not in known]:
        sys.exit(
            f"make platforms: unknown release {', '.join(unknown)}; known are {', '.join(known)}"
        )
    return [known[name] for name in names] or list(RELEASES)


def what_is_missing() -> list[str]:
    """Say what this machine lacks for this program."""
    missing = []
    if os.geteuid() != 0:
        missing.append("run it as root: it mounts file systems and installs packages in them")
    if not Path("/etc/debian_version").exists():
        missing.append("run it on Debian: debootstrap and the keys of its archive are needed")
    if packages := sorted(
        {package for program, package in NEEDED.items() if shutil.which(program) is None}
    ):
        missing.append(f"install {' and '.join(packages)}")
    return missing


@contextmanager
def alone(cache: Path) -> Iterator[None]:
    """Hold the cache for this run, and remove what a killed run left in it."""
    roots.claim(cache)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(
                f"make platforms: another run uses {cache}; wait for it, or name another "
                f"folder in PLATFORMS_CACHE"
            )
        roots.remove(cache / "runs")
        for name in ("archives", "pip"):
            (cache / name).mkdir(exist_ok=True)
        yield


def new_logs(cache: Path, title: str, name: str) -> Path:
    """Make the folder of the logs, and say where it is."""
    logs = cache / "logs" / f"{datetime.now().astimezone():%Y-%m-%d-%H%M%S}-{name}"
    logs.mkdir(parents=True)
    print(f"{title}: logs in {logs}", flush=True)
    return logs


def prepare(cache: Path, release: Release, logs: Path) -> None:
    """Make the root file system of the release where the cache lacks it."""
    if not roots.is_ready(cache, release):
        log = logs / f"debootstrap-{release.suite}.log"
        print(f"  debootstrap {release.suite} … ", end="", flush=True)
        try:
            roots.make(cache, release, log)
        except subprocess.SubprocessError:
            sys.exit(f"failed, see {log}\n{tail(log)}")
        print("done", flush=True)
    (cache / "archives" / release.suite / "partial").mkdir(parents=True, exist_ok=True)


def run(cache: Path, release: Release) -> Row:
    """Run every step on a fresh copy of the release."""
    logs = new_logs(cache, release.title, release.suite)
    prepare(cache, release, logs)
    with roots.fresh_copy(cache, release) as copy:
        subprocess.run(
            ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(copy.tree)], check=True
        )
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"],
            check=True,
            capture_output=True,
            text=True,
        )
        steps = {
            "demo": step(copy, logs / "demo.log", "make", "demo"),
            "test": step(
                copy, logs / "test.log", "make", "test", f"ARGS={os.environ.get('ARGS', '')}"
            ),
        }
        found = versions(copy)
    if missing := not_run("unit"):
        steps["unit"] = missing
    else:
        with roots.fresh_copy(cache, release) as copy:
            steps["unit"] = step(copy, logs / "unit.log", "--beside", str(HERE / "unit"))
    return Row(release.title, commit.stdout.strip(), found, steps)


def containers(cache: Path) -> Step:
    """Run the image and the compose file on fresh copies of the releases that stand in for images.

    The command that `inside` runs with the copy of Python is `inside` with that of RabbitMQ: each
    adds the path of its root to the arguments of the program.
    """
    if missing := not_run("containers"):
        return missing
    logs = new_logs(cache, "Containers", "containers")
    for release in (PYTHON, BROKER):
        prepare(cache, release, logs)
    with roots.fresh_copy(cache, PYTHON) as python, roots.fresh_copy(cache, BROKER) as broker:
        program = inside(broker, "--beside", str(HERE / "containers"))
        return step(python, logs / "containers.log", "--beside", *program)


def not_run(name: str) -> Step | None:
    """Return what the table says where this machine lacks tools of the program, else None."""
    missing = [tool for tool in TOOLS[name] if shutil.which(tool) is None]
    if not missing:
        return None
    skipped = Step(ok=True, result=f"not run ({', '.join(missing)} missing)", seconds=0)
    show(f"  {name} … {skipped.cell()}\n")
    return skipped


def inside(copy: Copy, *command: str) -> list[str]:
    """Return the command line that runs a command in the copy."""
    return [
        *ISOLATED,
        sys.executable,
        "-m",
        "tests.platforms.inside",
        str(copy.base),
        str(copy.folder),
        *command,
    ]


def step(copy: Copy, log: Path, *command: str) -> Step:
    """Run a command in the copy, show how long it has run, and return what came of it."""
    said = (
        log.stem if "--beside" in command else " ".join(word for word in command if word != "ARGS=")
    )
    line = f"  {said} … "
    began = time.monotonic()
    deadline = began + SECONDS[log.stem]
    with log.open("wb") as output:
        process = subprocess.Popen(
            inside(copy, *command), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while process.poll() is None and (left := deadline - time.monotonic()) > 0:
                show(f"{line}{duration(time.monotonic() - began)}")
                try:
                    process.wait(min(left, 1 if sys.stdout.isatty() else EVERY_SECONDS))
                except subprocess.TimeoutExpired:
                    continue
            late = process.poll() is None
        finally:
            process.kill()
            process.wait()
    result = "failed (not done in time)" if late else outcome(process.returncode, log)
    done = Step(process.returncode == 0, result, time.monotonic() - began)
    show(f"{line}{done.cell()}\n")
    if not done.ok:
        print(f"  failed: {said}, see {log}\n{tail(log)}", flush=True)
    return done


def show(line: str) -> None:
    """Show progress: over the line before on a terminal, else on lines of its own."""
    end = "" if sys.stdout.isatty() else "\n"
    print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line.rstrip("\n"), end=end, flush=True)


def outcome(status: int, log: Path) -> str:
    """Return the numbers of pytest where it ran, else whether the command passed."""
    text = log.read_text(errors="replace")
    found = re.findall(r"^=+ ((?:\d+ \w+(?:, )?)+) in [\d.]+s", text, re.MULTILINE)
    said = f" ({found[-1]})" if found else ""
    if "!! KeyboardInterrupt !!" in text:
        return f"{STOPPED}{said}"
    return f"{'failed' if status else 'passed'}{said}"


def tail(log: Path) -> str:
    """Return the last lines of a log, indented."""
    return "".join(f"    {line}\n" for line in log.read_text(errors="replace").splitlines()[-30:])


def versions(copy: Copy) -> dict[str, str]:
    """Return the versions of what the tests ran with."""
    asked = subprocess.run(
        ["timeout", "--signal=KILL", "60", *inside(copy, ".venv/bin/python", "-c", VERSIONS)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    found: dict[str, str] = json.loads(asked.stdout) if asked.returncode == 0 else {}
    return found


if __name__ == "__main__":
    main()
