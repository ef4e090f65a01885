"""Runs a command in a copy of a root file system.

`python -m tests.platforms.inside <base> <copy> [--beside] <command> …`

`unshare` starts it as process 1 of its own namespaces (mounts, processes, host name), with the
network of the machine. All mounts and processes end with it. With `--beside` the command runs on
this machine, with the path of the mounted root as its last argument.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from tests.platforms.roots import overlay_options

TREE = "/srv/imds-relay"
"""Where the clone is in the copy."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PASSED = re.compile(
    r"PIP_\w+|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_PROXY|\w+_proxy"
)
"""Environment variables that say how the package index is reached."""
APT = re.compile(r"Acquire::(https?|Check-Date|Check-Valid-Until|Retries|ForceIPv[46])\b")
"""Settings of apt that say how its mirror is reached."""
DETACH = 2


def main() -> NoReturn:
    """Prepare the copy, run the command in it, and end with its exit status."""
    base, folder, *command = sys.argv[1:]
    root = Path(folder) / "root"
    beside = command[0] == "--beside"
    if not any(root.iterdir()):
        mount("-t", "overlay", "overlay", "-o", overlay_options(Path(base), Path(folder)), root)
    mount(
        "-t", "proc", "proc", "/proc"
    )  # of this process namespace, also for a command on this machine
    if beside:
        configure(root)
        sys.exit(run_as_init([*command[1:], str(root)], dict(os.environ)))
    environment = passed_environment()
    configure(root)
    mount_kernel_file_systems(root)
    bind(Path(folder) / "tree", root / TREE.lstrip("/"))
    cache = Path(folder).parents[1]
    bind(cache / "archives" / Path(base).name, root / "var/cache/apt/archives")
    for value in environment.values():
        if (
            value.startswith("/")
            and Path(value).exists()
            and not (root / value.lstrip("/")).exists()
        ):
            bind(Path(value), root / value.lstrip("/"))
    bind(cache / "pip", root / "root/.cache/pip")
    socket.sethostname("bare")
    enter(root)
    own = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
    }
    os.chdir(TREE)
    sys.exit(run_as_init(command, own | environment))


def passed_environment() -> dict[str, str]:
    """Return the variables of the caller that say how the package index is reached."""
    return {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}


def mount(*arguments: str | Path) -> None:
    """Call mount."""
    subprocess.run(["mount", *arguments], check=True)


def bind(source: Path, target: Path) -> None:
    """Show a file or folder at another place; the place is made where it is missing."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount("--rbind", source, target)


def configure(root: Path) -> None:
    """Write names, certificates, and the settings for package index and mirror."""
    (root / "etc/hosts").write_text(
        "127.0.0.1 localhost bare\n::1 localhost ip6-localhost ip6-loopback\n"
    )
    (root / "etc/hostname").write_text("bare\n")
    resolv = root / "etc/resolv.conf"
    resolv.unlink(missing_ok=True)
    resolv.write_bytes(Path("/etc/resolv.conf").read_bytes())
    certificates = Path("/etc/ssl/certs")
    if certificates.is_dir():
        shutil.rmtree(
            root / "etc/ssl/certs", ignore_errors=True
        )  # its absolute links would lead to files of this machine
        shutil.copytree(certificates, root / "etc/ssl/certs", ignore_dangling_symlinks=True)
    if Path("/etc/pip.conf").exists():
        shutil.copy("/etc/pip.conf", root / "etc/pip.conf")
    if shutil.which("apt-config"):
        settings = subprocess.run(
            ["apt-config", "dump"], check=True, capture_output=True, text=True
        ).stdout
        lines = [line for line in settings.splitlines(keepends=True) if APT.match(line)]
        (root / "etc/apt/apt.conf.d/90-way-to-the-mirror").write_text("".join(lines))


def mount_kernel_file_systems(root: Path) -> None:
    """Mount /proc, /sys and a /dev with the few devices of a container."""
    mount("-t", "proc", "proc", root / "proc")
    mount("--rbind", "/sys", root / "sys")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "dev")
    for name in DEVICES:
        bind(Path("/dev") / name, root / "dev" / name)
    (root / "dev/pts").mkdir()
    mount(
        "-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620,gid=5", "devpts", root / "dev/pts"
    )
    (root / "dev/shm").mkdir()
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / "dev/shm")
    links = {
        "ptmx": "pts/ptmx",
        "fd": "/proc/self/fd",
        "stdin": "fd/0",
        "stdout": "fd/1",
        "stderr": "fd/2",
    }
    for name, target in links.items():
        (root / "dev" / name).symlink_to(target)


def enter(root: Path) -> None:
    """Make the copy the root of this mount namespace. A chroot would forbid user namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    mount("--rbind", root, root)
    os.chdir(root)
    for name, *arguments in (("pivot_root", b".", b"."), ("umount2", b".", DETACH)):
        if getattr(libc, str(name))(*arguments):
            raise OSError(
                ctypes.get_errno(), f"{name} {root} failed: {os.strerror(ctypes.get_errno())}"
            )
    os.chdir("/")


def run_as_init(command: list[str], environment: dict[str, str]) -> int:
    """Run the command and reap orphans, as process 1 must. Return the exit code."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        os.execvpe(command[0], command, environment)
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(status) % 256


if __name__ == "__main__":
    main()
