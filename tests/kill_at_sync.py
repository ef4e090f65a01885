"""Starts a program that is killed as it syncs a file, as a machine without power would end it."""

from __future__ import annotations

import shutil

import pytest

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace fails or kills at an exact system call"
)


def killed_at_sync(number: int) -> tuple[str, ...]:
    """Return what to put before a command, so that its nth sync kills it."""
    # -D: strace runs detached, so the process that is started is the program itself.
    trace = ("-e", "trace=fdatasync,fsync")
    inject = ("-e", f"inject=fdatasync,fsync:signal=SIGKILL:when={number}")
    return ("strace", "-D", "-f", "-qq", "-o", "/dev/null", *trace, *inject)
