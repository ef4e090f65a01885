"""Firefox for tests: the installed one, headless, driven over WebDriver BiDi without a driver.

Source: https://www.w3.org/TR/webdriver-bidi/
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("firefox-esr", "firefox")
"""What the program is called, by Debian first."""
START_TIMEOUT = 60.0


def executable() -> Path | None:
    """Return the Firefox of this machine, or None where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return Path(found) if found else None


@dataclass(slots=True, kw_only=True)
class FirefoxTab:
    """A tab of a running Firefox."""

    socket: aiohttp.ClientWebSocketResponse
    context: str = ""
    log: list[str] = field(default_factory=list)
    """What the console says at the levels error and warn."""
    _sent: int = 0

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result. Raises RuntimeError if it fails."""
        self._sent += 1
        await self.socket.send_json({"id": self._sent, "method": method, "params": parameters})
        while True:
            message = json.loads((await self.socket.receive()).data)
            if message.get("method") == "log.entryAdded":
                entry = message["params"]
                if entry["level"] in ("error", "warn"):
                    self.log.append(str(entry["text"]))
            if message.get("id") == self._sent:
                if message["type"] == "error":
                    raise RuntimeError(f"{method}: {message['error']}: {message['message']}")
                result: dict[str, Any] = message["result"]
                return result

    async def open(self, url: str) -> None:
        """Open an address, and wait until it has loaded."""
        await self.send("browsingContext.navigate", context=self.context, url=url, wait="complete")

    async def run(self, expression: str) -> Any:
        """Return the value of an expression; of a promise, its result."""
        answer = await self.send(
            "script.evaluate",
            expression=expression,
            target={"context": self.context},
            awaitPromise=True,
        )
        if answer["type"] != "success":
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    async def wait_for(self, expression: str) -> None:
        """Wait until an expression is true. Raises TimeoutError after a minute."""
        async with asyncio.timeout(60):
            while not await self.run(f"Boolean({expression})"):  # noqa: ASYNC110  # no signal
                await asyncio.sleep(0.05)


@asynccontextmanager
async def open_firefox(program: Path, directory: Path) -> AsyncIterator[FirefoxTab]:
    """Run Firefox with a new profile in a directory, and yield its tab."""
    profile = directory / "profile"
    profile.mkdir()
    process = await asyncio.create_subprocess_exec(
        program,
        *("--headless", "--no-remote", "--remote-debugging-port", "0", "--profile", profile),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "HOME": str(directory), "MOZ_HEADLESS": "1"},
    )
    try:
        async with asyncio.timeout(START_TIMEOUT):
            address = await _address(process)
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{address}/session", max_msg_size=0) as socket,
        ):
            tab = FirefoxTab(socket=socket)
            await tab.send("session.new", capabilities={})
            tree = await tab.send("browsingContext.getTree")
            tab.context = tree["contexts"][0]["context"]
            await tab.send("session.subscribe", events=["log.entryAdded"])
            yield tab
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    """Return the address at which Firefox listens. Raises RuntimeError if it ends before."""
    assert process.stderr is not None
    said = []
    async for line in process.stderr:
        said.append(line.decode(errors="replace"))
        found = re.search(r"WebDriver BiDi listening on (ws://\S+)", said[-1])
        if found:
            return found[1]
    raise RuntimeError(f"Firefox did not start; it said:\n{''.join(said)}")
