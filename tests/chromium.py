"""Chromium for tests: the installed one, headless, driven by Playwright's driver. No downloads.

A test asks for the fixture `page`, or for `browser` where it needs contexts of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import playwright
import pytest
from playwright.async_api import Browser, async_playwright, expect

IN_SESSION_LOOP = pytest.mark.asyncio(loop_scope="session")
"""The mark of a file whose tests ask for `browser` or `page`. Its fixtures need the scope, too."""
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
"""What the program is called, by Debian first."""

STEP_MILLISECONDS = 60_000
"""How long one step may take before the test fails; it costs nothing while all is well."""
expect.set_options(timeout=STEP_MILLISECONDS)


def executable() -> Path | None:
    """Return the Chromium of this machine, or None where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return Path(found) if found else None


def driver() -> Path | None:
    """Return the driver of the browser, or None if it does not start (it is dynamically linked)."""
    node = Path(playwright.__file__).parent / "driver" / "node"
    try:
        ran = subprocess.run([node, "--version"], check=False, capture_output=True)
    except OSError:  # its loader is missing, or it is for another processor
        return None
    return node if ran.returncode == 0 else None


LAUNCHER = """#!/bin/sh
for argument do
  shift
  case $argument in --disable-features=*) argument="$argument,$UNUSED_FEATURES" ;; esac
  set -- "$@" "$argument"
done
exec "$CHROMIUM" "$@"
"""
"""Starts Chromium with more features disabled. It takes the last list alone: this extends it."""

UNUSED_FEATURES = "WebUIOmniboxPopup,WebUIOmniboxAimPopup,SpareRendererForSitePerProcess"
"""Pages for the address bar of each window, and a process for the next site.

No test looks at them. They took two thirds of the CPU time of a new page.
"""

GUARD = 'read _; kill -s TERM -- -"$0"'
"""Ends the browser should the tests themselves be killed: their end of the pipe closes then."""


@contextmanager
def serving(chromium: Path, directory: Path) -> Iterator[str]:
    """Run one browser for many tests, in a process of its own; yields the address for `connected`.

    It runs without Chromium's sandbox, which root cannot have. It opens only the relay's own pages.
    """
    launcher = directory / "chromium"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o700)
    settings = directory / "browser.json"
    settings.write_text(
        json.dumps({"executablePath": str(launcher), "chromiumSandbox": False, "host": "127.0.0.1"})
    )
    launch = (sys.executable, "-m", "playwright", "launch-server", "--browser", "chromium")
    with (
        (directory / "output").open("w+") as output,
        subprocess.Popen(
            [*launch, "--config", str(settings)],
            env={**os.environ, "CHROMIUM": str(chromium), "UNUSED_FEATURES": UNUSED_FEATURES},
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        ) as server,
        subprocess.Popen(
            ["sh", "-c", GUARD, str(server.pid)], stdin=subprocess.PIPE, start_new_session=True
        ) as guard,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        try:
            if not address:
                raise RuntimeError(
                    f"the browser did not start; it said:\n{(directory / 'output').read_text()}"
                )
            yield address
        finally:
            guard.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Browser]:
    """Yield the browser of `serving` with a new state. Pages of the block close with it."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect(address, timeout=STEP_MILLISECONDS)
        try:
            yield browser
        finally:
            await browser.close()
