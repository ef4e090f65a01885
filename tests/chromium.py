"""Chromium for tests: the installed one, headless, driven by Playwright's driver. No downloads.

A test asks for the fixture `page`, or for `browser` where it needs contexts of its own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

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


LAUNCHER = """\
#!/bin/sh
for argument do
  shift
  case $argument in --disable-features=*) argument="$argument,{unused}" ;; esac
  set -- "$@" "$argument"
done
exec "{chromium}" "$@"
"""
"""Starts Chromium with more features disabled. It takes the last list alone: this extends it."""

UNUSED_FEATURES = "WebUIOmniboxPopup,WebUIOmniboxAimPopup,SpareRendererForSitePerProcess"
"""Pages for the address bar of each window, and a process for the next site.

No test looks at them. They took two thirds of the CPU time of a new page.
"""


@asynccontextmanager
async def running_chromium() -> AsyncIterator[Browser]:
    """Run the browser of this machine; it ends with this process.

    It runs without Chromium's sandbox, which root cannot have. It opens only the relay's own pages.
    """
    path = executable()
    if path is None:
        raise FileNotFoundError(
            "expected an installed Chromium, found none: run `make test`, which installs one, "
            "or install the package chromium"
        )
    with TemporaryDirectory() as folder:
        launcher = Path(folder) / "chromium"
        launcher.write_text(LAUNCHER.format(unused=UNUSED_FEATURES, chromium=path))
        launcher.chmod(0o700)
        async with (
            async_playwright() as playwright,
            await playwright.chromium.launch(
                executable_path=launcher, chromium_sandbox=False, timeout=STEP_MILLISECONDS
            ) as browser,
        ):
            yield browser
