"""A real browser for tests: the machine's Chromium, headless, driven by Playwright's driver; nothing is downloaded.

A test asks for the fixture `page`, or for `browser` where it needs contexts of its own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import playwright
from playwright.async_api import Browser, async_playwright, expect

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
    """Return the program that drives the browser, or None where it does not start: it is dynamically linked."""
    node = Path(playwright.__file__).parent / "driver" / "node"
    return node if subprocess.run([node, "--version"], check=False, capture_output=True).returncode == 0 else None


@asynccontextmanager
async def running(chromium: Path) -> AsyncIterator[Browser]:
    """Run a browser with a profile of its own, half a second's work; it ends with the block, and when the tests are killed.

    It runs without Chromium's sandbox, which root cannot have: it is shown the relay's own pages and nothing else.
    """
    async with async_playwright() as driving:
        browser = await driving.chromium.launch(executable_path=chromium, chromium_sandbox=False, timeout=STEP_MILLISECONDS)
        try:
            yield browser
        finally:
            await browser.close()
